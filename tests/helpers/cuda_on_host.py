"""A module with csrc/kernels/*.cu and their launches, compiled for the host by tests/cuda/on_host.cpp."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paths import ROOT, TESTS
from torch.utils import cpp_extension

LAUNCH = re.compile(r"(\w+(?:<[\w:, ]+>)?)\s*<<<(.*?)>>>\(", re.DOTALL)
# (file, what is there, what is put in its place): each must be there.
CHANGES = [
    ("*.cu cuda_launch.h", r"#include <c10/cuda/\w+\.h>", ""),
    ("*.cu", r"c10::DeviceType::CUDA", "c10::DeviceType::CPU"),
    ("*.cu", LAUNCH.pattern, r"host::launch(\2, [&](const auto&... a) { \1(a...); }, "),
    ("*.cu cuda_launch.h", r"\bat::empty\(", "host::empty("),
    ("steps_cuda.cu cuda_launch.h", r"\.pinned_memory\(true\)", ""),
    (
        "cuda_launch.h",
        r"constexpr (int64_t kMaxBlocks = )std::numeric_limits<int32_t>::max\(\)",
        r"const \1host::most_blocks",
    ),
    (
        "step_ops.h",
        r"job\.host_steps = counted_on != job\.device;",
        "job.host_steps = !steps.empty() && host::steps_on_host;",
    ),
]


def build(folder: Path) -> Any:
    """The module, whose functions are those of `amp_patch._C`; on_host.cpp says what else it has."""
    for path in (ROOT / "csrc" / "kernels").iterdir():
        text = path.read_text()
        for files, there, instead in CHANGES:
            if any(path.match(file) for file in files.split()):
                text, count = re.subn(there, instead, text, flags=re.DOTALL)
                assert count, f"{path.name} has no {there}"
        (folder / path.name).write_text(text)
    source = folder / "on_host.cpp"
    source.write_text((TESTS / "cuda" / "on_host.cpp").read_text())
    flags = ["-O1", "-ffp-contract=off", "-std=c++20"]
    return cpp_extension.load("cuda_on_host", [str(source)], extra_cflags=flags, build_directory=str(folder))
