"""Stories: random lives of trainings, each event of which leaves amp_patch where training by hand is, to the bit.

tests/helpers/stories.py says what happens in a story, and tests/helpers/life.py what is compared. `make stories` tells
more of them.
"""

from __future__ import annotations

from dataclasses import replace

import lives
import pytest
import torch
from lives import tell
from stories import Event, Story, complaint, drawn, shortest

pytestmark = [
    # A story draws its events without a thought for what warns of a strange order.
    pytest.mark.filterwarnings("ignore:.*gathered for this optimizer"),
    pytest.mark.filterwarnings("ignore:scale_loss. the loss depends on no parameter"),  # all of them are frozen
    pytest.mark.filterwarnings(r"ignore:Detected call of `lr_scheduler.step\(\)`"),
]
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


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_story_adds_no_frozen_weights_to_an_optimizer(level):
    """Such weights have no masters until they are unfrozen, which the training by hand does not know."""
    group = {"optimizer": 0, "lr": 0.125, "seed": 0}
    tell(
        replace(PLAIN_STORY, options={"opt_level": level}, events=(Event("freeze", {"seed": 1}), Event("group", group)))
    )


def test_a_failing_story_is_shrunk_to_few_events() -> None:
    story = drawn(3)

    def fails(story: Story) -> bool:
        return {"backward", "step"} <= {event.what for event in story.events}

    assert fails(story) and len(story.events) > 4
    assert sorted(event.what for event in shortest(story, fails).events) == ["backward", "step"]


def test_a_story_that_fails_is_a_script() -> None:
    def fails(story: Story) -> None:
        assert all(event.what != "step" for event in story.events), "told"

    text = complaint(drawn(3), fails)
    assert text.startswith("seed 3: AssertionError: told") and text.count("Event(") == 1
    assert not complaint(drawn(3), lambda story: None)


def test_a_script_tells_the_story_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Story] = []
    monkeypatch.setattr(lives, "tell", told.append)
    exec(drawn(3).script(), {})
    assert told == [drawn(3)]
