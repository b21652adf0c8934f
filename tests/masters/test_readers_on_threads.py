"""A thread reads a model while another trains it: reads return values, and the training has the same bits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from split_masters import MAKERS, OPTIM, iterate_split, net
from torch import Tensor, nn
from training import masters_of, run_in_thread, same

from amp_patch import amp
from amp_patch.masters import closed_master

FORMS = (True, "split", "stochastic")
ADAGRAD = lambda p: OPTIM.Adagrad(p, lr=0.05, fused=True)  # noqa: E731
WAYS = {"AdamW": MAKERS["AdamW"], "NAdam": MAKERS["NAdam"], "Adagrad": ADAGRAD}  # one pass, portions, its own step
READS: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda model, _: [value.sum().item() for value in model.state_dict().values()],
    "masters": lambda _, optimizer: [2 * master.sum().item() for master in amp.master_params(optimizer)],
    "forward": lambda model, _: torch.no_grad()(model)(torch.ones(2, 16)).sum().item(),
    "fp32_copy": lambda model, _: [p.sum().item() for p in amp.fp32_copy(model).parameters()],
}


def start(make: Any, form: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
    model = net() if model is None else model
    return amp.initialize(model, make(model.parameters()), opt_level="O5", master_weights=form, verbosity=0)


def result_of(model: Any, optimizer: Any) -> tuple[list[Tensor], Any]:
    result = [*(p.detach().clone() for p in model.parameters()), *masters_of(optimizer)]
    state = amp.state_dict()
    amp.restore()
    return result, state


@contextmanager
def reading(read: Callable[[], Any]) -> Iterator[list[Any]]:
    """What another thread has read, again and again, during the block."""
    found: list[Any] = []
    begun, over = threading.Event(), threading.Event()

    def run() -> None:
        while not over.is_set():
            try:
                found.append(read())
            except Exception as error:
                found.append(error)
            begun.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        begun.wait()
        yield found
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)


def check_readers(form: Any, make: Any, names: Any) -> None:
    def train(read: Callable[[Any, Any], Any] | None) -> tuple[list[Tensor], Any]:
        model, optimizer = start(make, form)
        if read is None:
            iterate_split(model, optimizer, range(5))
        else:
            with reading(lambda: read(model, optimizer)) as found:
                iterate_split(model, optimizer, range(5))
            assert not [error for error in found if isinstance(error, Exception)]
        return result_of(model, optimizer)

    wanted, state = train(None)
    for name in names:
        found, its_state = train(READS[name])
        assert same(found, wanted) and its_state == state, name


every_form = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("form", ["split", "stochastic"])
@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_readers_on_another_thread_change_no_bit_of_a_training(make, form):
    check_readers(form, make, ("state_dict", "masters"))


@pytest.mark.parametrize("read", [READS["forward"], READS["state_dict"]], ids=["forward", "state_dict"])
def test_masters_that_another_thread_has_copied_back_are_not_copied_back_again(read, monkeypatch):
    # A second copy would be an in-place write between the other thread's forward and its backward.
    model, optimizer = start(WAYS["AdamW"], True)
    weights = list(model.parameters())
    for master in amp.master_params(optimizer):
        master.data.copy_(2 * master.detach())
        torch.autograd.graph.increment_version(master)
    before = [weight._version for weight in weights]
    own, came = closed_master.lock, []

    class Contended:
        def __enter__(self) -> None:
            if not came:
                came.append(True)
                run_in_thread(lambda: read(model, optimizer))
            own.acquire()

        def __exit__(self, *raised: object) -> None:
            own.release()

    monkeypatch.setattr(closed_master, "lock", Contended())
    read(model, optimizer)
    assert came and [weight._version for weight in weights] == [version + 1 for version in before]


@every_form
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_in_the_middle_of_another_threads_step_changes_no_bit_of_it(read, form):
    class InTwoParts(torch.optim.Adagrad):
        def step(self, closure: Any = None) -> Any:
            super().step()
            found.append(run_in_thread(lambda: read(model, self)))
            return super().step()

    class InTwoPartsUnread(torch.optim.Adagrad):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return super().step()

    results, found = [], []
    for kind in (InTwoPartsUnread, InTwoParts):
        model, optimizer = start(lambda p, kind=kind: kind(p, lr=0.05, fused=True), form)
        iterate_split(model, optimizer, range(2))
        results.append(result_of(model, optimizer))
    (wanted, state), (result, its_state) = results
    assert same(result, wanted) and its_state == state and len(found) == 2
