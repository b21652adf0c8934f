"""The samples that a recording counts, and its end after a given number of steps."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from amp_patch import amp
from amp_patch.diagnose.recording.recorder import Recorder
from amp_patch.diagnose.recording.run import Run


@pytest.mark.parametrize(("dim", "samples"), [(0, 10), (1, 6), (-1, 8), (3, 0)])
def test_samples_are_counted_along_the_named_dimension(dim, samples):
    """Of two micro-batches of (5, 3, 4)."""
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O0", verbosity=0)
    run = Run("O0")
    with Recorder([run], batch_dim=dim):
        for _ in range(2):
            for _ in range(2):
                with amp.scale_loss(net(torch.ones(5, 3, 4)).sum(), optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
    assert run.samples == [samples] * 2
    amp.restore()


def test_a_recording_is_whole_when_the_steps_asked_for_are_taken():
    """The script may catch `Enough`, and be ended from outside."""
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer = amp.initialize(net, optimizer, opt_level="O0", verbosity=0)
    run = Run("O0")
    with Recorder([run], stop_after=3) as recorder:
        for step in range(5):
            with amp.scale_loss(net(torch.ones(5, 4)).sum(), optimizer) as scaled:
                scaled.backward()
            assert (recorder.has_enough, run.weights) == ((True, 40) if step > 2 else (False, 0))
            with suppress(SystemExit):
                optimizer.step()
        amp.log(after=1.0)
    assert run.steps == 3 and run.logged == {"after": [(3, 1.0)]}
    amp.restore()
