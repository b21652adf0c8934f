"""Which master belongs to which parameter, by identity alone."""

from __future__ import annotations

import gc

import torch
from torch import nn

from amp_patch import links


def parameter():
    return nn.Parameter(torch.ones(2, dtype=torch.bfloat16))


def test_a_master_is_found_by_the_identity_of_its_parameter():
    param, equal, master = parameter(), parameter(), torch.ones(2)
    link = links.connect(param, master)
    assert links.link_of(param) is link and links.master_of(param) is master
    assert links.link_of(equal) is None and links.master_of(equal) is None
    assert links.connect(param, master) is link
    assert links.linked([equal, param]) == [(param, link)]
    links.disconnect(param)
    links.disconnect(equal)
    assert links.link_of(param) is None


def test_another_master_takes_the_place_of_the_first():
    param, master = parameter(), torch.ones(2)
    first = links.connect(param, torch.ones(2))
    second = links.connect(param, master)
    assert second is not first and links.master_of(param) is master


def test_a_parameter_that_dies_takes_its_link_along_and_no_other():
    gc.collect()
    before = len(links._links)
    params = [parameter() for _ in range(100)]
    for param in params:
        links.connect(param, torch.ones(2))
        links.disconnect(param)
        links.connect(param, torch.ones(2))
    kept = params[50]
    del params, param
    assert len(links._links) == before + 1 and links.link_of(kept) is not None
    fresh = [parameter() for _ in range(100)]  # some of them at the addresses of those that died
    assert all(links.link_of(param) is None for param in fresh)


def test_a_parameter_that_dies_in_a_cycle_takes_its_link_along():
    gc.collect()
    before = len(links._links)
    for _ in range(10):
        param = parameter()
        param.itself = param
        links.connect(param, torch.ones(2))
    del param
    gc.collect()
    assert len(links._links) == before
