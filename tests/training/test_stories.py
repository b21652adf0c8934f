"""Stories: random lives of trainings, each event of which leaves amp_patch where training by hand is, to the bit.

tests/helpers/stories.py says what happens in a story, and tests/helpers/life.py what is compared. `make stories` tells
more of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lives import tell
from stories import DESERVED, Event, Story, complaint, drawn

pytestmark = [pytest.mark.filterwarnings(f"ignore:{pattern}") for pattern in DESERVED]
FEW, MANY, CHAPTER = range(40), range(40, 200), 40


def tell_all(seeds: range) -> None:
    """Tell all of them; a message for each that fails."""
    failed = [text for seed in seeds if (text := complaint(drawn(seed), tell))]
    assert not failed, "\n\n".join(failed)


def test_stories() -> None:
    tell_all(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("first", MANY[::CHAPTER])
def test_many_stories(first: int) -> None:
    tell_all(range(first, first + CHAPTER))


PLAIN_STORY = Story(
    options={"opt_level": "O5", "cpu_half": "native"},
    kinds=("conv", "linear", "linear"),
    owners=(0, "nobody", 0),
    kept=(),
    optimizers=("SGD",),
    losses=1,
    interval=2,
    scheduled="",
    seed=3,
    events=(),
)
BACKWARD = Event(
    "backward",
    {
        "loss": 0,
        "targets": (0,),
        "micro_batches": 1,
        "delays": False,
        "waits": False,
        "later": False,
        "plant": None,
        "factor": 1.0,
        "raises": "",
        "seed": 5,
    },
)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("seed", range(2))
def test_a_training_by_hand_does_not_emulate_what_an_earlier_training_did(half, seed):
    """amp_patch emulates in each backward outside of regions, while any training of the process does."""
    options = {"opt_level": "O1", "dtype": half, "loss_scale": 1.0}
    resume = {"options": {**options, "cpu_half": "native"}, "load": "after", "seed": 7}
    tell(
        replace(
            PLAIN_STORY,
            seed=seed,
            options={**options, "cpu_half": "emulate"},
            events=(BACKWARD, Event("resume", resume), BACKWARD, Event("look", {})),
        )
    )


def again(options: dict[str, Any]) -> Event:
    return Event(
        "again",
        {"options": {**options, "cpu_half": "native"}, "restore": False, "keeps": False, "steps": False, "seed": 1},
    )


LOW = {"opt_level": "O3", "dtype": torch.bfloat16}
SPLIT = {"opt_level": "O5", "master_weights": "split"}
STEP = Event("step", {"which": (0,), "guarded": False})
GROUP = Event("group", {"optimizer": 0, "lr": 0.125, "seed": 0})


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW fused"])
@pytest.mark.parametrize(
    ("options", "layer", "masters"),
    [
        pytest.param({"opt_level": "O2"}, 1, GROUP, id="a group at O2"),
        pytest.param({"opt_level": "O5"}, 1, GROUP, id="a group at O5"),
        pytest.param(SPLIT, 1, GROUP, id="a group of split masters"),
        pytest.param(LOW, 0, again({"opt_level": "O5"}), id="O3, then O5"),
        pytest.param(LOW, 0, again(SPLIT), id="O3, then split masters"),
        pytest.param({"opt_level": "O5"}, 0, again({"opt_level": "O2"}), id="O5, then O2"),
    ],
)
def test_weights_that_are_frozen_as_masters_are_made_get_theirs_when_they_are_trained(
    options, layer, masters, optimizer
):
    turned = Event("freeze", {"seed": layer})
    events = (BACKWARD, STEP, turned, masters, BACKWARD, STEP, turned, Event("look", {}), STEP, BACKWARD, STEP)
    tell(replace(PLAIN_STORY, options={**options, "cpu_half": "native"}, optimizers=(optimizer,), events=events))


@pytest.mark.parametrize("options", [{"opt_level": "O2", "loss_scale": 4.0}, {"opt_level": "O5"}, SPLIT])
def test_a_step_with_another_losss_gradient_of_a_weight_without_a_master_is_refused(options):
    turned, of_other = Event("freeze", {"seed": 1}), Event("backward", BACKWARD.how | {"targets": (1,)})
    events = (turned, GROUP, turned, of_other, STEP, BACKWARD, STEP)
    two = replace(PLAIN_STORY, owners=(0, "nobody", 1), optimizers=("SGD", "SGD"))
    tell(replace(two, options={**options, "cpu_half": "native"}, events=events))


def test_a_story_that_fails_is_a_script() -> None:
    def fails(story: Story) -> None:
        assert all(event.what != "step" for event in story.events), "told"

    text = complaint(drawn(3), fails)
    assert text.startswith("seed 3: AssertionError: told") and text.count("Event(") == 1
    assert not complaint(drawn(3), lambda story: None)
