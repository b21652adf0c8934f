"""tests/cuda/compile.sh with a compiler that only says what nvcc says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from paths import TESTS

NAMESPACE = "_ZN9amp_patch51_GLOBAL__N__88d550de_13_steps_cuda_cu_a1108f4d_9063"
NAMES = [  # run_steps<Sgd<false>, SgdRule, 32508> and <..., 3840>
    f"{NAMESPACE}9run_stepsINS_3SgdILb0EEENS_7SgdRuleELi{size}EEEvNS_9ArgumentsINS_10StepBlocksEXT1_EEEPKS6_iiNS_8Step"
    "WorkIT_EET0_NS_11UnscaleRuleEPKfPKNSB_5RatesE"
    for size in (32508, 3840)
]


def said(name, registers, stored):
    return [
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90'",
        f"ptxas info    : Function properties for {name}",
        f"    8 bytes stack frame, {stored} bytes spill stores, {2 * stored} bytes spill loads",
        f"ptxas info    : Used {registers} registers, used 0 barriers, 8 bytes cumulative stack size",
    ]


def compiled(folder, lines, status):
    nvcc = folder / "nvcc"
    nvcc.write_text("\n".join(["#!/bin/sh", "cat >&2 <<'END'", *lines, "END", f"exit {status}\n"]))
    nvcc.chmod(0o755)
    return subprocess.run(
        ["sh", str(TESTS / "cuda" / "compile.sh")],
        env={**os.environ, "PYTHON": sys.executable, "NVCC": str(nvcc), "CXX": "true"},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt here, which reads the kernels' names")
def test_the_registers_and_spills_of_each_functor_are_printed(tmp_path):
    done = compiled(tmp_path, [*said(NAMES[0], 56, 0), *said(NAMES[1], 64, 20)], 0)
    assert done.returncode == 0, done.stderr
    first, second = [" ".join(line.split()) for line in done.stdout.splitlines()[:2]]
    assert first == "csrc/kernels/cuda.cu compiles"
    assert second == "sm_90 run_steps<Sgd<false>> 2 of them, 56 to 64 registers, 60 bytes spilled"


def test_an_error_is_shown_without_what_came_before_it(tmp_path):
    done = compiled(tmp_path, [*said(NAMES[0], 56, 0), "cuda.cu(3): error: a semicolon"], 2)
    assert done.returncode != 0 and done.stderr == "cuda.cu(3): error: a semicolon\n" and "compiles" not in done.stdout
