"""The search for modules that a level must keep: its trials, its report, and planted modules that it finds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from compared_runs import compare, seeds
from torch import nn

from amp_patch import amp
from amp_patch.comparison import module_search
from amp_patch.comparison.module_search import Kept, Trial, most_trials, outermost, trial_of
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.recording.module_names import module_names
from amp_patch.diagnose.recording.run import Run
from amp_patch.environment import KEEP_FP32, KEEP_HIGH, NONE_KEPT

GOOD, BAD = (2.0005, 2.0204, 1.9806), (5.0, 6.0, 7.0)


def trial(kept: Kept, good: bool) -> Trial:
    made = compare(seeds("O0", 2.0, 2.02, 1.98), seeds("O2", *(GOOD if good else BAD)))
    return trial_of(kept, made)


def covers(kept: Kept, name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in kept)


def searched(modules: list[str], *needed: str, most: int | None = None, named: Any = ()) -> module_search.Found:
    return module_search.search(
        lambda kept: trial(kept, all(covers(kept, each) for each in needed)), lambda: modules, most, lambda: named
    )


@pytest.mark.parametrize("count", [2, 3, 5, 8, 33])
def test_a_search_finds_one_needed_module_at_any_position(count):
    modules = [f"layer{i}" for i in range(count)]
    for name in modules:
        found = searched(modules, name)
        assert found.answer is not None and found.answer.kept == (name,) and found.complete
        assert len(found.tried) + 1 <= most_trials(count) == int(2 * math.log2(count)) + 3
        assert found.tried[0].kept == () and all(each.kept for each in found.tried[1:])


@pytest.mark.parametrize(("needed", "named", "trials"), [
    (["layer7"], ["layer7"], 2),
    (["layer7"], ["layer7", "layer9"], 3),
    (["layer7", "layer9"], ["layer9", "layer7"], 4),
    (["layer7"], ["layer9"], 8),
    (["layer7"], [], 7),
])  # fmt: skip
def test_the_modules_that_a_survey_names_are_tried_first(needed, named, trials):
    found = searched([f"layer{i}" for i in range(33)], *needed, named=named)
    assert {*found.answer.kept} == {*needed} and found.complete
    assert len(found.tried) == trials


def test_a_survey_that_names_every_module_or_another_model_s_is_no_trial():
    for named in (["a", "b"], ["c"]):
        found = searched(["a", "b"], "a", named=named)
        assert [each.kept for each in found.tried] == [(), ("a",)]


def test_a_level_that_passes_keeps_no_module():
    found = searched(["a", "b"])
    assert found.complete and [each.kept for each in found.tried] == [()] and found.answer.passes
    assert module_search.report("O2", found, "train.py") == [
        f"O2 is as good as O0 with nothing kept: {found.answer.text}."
    ]


def test_a_search_has_no_answer_if_no_module_helps():
    for modules in ([], ["a"], ["a", "b", "c", "d"]):
        found = searched(modules, "the model's own forward")
        assert found.answer is None and not found.complete and len(found.tried) + 1 <= most_trials(len(modules)) + 1
    (said,) = module_search.report("O2", found, "train.py")
    assert said.startswith(
        "O2: no modules were found that make it as good as O0 if kept: collapsed with seeds 0, 1 and 2"
    )


@pytest.mark.parametrize("modules", [["a"], ["a", "b", "c"], ["a.x", "a.y", "a", "b"]])
def test_a_search_has_no_answer_if_every_module_is_needed(modules):
    found = searched(modules, *modules)
    assert found.answer is None and any(each.passes for each in found.tried)
    (said,) = module_search.report("O2", found, "train.py")
    assert said == (
        "O2: keeping modules does not make it as good as O0: all modules would have to be kept, which leaves none at "
        "the level."
    )


NAN = float("nan")


@pytest.mark.parametrize(
    ("base", "level", "options", "reason"),
    [
        (
            seeds("O0", 2.0, 2.1),
            seeds("O3", NAN, NAN, loss=[NAN] * 40, lost_eps=1e-8),
            {},
            "its optimizer's eps 1e-08 is",
        ),
        (seeds("O0", 2.0, 2.1, objectives=2), seeds("O2", 3.0, 3.1, objectives=2), {}, "a sum of the losses of"),
        (seeds("O0", 2.0, 2.0), seeds("O2", 3.0, 3.1), {}, "the seeds change nothing"),
        (seeds("O0", 2.0, 2.1, loss=[NAN] * 40), seeds("O2", 3.0, 3.1), {}, ""),
        (seeds("O0", 2.0, 2.1), seeds("O2", 3.0, 3.1), {"metric": "accuracy"}, "no run gave accuracy"),
    ],
)
def test_a_search_ends_at_a_cause_that_no_module_removes(base, level, options, reason):
    found = module_search.search(lambda kept: trial_of(kept, compare(base, level, **options)), lambda: ["a", "b"])
    assert len(found.tried) == 1 and found.answer is None
    assert reason in found.no_use and found.no_use in module_search.report("O2", found, "train.py")[0]


def test_a_search_continues_after_a_cause_that_modules_may_remove():
    for level in (
        seeds("O2", 3.0, 3.1),
        seeds("O2", NAN, NAN, loss=[NAN] * 40),
        [Run("O2", 0, error="RuntimeError: no")],
    ):
        assert trial_of((), compare(seeds("O0", 2.0, 2.1), level)).hopeless == ""
    assert trial((), good=True).hopeless == ""


def test_a_search_finds_two_modules_if_it_has_enough_trials():
    modules = [f"layer{i}" for i in range(16)]
    found = searched(modules, "layer3", "layer9", most=20)
    assert found.answer.kept == ("layer9", "layer3") and found.complete
    # With fewer trials, the answer is a set that passed, and the report says that it may be too large.
    few = searched(modules, "layer3", "layer9", most=9)
    assert len(few.tried) + 1 == 9 and few.answer.passes and not few.complete
    assert {"layer3", "layer9"} <= set(few.answer.kept)
    assert (
        "The trials were used up; fewer modules may be enough: continue with --resume and more --trials."
        in module_search.report("O2", few, "t.py")
    )


def test_a_kept_module_keeps_the_modules_inside_it():
    modules = ["blocks.0.q", "blocks.0.attend", "blocks.0", "blocks.1.q", "blocks.1.attend", "blocks.1", "head"]
    assert searched(modules, "blocks.1.attend").answer.kept == ("blocks.1.attend",)
    assert searched(modules, "blocks.0").answer.kept == ("blocks.0",)
    assert outermost(["a.b", "a", "a.c.d", "ab", "a"]) == ("a", "ab")


def test_candidates_list_each_module_after_the_modules_inside_it():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Tanh()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[1](self.parts[0](x))

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), Block()), Block())
    names = ["0.0", "0.1.parts.0", "0.1.parts.1", "0.1", "1.parts.0", "1.parts.1", "1"]
    assert module_names([model]) == names
    assert module_names([model, nn.Sequential(nn.Linear(2, 2), nn.Tanh())]) == [*names, "0"]
    multiply = [name for name in names if not name.endswith("parts.1")]
    assert module_names([model, nn.Sequential(nn.MultiheadAttention(4, 1))], with_products=True) == [
        *multiply,
        "0.out_proj",
        "0",
    ]
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    assert module_names([model]) == names
    amp.restore()


def test_a_report_ends_with_the_gaps_the_memory_and_the_code_to_paste():
    def made(kept: Kept) -> Trial:
        megabytes, good = (7, True) if kept == ("head",) else (6, False)
        base = seeds("O0", 2.0, 2.02, 1.98, device="cpu", activations=10 * 2**20)
        return trial_of(
            kept, compare(base, seeds("O2", *(GOOD if good else BAD), device="cpu", activations=megabytes * 2**20))
        )

    found = module_search.search(made, lambda: ["body", "head"])
    said = module_search.report("O2", found, "train.py --lr 1")
    assert said == [
        "without collapsed with seeds 0, 1 and 2: final loss 5.000 to 7.000; 0.60 of O0's memory",
        "with    as good, gap to O0 +0.0005 (+0.025 %, 95 %: +0.013 to +0.037 %); 0.70 of O0's memory",
        "To use it in the script:",
        '    amp.initialize(model, optimizer, opt_level="O2", keep_fp32=["head"])',
        "To use it without an edit:",
        "    AMP_PATCH_OPT_LEVEL=O2 AMP_PATCH_KEEP_FP32=head python -m amp_patch run train.py --lr 1",
    ]
    other = [replace(each, level=replace(each.level, dtype="bfloat16")) for each in found.tried]
    typed = module_search.report("O2", replace(found, tried=other, answer=other[-1]), "train.py")
    assert '    amp.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, keep_fp32=["head"])' in typed
    assert "AMP_PATCH_OPT_LEVEL=O2 AMP_PATCH_DTYPE=bfloat16 AMP_PATCH_KEEP_FP32=head python" in typed[-1]
    low = module_search.report("O6+nvfp4", found, "train.py")
    assert '    amp.initialize(model, optimizer, opt_level="O6", dtype="nvfp4", keep_high=["head"])' in low
    assert "AMP_PATCH_OPT_LEVEL=O6+nvfp4 AMP_PATCH_KEEP_HIGH=head python" in low[-1]
    assert [each.passes for each in found.tried] == [False, False, True]


def test_a_report_asks_for_more_seeds_if_nothing_kept_is_undecided():
    def made(kept: Kept) -> Trial:
        base = seeds("O0", 2.0, 2.02, 1.98)
        return trial_of(kept, compare(base, seeds("O2", *(GOOD if "head" in kept else (2.1, 2.03, 1.99)))))

    found = module_search.search(made, lambda: ["body", "head"])
    assert found.tried[0].level.finding.kind == "undecided" and found.answer.kept == ("head",)
    hint = "That it is worse with nothing kept is not shown: it may be as good with more --seeds."
    assert hint in module_search.report("O2", found, "train.py")
    assert hint not in module_search.report("O2", searched(["body", "head"], "head"), "train.py")


def test_a_run_gets_its_kept_modules_by_environment_variable():
    plan = Plan(("O2", "O6"), keep=("a", "b.c"))
    told = [plan.environment(Run(level)) for level in ("O0", "O2", "O6")]
    assert [(each.get(KEEP_FP32), each.get(KEEP_HIGH)) for each in told] == [
        (None, None),
        ("a,b.c", None),
        (None, "a,b.c"),
    ]
    assert Plan(("O6",), keep=()).environment(Run("O6"))[KEEP_HIGH] == NONE_KEPT
    assert KEEP_FP32 not in Plan(("O2",)).environment(Run("O2"))
