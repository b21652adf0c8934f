"""tests/cuda/compile.sh, with a stand-in for nvcc that prints nvcc's output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from paths import ROOT, TESTS

pytestmark = pytest.mark.slow  # a tool that no training needs

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


def tool(path, *lines):
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def compiled(folder, lines, status, listing=None, *, ask_torch=False, cxx="true", fails="no such option"):
    """compile.sh with an nvcc that says `lines`, and an nvdisasm that says `listing` where a cubin was made.

    The nvcc fails with `status`, or where it is given the option `fails`. The script is told that torch has no folders
    of headers, which no compiler here reads, unless with `ask_torch`.
    """
    (folder / "said").write_text("\n".join(lines) + "\n")
    (folder / "listing").write_text("\n".join(listing or []) + "\n")
    keep = 'while [ $# -gt 1 ]; do if [ "$1" = --keep-dir ]; then touch "$2/x.compute_90.cubin"; fi; shift; done'
    keep = keep if listing else ""
    notes = f'echo "$*" >>{folder}/calls; case "$*" in *"{fails}"*) echo "error: {fails}" >&2; exit 2;; esac'
    nvcc = tool(folder / "nvcc", notes, f"cat {folder}/said >&2", keep, f"exit {status}")
    nvdisasm = tool(folder / "nvdisasm", f"cat {folder}/listing")
    no_folders = 'case "$2" in *include_paths*) exit;; esac'
    python = sys.executable if ask_torch else tool(folder / "python", no_folders, f'exec {sys.executable} "$@"')
    return subprocess.run(
        ["sh", str(TESTS / "cuda" / "compile.sh")],
        env={**os.environ, "PYTHON": python, "NVCC": nvcc, "NVDISASM": nvdisasm, "CXX": cxx},
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
    done = compiled(tmp_path, [*said(NAMES[0], 56, 0), "cuda.cu(3): error: a semicolon"], 2, ask_torch=True)
    # A torch for CUDA says, as it is imported, that there is no GPU.
    shown = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert done.returncode != 0 and shown == ["cuda.cu(3): error: a semicolon"] and "compiles" not in done.stdout


def instruction(text, sets=7, waits=0):
    """Two lines as of `nvdisasm -hex`: in bits 110 and 116 of the code the barrier that is set, those waited for."""
    control = (sets << 5 | waits << 11) << 41
    return [f"        /*0010*/    {text} ;    /* 0x0000000812088980 */", f"            /* 0x{control:016x} */"]


def loads(registers, sets=0):
    return [instruction(f"LDG.E.128 R{r}, desc[UR6][R2.64]", sets=sets) for r in registers]


def test_each_source_is_compiled_as_c_plus_plus_17_too(tmp_path):
    cxx = tool(tmp_path / "c++", f'echo "$*" >>{tmp_path}/calls')
    done = compiled(tmp_path, said(NAMES[0], 56, 0), 0, cxx=cxx)
    assert done.returncode == 0, done.stderr
    as_17 = [call for call in (tmp_path / "calls").read_text().splitlines() if "-std=c++17" in call.split()]
    sources = [path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.c*")]
    assert {str(path) for path in sources} == {word for call in as_17 for word in call.split() if "csrc/" in word}
    assert len(as_17) == len(sources) + 1, "and the headers of torch once"
