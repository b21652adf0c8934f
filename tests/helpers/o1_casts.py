"""Casts of an O1 policy without a training, for the tests of rules, regions and wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import DTYPES

from amp_patch.casts import install
from amp_patch.casts import state as casts_state
from amp_patch.policy import Policy

LOW = [dtype for dtype in DTYPES if dtype in (torch.float16, torch.bfloat16)]
HALF, FULL = torch.float16, torch.float32


def o1(dtype: torch.dtype = HALF, **options: Any) -> Policy:
    return Policy("O1", dtype=dtype, patch_torch_functions=True, **options)


OFF = Policy("O2", cast_model_type=HALF)


@pytest.fixture(name="_clean", autouse=True)
def clean_fixture(clean_casts: None) -> Iterator[None]:
    registered = dict(install._registered)
    yield
    install._registered.clear()
    install._registered.update(registered)


@pytest.fixture(name="installed")
def installed_fixture() -> Iterator[None]:
    install.install()
    yield


needs_install = pytest.mark.usefixtures("installed")


def cached() -> int:
    return casts_state.state().cached()
