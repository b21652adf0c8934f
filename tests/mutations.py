"""The code broken in one place at a time, and whether the tests that should see it do.

    make mutations ONLY="clip DDP"    # those whose words have one of these in them; without ONLY all: some minutes

Each mutation is made in a copy of the tree, by its text, which must be there once. The named tests run until the first
one fails, which must pass again without the mutation. Exits non-zero if none failed, or if the text was not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from loss_mutations import OF_THE_LOSS

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "out", "build", "__pycache__", ".*_cache", "*.egg-info")
SECONDS = 600.0  # until the tests of a mutation are ended


class Mutation(NamedTuple):
    """One thing that is broken.

    Attributes:
        breaks: what does not hold any more.
        text: of one file of amp_patch/, which has it once, and no other file at all.
        instead: what takes its place.
        tests: files, wherever under tests/ they lie, the most telling first.
    """

    breaks: str
    text: str
    instead: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "resolve: BF16 needs no loss scale",
        "scale = 1.0 if dtype is torch.bfloat16 else policy.loss_scale",
        "scale = policy.loss_scale",
        ("test_policy.py",),
    ),
    Mutation(
        "loss scale: it grows by its growth factor",
        "growth_factor=self.growth_factor,",
        "growth_factor=1.0,",
        ("test_loss_scaler.py",),
    ),
    Mutation(
        "loss scale: it falls once for a loss that overflows twice before a step",
        "scaler.record(overall * (1 - torch.stack(earlier).amax()) if earlier else overall)",
        "scaler.record(overall)",
        ("test_scale_loss.py",),
    ),
    Mutation(
        "keep_fp32: a head's result reaches the model's output in FP32",
        "to = Tensor.to if running.policy is None else round_result",
        "to = Tensor.to",
        ("test_kept_results.py",),
    ),
    Mutation(
        "keep_fp32: a view of a result has its FP32 numbers",
        "if function in _OF_VIEWS:",
        "if function in _OF_VIEWS and function is not Tensor.__getitem__:",
        ("test_kept_results.py",),
    ),
    Mutation(
        "keep_fp32: a write into a rounded result ends its FP32 numbers",
        "return self.exact if self.state == now else None",
        "return self.exact",
        ("test_kept_results.py",),
    ),
    Mutation(
        "keep_fp32: the upcast of a result that user code may write is no second name of it",
        "copied, shared.given = shared.given, True",
        "copied = False",
        ("test_kept_results.py",),
    ),
    Mutation(
        "keep_fp32: autograd saves no FP32 result in the middle of a model",
        "args, kwargs = tree.map_tensors(plain, (args, kwargs))",
        "args, kwargs = args, kwargs",
        ("test_kept_results.py",),
    ),
    *(Mutation(*words) for words in OF_THE_LOSS),
    Mutation(
        "compare_outputs: the ratio of a sequence is the product of its tokens'",
        "sequence = of_tokens.sum(-1).expm1().abs().max().item()",
        "sequence = of_tokens.expm1().abs().max().item()",
        ("test_output_distance.py",),
    ),
    Mutation(
        "embeddings on a CPU: gradients are summed in FP32",
        "sums = op(grad.float(), places.to(indices.dtype), len(occurring), -1, *rest)",
        "sums = op(grad, places.to(indices.dtype), len(occurring), -1, *rest)",
        ("test_low_sums.py",),
    ),
    Mutation(
        "layer norms on a CPU: gradients are summed in FP32",
        "own = [wanted[0], False, False] if is_sum and _is_low_on_cpu(given) else wanted",
        "own = wanted",
        ("test_low_sums.py",),
    ),
    Mutation(
        "recurrent networks on a CPU: autograd adds the gradients of a weight in FP32",
        "alias = tensor.float()",
        "alias = tensor.view_as(tensor)",
        ("test_low_sums_of_ops.py",),
    ),
    Mutation(
        "skip: a step after an overflow does nothing",
        "return bool(scalers), None",
        "return False, None",
        ("test_overflow.py",),
    ),
    Mutation(
        "unscale: an earlier gradient is not checked again with what is added to it",
        'sums, watch, check="x")',
        'sums, watch, check="both")',
        ("test_earlier_gradients.py",),
    ),
    Mutation(
        "masters: what somebody wrote into one is published",
        "written = links.versions.written()",
        "written = []",
        ("test_edited_masters.py",),
    ),
    Mutation(
        "masters: one adopts what somebody wrote into the weight",
        "multi_tensor.multi_tensor_adopt(params, masters)",
        "pass",
        ("test_edited_masters.py",),
    ),
    Mutation(
        "closed masters: what was written into one is kept before its memory is given back",
        "written = [(param, master) for param, master in opened if not _stored_is_newest(master)]",
        "written = []",
        ("test_split_masters.py",),
    ),
    Mutation(
        "stochastic rounding: no two steps of a weight have the same chance",
        "master.draw, master.edits = master.draw + 1, 0",
        "pass",
        ("test_stochastic_masters.py",),
    ),
    Mutation(
        "state in eight bits: what is written into a state is encoded",
        "            encode(list(written.values()), [wholes[codes] for codes in written])",
        "            pass",
        ("test_coded_state.py",),
    ),
    Mutation(
        "state in eight bits: a portion's state is encoded again",
        "            encode([coded for coded, _ in found], [now for _, now in found])",
        "            pass",
        ("test_coded_state.py",),
    ),
    Mutation(
        "state in eight bits: a state dict has FP32",
        'tree.map_tensors(in_fp32, found["state"])',
        'found["state"]',
        ("test_compressed_states.py", "test_coded_state.py"),
    ),
    Mutation(
        "clipping: gradients within the norm stay as they are",
        "(norm + 1e-6)).clamp(max=1.0)",
        "(norm + 1e-6))",
        ("test_half_gradients.py",),
    ),
    Mutation(
        "one pass: a `step` that somebody has put into the class is called",
        'module.partition(".")[0] in ("torch", "amp_patch") for module in modules',
        "True for module in modules",
        ("test_one_pass_hooks.py",),
    ),
    Mutation(
        "portions: of a parameter without a gradient nothing is stepped",
        "if not has_gradient(record.master):\n                continue\n            count = record.master.numel()",
        "count = record.master.numel()",
        ("test_portions.py",),
    ),
    Mutation(
        "a registered optimizer: what its step writes into a group is written back once",
        "written.append((owner, entries))",
        "written.append((owner, {}))",
        ("test_per_parameter.py",),
    ),
    Mutation(
        "several optimizers: a GAN's other gradients are away during a backward",
        "_Bystander(param, gradients.take(param), stash, *before)",
        "_Bystander(param, None, stash, *before)",
        ("test_edited_gradients.py", "test_unowned.py"),
    ),
    Mutation(
        "O1: operands of two types get the wider one",
        "functools.reduce(torch.promote_types, voters)",
        "voters[0]",
        ("test_oplists.py",),
    ),
    Mutation(
        "O1: a banned function is refused",
        "if low is not None and not policy.allow_banned:",
        "if False:",
        ("test_oplists.py",),
    ),
    Mutation(
        "O1: the cast of a weight is made anew when that was written",
        "if entry is not None and entry[0]() is weight and entry[1] == version:",
        "if entry is not None and entry[0]() is weight:",
        ("test_weight_cache.py",),
    ),
    Mutation(
        "keep_fp32: batch norms stay FP32",
        "norms = filter(is_batch_norm, modules) if policy.keep_batchnorm_fp32 else ()",
        "norms: tuple[()] = ()",
        ("test_levels.py",),
    ),
    Mutation(
        "state dict: a weight is its master's FP32 value",
        'state[name] = master if kwargs.get("keep_vars", False) else master.detach()',
        "state[name] = value.float()",
        ("test_loading.py", "test_model.py"),
    ),
    Mutation(
        "restore: two replacements of one name come apart last first",
        "self._undo.pop()()",
        "self._undo.pop(0)()",
        ("test_patches.py",),
    ),
    Mutation(
        "FSDP: gradients that it holds back are unscaled when they are reduced",
        "now.held_back = now.held_back or fsdp.hold_gradients_back(sharded)",
        "now.held_back = now.held_back or False",
        ("test_fsdp_gradients.py",),
    ),
    Mutation(
        "DDP: masters are broadcast with the weights",
        "masters = [master.detach() for master in links.masters]",
        "masters = [master.detach().clone() for master in links.masters]",
        ("test_ddp.py",),
    ),
    Mutation(
        "kernels: tensors at one place have one shape",
        "if t.shape != first.shape:",
        "if False:",
        ("test_kernel_errors.py",),
    ),
    Mutation(
        "compare: faster is what is faster in every round",
        "if self.low > 1:",
        "if self.high > 1:",
        ("test_page.py", "test_recommendation.py"),
    ),
    Mutation(
        "unedited scripts: the script's own GradScaler does nothing",
        "                if not self.kept:\n                    scaler._enabled = False",
        "                if not self.kept:",
        ("test_unedited.py",),
    ),
    Mutation(
        "hooks: a post-hook of the user's may write masters",
        "publish_written(links)  # users' post-hooks may have written masters",
        "pass",
        ("test_step_order.py",),
    ),
    Mutation(
        "copies: an optimizer takes what is known of its training along",
        "return state if stash is None else {**state,",
        "return state if True else {**state,",
        ("test_events.py",),
    ),
    Mutation(
        "copies: a GradScaler's has the overflows that its hysteresis has counted",
        '"_init_hysteresis_tracker": self._get_hysteresis_tracker(),',
        '"_init_hysteresis_tracker": self._init_hysteresis_tracker,',
        ("test_capabilities.py",),
    ),
    Mutation(
        "recordings: the beginning of a line that is still being written is kept",
        "return rest",
        'return b""',
        ("test_any_run.py",),
    ),
)


class Broken(Exception):
    """Why a mutation could not be made."""


def holder(tree: Path, mutation: Mutation) -> Path:
    """The file of `tree` that has the text of a mutation; Broken unless that is there once."""
    found = [(path, path.read_text().count(mutation.text)) for path in sorted((tree / "amp_patch").rglob("*.py"))]
    there = [(path.relative_to(tree), count) for path, count in found if count]
    if [count for _, count in there] != [1]:
        where = ", ".join(f"{path} has it {count} times" for path, count in there) or "no file has it"
        raise Broken(f"{where}: {mutation.text!r}")
    return tree / there[0][0]


def file_of(name: str, tree: Path) -> Path:
    """The file of tests of this name, which no two files have, from the root of `tree`."""
    for path in (tree / "tests").rglob(name):
        return path.relative_to(tree)
    raise Broken(f"there is no {name} under tests/")


def first_failure(tree: Path, tests: Sequence[str]) -> str:
    """The first test to fail of these files or ids, run in `tree`; "" if none does.

    Raises:
        Broken: the tests could not be run, or took too long.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # Compiled code is told by the source's time and size: a mutation may leave both, and the tests would not see it.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--tb=no", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise Broken(f"the tests took longer than {SECONDS:g} s") from None
    found = re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return ""
    if done.returncode != 1 or not found:
        raise Broken(f"pytest gave {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
    return str(found[-1])


def outcome(tree: Path, mutation: Mutation) -> str:
    """The test that has caught the mutation; Broken if none has, or it could not be made. `tree` is left as it was."""
    path = holder(tree, mutation)
    before, times = path.read_text(), path.stat()
    tests = [str(file_of(name, tree)) for name in mutation.tests]
    path.write_text(before.replace(mutation.text, mutation.instead))
    try:
        caught = first_failure(tree, tests)
    finally:
        path.write_text(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the compiled file of the mutation is stale
    if not caught:
        raise Broken("NOT CAUGHT")
    if first_failure(tree, [caught]):
        raise Broken(f"{caught} fails without it, too")
    return caught


def run(mutations: Sequence[Mutation], source: Path, say: Callable[[str], None]) -> bool:
    """Make each mutation in a copy of `source`, and say what has caught it; whether all were caught."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "amp_patch"
        shutil.copytree(source, tree, ignore=NOT_COPIED)
        for mutation in mutations:
            start = time.monotonic()
            try:
                result = f"caught by {outcome(tree, mutation)}"
            except Broken as error:
                failed += 1
                result = str(error)
            say(f"{mutation.breaks}\n    {result} ({time.monotonic() - start:.0f} s)")
    say(f"{len(mutations) - failed} of {len(mutations)} mutations caught")
    return not failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="WORD", help="mutations with one of these words alone")
    words = [word.lower() for word in parser.parse_args(arguments).only]
    chosen = [m for m in MUTATIONS if not words or any(word in m.breaks.lower() for word in words)]
    if not chosen:
        parser.error(f"no mutation has {' or '.join(words)} in its words")
    return 0 if run(chosen, ROOT, lambda row: print(row, flush=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
