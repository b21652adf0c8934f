"""On a machine with a GPU: build the extension with CUDA in place, run the tests and the benchmarks, keep the figures.

Everything runs in the Python that runs this, which needs torch for CUDA, nvcc, pybind11, ninja and pytest; nothing is
downloaded. The figures go to benchmarks/results/<GPU>.json, those of whatever failed left out. Exits non-zero if there
is no GPU, and if anything failed. `make gpu-check`, or `python benchmarks/gpu_check.py [--quick]`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]

# {name in the results: the script and its options}; each takes --json PATH.
BENCHMARKS = {
    "kernels": ["benchmarks/kernels.py", "--device", "cuda", "--elements", str(2**28)],  # 1 GB in FP32
    "launches": ["benchmarks/launches.py"],
    "optimizer": ["benchmarks/optimizer.py", "--device", "cuda"],
    "step": ["benchmarks/step.py", "--device", "cuda", "--size", "100m"],
    "compile": ["benchmarks/compile.py", "--device", "cuda", "--size", "100m"],
    "recording": ["benchmarks/recording.py", "--device", "cuda"],
}

# Tests that are about training, and about other packages, not about the device. The examples need scikit-learn; the
# packages are of any release on such a machine, and the tests know those that pyproject.toml names.
NOT_OF_THE_DEVICE = [
    "tests/project/test_examples.py",
    "tests/project/test_third_party.py",
    "tests/project/test_transformers_models.py",
    "tests/integrations",
]


def run(*command: str) -> bool:
    """Whether this Python, with the sources in front of what may be installed, ran the command without a failure."""
    print(f"\n=== python {' '.join(command)}", flush=True)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "AMP_PATCH_REQUIRE_EXT": "1",
        "PYTHONUNBUFFERED": "1",
        # The machine's Python has plugins of pytest that nobody asked for; what they warn of would be an error here.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="build and test; no benchmarks")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        built = f"is for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
        sys.exit(
            f"gpu-check: there is no GPU that torch {torch.__version__} can use here (it {built}); nothing was run"
        )

    gpu, major_minor = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ".".join(map(str, major_minor)))
    if not run("setup.py", "build_ext", "--inplace"):
        sys.exit("gpu-check: the build failed")
    if not run("-c", "from amp_patch import _C; import sys; sys.exit('cuda' not in _C.devices)"):
        sys.exit("gpu-check: the extension was built without CUDA")
    run("-m", "amp_patch", "info")

    failed = []
    if not run("-m", "pytest", "-q", "-m", "not slow", *(f"--ignore={path}" for path in NOT_OF_THE_DEVICE)):
        failed.append("tests")
    results: dict[str, object] = {
        "gpu": gpu,
        "compute_capability": list(major_minor),
        "gigabytes": round(torch.cuda.get_device_properties(0).total_memory / 2**30),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tests_passed": not failed,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, command in {} if options.quick else BENCHMARKS.items():
            figures = Path(folder) / f"{name}.json"
            if run(*command, "--json", str(figures)):
                results[name] = json.loads(figures.read_text())
            else:
                failed.append(name)
    if not options.quick:
        target = ROOT / "benchmarks" / "results" / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\ngpu-check: the figures are in {target.relative_to(ROOT)}")
    if failed:
        sys.exit(f"gpu-check: failed on {gpu}: {', '.join(failed)}")
    print(f"gpu-check: all passed on {gpu}")


if __name__ == "__main__":
    main()
