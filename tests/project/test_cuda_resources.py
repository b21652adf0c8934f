"""tests/cuda/resources.awk and loads.py, which judge what nvcc made, on made reports."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from paths import TESTS

if shutil.which("awk") is None or shutil.which("c++filt") is None:
    pytest.skip("no awk or no c++filt here", allow_module_level=True)

ENTRY = "ptxas info    : Compiling entry function '{name}' for '{arch}'\n"
FRAME = "    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
USED = "ptxas info    : Used 80 registers, used 1 barriers\n"
ADAM, AMSGRAD = (f"void run_coded_steps<Adam<{amsgrad}>, AdamRule, 3840>()" for amsgrad in ("false", "true"))


def judged(*kernels: tuple[str, str, int, int, int]) -> subprocess.CompletedProcess[str]:
    said = "".join(
        ENTRY.format(name=name, arch=arch) + FRAME.format(stack=stack, stores=stores, loads=loads) + USED
        for name, arch, stack, stores, loads in kernels
    )
    command = ["awk", "-f", str(TESTS / "cuda" / "resources.awk")]
    return subprocess.run(command, input=said, capture_output=True, text=True)


def test_kernels_without_spills_pass():
    done = judged((ADAM, "sm_90", 0, 0, 0), (ADAM, "sm_90", 0, 0, 0))
    assert done.returncode == 0 and "2 of them, 80 registers, none spilled" in done.stdout


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ((ADAM, "sm_90", 16, 0, 0), "a stack frame of 16 bytes"),
        ((ADAM, "sm_90", 8, 4, 4), "one kernel spills 8 bytes"),
        ((AMSGRAD, "sm_90", 8, 8, 8), "one kernel spills 16 bytes"),
        ((AMSGRAD, "sm_90", 24, 4, 4), "a stack frame of 24 bytes"),
    ],
)
def test_one_kernel_of_many_with_a_stack_frame_or_spills_fails(kernel, said):
    done = judged((ADAM, "sm_90", 0, 0, 0), kernel, (ADAM, "sm_90", 0, 0, 0))
    assert done.returncode == 1 and said in done.stderr, done


def test_the_most_of_one_kernel_is_told_not_the_sum():
    done = judged((AMSGRAD, "sm_90", 16, 4, 4), (AMSGRAD, "sm_90", 16, 4, 4))
    assert done.returncode == 0 and "8 bytes spilled by one" in done.stdout


def cubin(*names: str) -> str:
    lines = []
    for name in names:
        launcher, functor = name.rstrip(">").split("<")
        lines.append(f"\t.section\t.text._Z{len(launcher)}{launcher}I{len(functor)}{functor}EvT_,\n")
        lines.append("        /*0000*/   LDG.E.128 R4, desc[UR4][R2.64] ;   /* 0x0000000000000000 */\n")
        lines.append("                                                     /* 0x0000000000000000 */\n")
    return "".join(lines)


@pytest.mark.parametrize("left_out", [None, "run_coded_steps<Adam>", "run_steps<Sgd>"])
def test_a_kernel_that_the_cubin_lacks_is_named(left_out):
    names = [f"{kernel}<{rule}>" for kernel in ("run_steps", "run_coded_steps") for rule in ("Sgd", "Adam")]
    said = cubin("run_conversion<EncodeWork>", *(name for name in names if name != left_out))
    done = subprocess.run([sys.executable, TESTS / "cuda" / "loads.py"], input=said, capture_output=True, text=True)
    lacking = [line for line in done.stderr.splitlines() if "is not in what nvdisasm said" in line]
    assert lacking == ([f"loads.py: {left_out} is not in what nvdisasm said"] if left_out else [])
