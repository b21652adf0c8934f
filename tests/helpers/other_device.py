"""Trainings on a device of torch's PrivateUse1 (tests/cuda/device_without_fp64.cpp), in a process of their own.

`python other_device.py FOLDER` builds the device in FOLDER and prints JSON: for each case of `without_fp64.py` its
losses while the device has FP64 and while it has none, and the operators that ran on the device.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
from paths import TESTS
from torch.utils import cpp_extension

NAME = "singles"  # torch allows letters only


def register() -> None:
    """Give the device a name and the module `torch.singles`, with the functions that torch itself calls."""
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = (lambda: 1), (lambda: 0)
    module._lazy_init = lambda: None
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(NAME, module)


def main(folder: str) -> None:
    source = str(TESTS / "cuda" / "device_without_fp64.cpp")
    device = cpp_extension.load("device_without_fp64", [source], extra_cflags=["-O0"], build_directory=folder)
    register()
    from without_fp64 import CASES, losses

    from amp_patch.multi_tensor import plain_steps
    from amp_patch.support.devices import widest

    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {"types": [], "losses": {}, "steps": 0}
    adam = plain_steps.adam

    def counted(*args: Any) -> None:
        found["steps"] += 1
        adam(*args)

    plain_steps.adam = counted
    for has_fp64 in True, False:
        device.allow_fp64(has_fp64)
        widest.cache_clear()
        found["types"].append(str(widest(torch.device(NAME))))
        for level, name in CASES:
            found["losses"].setdefault(f"{level} {name}", []).append(losses(level, name, NAME))
    found["called"] = sorted(device.called())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
