"""Trainings on a device of torch's PrivateUse1 (tests/cuda/device_without_fp64.cpp), in a separate process.

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


def built(folder: str) -> Any:
    """Build the device in `folder`, and register it; return its module, which counts."""
    source = str(TESTS / "cuda" / "device_without_fp64.cpp")
    device = cpp_extension.load("device_without_fp64", [source], extra_cflags=["-O0"], build_directory=folder)
    register(device)
    return device


def register(device: Any) -> None:
    """Give the device a name and the module `torch.singles`, with the functions that torch itself calls."""
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.current_device = (lambda: 1), (lambda: 0)
    module._lazy_init = lambda: None
    module.manual_seed_all = lambda seed: None
    module.synchronize = lambda *_: device.synchronize()
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch._register_device_module(NAME, module)


def tools() -> dict[str, Any]:
    """Return what tools tell of a training there: {name: a number, or a type of device}."""
    from without_fp64 import Net

    from amp_patch import amp
    from amp_patch.run import no_cuda

    model = Net().to(NAME)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    tokens, classes = (torch.randint(5, (6,)).to(NAME) for _ in range(2))
    found = {}
    with amp.record() as recorded, amp.inspect(model, optimizer) as inspection:
        for _ in range(2):
            loss = torch.nn.functional.cross_entropy(model(tokens), classes, reduction="none")
            with amp.scale_loss(loss.mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    found["inspected"], found["recorded"] = len(str(inspection)), recorded.loss
    amp.restore()
    compared = amp.compare_outputs(Net().to(NAME), (tokens,), ["O2", "O5"], targets=classes)
    found["distance"] = compared.distances[0].output
    no_cuda.install(NAME)
    try:
        cuda = Net().cuda()
        with torch.autocast("cuda"):
            found["casts"] = [torch.is_autocast_enabled(kind) for kind in (NAME, "cuda", "cpu")]
        found["moved"] = cuda.head.weight.device.type
        torch.cuda.synchronize()
    finally:
        no_cuda.uninstall()
    return found


def main(folder: str) -> None:
    device = built(folder)
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
    found["tools"] = tools()
    found["called"] = sorted(device.called())
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
