"""The samples of an epoch, read from a DataLoader."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from amp_patch.diagnose.recording.epoch_size import EpochSize

DATA = TensorDataset(torch.arange(10.0))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(())] * 10)


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (DataLoader(DATA, batch_size=4), 10),
        (DataLoader(DATA, batch_size=4, drop_last=True), 8),
        (DataLoader(DATA, sampler=SequentialSampler(range(6)), batch_size=4), 6),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, False)), 0),
        (DataLoader(DATA, batch_size=None), 0),
        (DataLoader(Stream(), batch_size=4), 0),
    ],
    ids=["whole", "drop_last", "sampler", "batch_sampler", "no batches", "a stream"],
)
def test_an_epoch_has_the_samples_that_its_loader_yields(loader, samples):
    with EpochSize(lambda: 0) as epoch:
        yielded = sum(batch[0].numel() for batch in loader) if samples else 0
    assert epoch.samples == samples == yielded


def test_the_loader_of_a_training_is_the_last_one_before_its_first_step():
    steps, original = 0, DataLoader.__iter__
    validation, train = DataLoader(DATA, batch_size=10), DataLoader(DATA, batch_size=4, drop_last=True)
    with EpochSize(lambda: steps) as epoch:
        for loader in (validation, train):
            list(loader)
        steps = 1
        list(validation)
    assert (epoch.samples, epoch.batch) == (8, 4)
    assert DataLoader.__iter__ is original
