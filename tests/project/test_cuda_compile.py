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


def loop(*instructions, functor="N9amp_patch3SgdILb0EEE"):
    """A kernel's listing: run_steps<functor, ...> that does `instructions` again and again."""
    name = NAMES[0].replace("NS_3SgdILb0EEE", functor)
    code = [*instructions, instruction("@P0 BRA `(.L_x_1)"), instruction("EXIT")]
    return [f'\t.section\t.text.{name},"ax",@progbits', ".L_x_1:", *(line for one in code for line in one)]


def loads(registers, sets=0):
    return [instruction(f"LDG.E.128 R{r}, desc[UR6][R2.64]", sets=sets) for r in registers]


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt here, which reads the kernels' names")
def test_loads_in_flight_are_counted_until_one_is_waited_for(tmp_path):
    use = instruction("FMUL R20, R4, R40", waits=1)
    other = instruction("FMUL R20, R40, R41", waits=2)  # waits for another barrier
    together = loop(*loads([4, 8]), other, *loads([12]), use)
    done = compiled(tmp_path, said(NAMES[0], 56, 0), 0, together)
    assert done.returncode == 0, done.stderr
    assert "run_steps<Sgd<false>>            3 to 3 loads of 16 bytes in flight" in done.stdout

    apart = loop(*loads([4, 8]), use, *loads([12]), use)  # the third is issued when the first has come
    done = compiled(tmp_path, said(NAMES[0], 56, 0), 0, apart)
    assert done.returncode != 0 and "run_steps<Sgd<false>>: 1 loads in flight, 3 are wanted" in done.stderr

    choice = [  # of a pack of one or the other width, into the same registers
        instruction("@P1 LDG.E.64 R12, desc[UR6][R2.64]", sets=0),
        instruction("@!P1 LDG.E.128 R12, desc[UR6][R2.64]", sets=0),
    ]
    assert compiled(tmp_path, said(NAMES[0], 56, 0), 0, loop(*loads([4, 8]), *choice, use)).returncode == 0
    done = compiled(tmp_path, said(NAMES[0], 56, 0), 0, loop(*loads([4]), *choice, use))
    assert done.returncode != 0 and "2 loads in flight" in done.stderr
    assert compiled(tmp_path, said(NAMES[0], 56, 0), 0, ["no kernel"]).returncode != 0


def test_without_a_disassembler_no_loads_are_counted(tmp_path):
    done = compiled(tmp_path, said(NAMES[0], 56, 0), 0)
    assert done.returncode == 0 and "in flight" not in done.stdout


def test_each_source_is_compiled_as_c_plus_plus_17_too(tmp_path):
    cxx = tool(tmp_path / "c++", f'echo "$*" >>{tmp_path}/calls')
    done = compiled(tmp_path, said(NAMES[0], 56, 0), 0, cxx=cxx)
    assert done.returncode == 0, done.stderr
    as_17 = [call for call in (tmp_path / "calls").read_text().splitlines() if "-std=c++17" in call.split()]
    sources = [path.relative_to(ROOT) for path in (ROOT / "csrc").rglob("*.c*")]
    assert {str(path) for path in sources} == {word for call in as_17 for word in call.split() if "csrc/" in word}
    assert len(as_17) == len(sources) + 1, "and the headers of torch once"


def test_a_source_that_c_plus_plus_17_does_not_take_is_an_error(tmp_path):
    done = compiled(tmp_path, said(NAMES[0], 56, 0), 0, fails="-std=c++17")
    assert done.returncode != 0 and "error: -std=c++17" in done.stderr
    cxx = tool(tmp_path / "c++", 'case "$*" in *-std=c++17*wrapper.cpp*) exit 1;; esac')
    assert compiled(tmp_path, said(NAMES[0], 56, 0), 0, cxx=cxx).returncode != 0
