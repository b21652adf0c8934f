"""Unedited scripts of IPEX: they train as with the lines of amp_patch, and names that are not served are refused."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paths import ROOMS, ROOT
from scripts import edited, run_source, start_script
from torch import nn

from amp_patch import amp
from amp_patch.diagnose.recording.run import Run, loads
from amp_patch.run.unedited import ipex
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.run.unedited.script import UneditedScript

NAME = "intel_extension_for_pytorch"

# Scripts in the form of IPEX's documentation. They print nothing, and leave their losses in `losses`. A comment is the
# line that stands there in a script of amp_patch. Each script has ARGUMENTS, those of `optimize`, and DTYPE.
NET = """
import torch
import intel_extension_for_pytorch as ipex
from torch import nn

torch.manual_seed(0)
losses = []
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
net.train()
net, optimizer = ipex.optimize(net, ARGUMENTS) #net, optimizer = amp.initialize(net, optimizer, **options)
"""
PLAIN = """
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", DTYPE): #if True:
        loss = criterion(net(torch.randn(8, 1, 8, 8)), torch.randint(5, (8,)))
    loss.backward() #optimizer
    optimizer.step()
    losses.append(loss.detach())
"""
# The autocast and the GradScaler exist before `optimize` is called.
EARLY = """
import torch
from torch import nn
from intel_extension_for_pytorch import optimize

torch.manual_seed(1)
losses = []
scaler, autocast = torch.amp.GradScaler("cpu"), torch.autocast("cpu", DTYPE)
net = nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(32, 7))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
net, optimizer = optimize(net, ARGUMENTS) #net, optimizer = amp.initialize(net, optimizer, **options)
for step in range(4):
    x = torch.randint(7, (8, 4))
    with autocast: #if True:
        loss = nn.functional.cross_entropy(net(x), x[:, 0])
    optimizer.zero_grad()
    scaler.scale(loss).backward() #with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()
    scaler.step(optimizer) #optimizer.step()
    scaler.update() #pass
    losses.append(loss.detach())
"""
GAN = """
import torch
import intel_extension_for_pytorch as ipex
from torch import nn
from torch.nn import functional as F

torch.manual_seed(2)
losses = []
gen = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
disc = nn.Sequential(nn.Linear(2, 16), nn.Linear(16, 1))
optimizer = first = torch.optim.Adam(disc.parameters(), lr=1e-3)
disc, first = ipex.optimize(disc, ARGUMENTS) #disc, first = amp.initialize(disc, first, **options)
optimizer = second = torch.optim.Adam(gen.parameters(), lr=1e-3)
gen, second = ipex.optimize(gen, ARGUMENTS) #gen, second = amp.initialize(gen, second, **options)
for step in range(4):
    with torch.autocast("cpu", DTYPE): #if True:
        fake = gen(torch.randn(8, 4))
        loss = F.softplus(-disc(torch.randn(8, 2) + 2)).mean() + F.softplus(disc(fake.detach())).mean()
    first.zero_grad()
    loss.backward() #first
    first.step()
    losses.append(loss.detach())
    second.zero_grad()
    loss = F.softplus(-disc(fake)).mean()
    loss.backward() #[first, second]
    second.step()
    losses.append(loss.detach())
"""
SCRIPTS = {"plain": NET + PLAIN, "early": EARLY, "gan": GAN}
SPLIT, WHOLE, HALF = {"opt_level": "O5", "master_weights": "split"}, {"opt_level": "O5"}, {"opt_level": "O2"}
CALL = "dtype=torch.bfloat16, optimizer=optimizer"
CALLS = {
    CALL: SPLIT,
    "torch.bfloat16, optimizer, 'O1', True": SPLIT,
    "dtype=torch.bfloat16, optimizer=optimizer, level='O0'": WHOLE,
    "dtype=torch.bfloat16, optimizer=optimizer, split_master_weight_for_bf16=False": WHOLE,
    "dtype=torch.half, optimizer=optimizer, sample_input=torch.ones(1), fuse_update_step=True": HALF,
}

PRINTS = "print([x.item().hex() for x in losses])"


def filled(script: str, call: str) -> str:
    dtype = "torch.float16" if "half" in call else "torch.bfloat16"
    return script.replace("ARGUMENTS", call).replace("DTYPE", dtype)


@pytest.fixture
def served() -> Iterator[None]:
    ipex.install()
    yield
    ipex.uninstall()


@pytest.fixture
def module(served: None) -> ModuleType:
    return importlib.import_module(NAME)


@pytest.mark.parametrize(("call", "options"), CALLS.items())
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_ipex_trains_as_with_the_lines_of_amp_patch(name, call, options, served):
    found = run_source(filled(SCRIPTS[name], call))
    ipex.uninstall()
    ipex.install()  # the edited script imports it too
    wanted = run_source(edited(filled(SCRIPTS[name], call)), amp=amp, options=options)
    assert torch.equal(torch.stack(found["losses"]), torch.stack(wanted["losses"]))
    model = "gen" if name == "gan" else "net"
    for ours, theirs in zip(found[model].parameters(), wanted[model].parameters(), strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["", "dtype=torch.float32, "])
def test_without_a_low_type_the_script_trains_as_without_ipex(dtype, served):
    found = run_source(filled(NET + PLAIN, f"{dtype}optimizer=optimizer"))
    ipex.uninstall()
    bare = "\n".join(line for line in (NET + PLAIN).splitlines() if "ipex" not in line)
    wanted = run_source(filled(bare, ""))
    assert torch.equal(torch.stack(found["losses"]), torch.stack(wanted["losses"]))
    assert found["net"][0].weight.dtype is torch.float32


@pytest.mark.parametrize(("level", "options"), [("O0", {"opt_level": "O0"}), ("O2", HALF), ("O5", WHOLE)])
def test_a_level_of_the_environment_replaces_that_of_ipex(level, options, served, monkeypatch):
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", level)
    script = filled(NET + PLAIN, "torch.bfloat16, optimizer")
    with UneditedScript(level):
        found = run_source(script)
    wanted = run_source(edited(script), amp=amp, options=options)
    assert torch.equal(torch.stack(found["losses"]), torch.stack(wanted["losses"]))


# ---------------------------------------------------------------------------------------------------------------------
# The commands


def both(tmp_path: Path) -> tuple[str, str]:
    """Return a script of IPEX that prints its losses, and what the edited script prints."""
    # The first line has names that do not make the script one that imports amp_patch.
    script = f"from {NAME} import llm, optimize\n{filled(NET + PLAIN, CALL)}\n{PRINTS}"
    bare = edited(script).replace(f"from {NAME} import llm, optimize", "").replace(f"import {NAME} as ipex", "")
    return script, start_script(tmp_path, f"from amp_patch import amp\noptions = {SPLIT}\n{bare}").stdout


def test_run_and_check_serve_a_script_of_ipex(tmp_path):
    script, wanted = both(tmp_path)
    ran = start_script(tmp_path, script, "-m", "amp_patch", "run")
    assert (ran.returncode, ran.stdout) == (0, wanted)
    assert ran.stderr.startswith("amp_patch: O5+split BF16 trained Sequential by SGD: 4 steps, 0 skipped")
    checked = start_script(tmp_path, script, "-m", "amp_patch", "check", "--run")
    assert checked.returncode == 0 and "clear: O1" in checked.stdout


@pytest.mark.slow
def test_compare_serves_a_script_of_ipex(tmp_path):
    script, wanted = both(tmp_path)
    compared = start_script(tmp_path, script, "-m", "amp_patch", "compare", "--levels", "O0,O5+split", "--seeds", "1")
    assert (compared.returncode, compared.stderr) == (0, "")
    runs = [Run.from_dict(run) for run in loads((tmp_path / "amp_compare/report.json").read_text())["runs"]]
    found = {run.level: [loss.hex() for loss in run.loss] for run in runs}
    assert {*found} == {"O0", "O5+split", "native"} and str(found["O5+split"]) == wanted.strip()


@pytest.mark.slow
def test_a_spawned_process_trains_at_the_level_of_its_optimize(tmp_path):
    script = f"{filled(NET + PLAIN, CALL)}\n{PRINTS}"
    spawning = f"def work(rank):\n{textwrap.indent(script, '    ')}\nif __name__ == '__main__':\n"
    spawning += "    import torch\n    torch.multiprocessing.spawn(work, nprocs=1)\n"
    wanted = start_script(tmp_path, script, "-m", "amp_patch", "run")
    done = start_script(tmp_path, spawning, "-m", "amp_patch", "run")
    assert (done.returncode, done.stdout) == (0, wanted.stdout)
    assert re.match(r"amp_patch: process \d+: O5\+split BF16 trained Sequential by SGD: 4 steps", done.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Inference


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_for_inference_gives_the_outputs_of_fp32_weights_under_autocast(dtype, inplace, module):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3)).eval()
    x = torch.randn(5, 2, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        wanted = net(x)
        low = module.optimize(net, dtype=dtype, inplace=inplace)
        assert torch.equal(low(x), wanted)
    assert (low is net) is inplace
    assert [low[0].weight.dtype, low[1].weight.dtype, low[3].bias.dtype] == [dtype, torch.float32, dtype]
    assert net[0].weight.dtype is (dtype if inplace else torch.float32)


def test_a_model_in_training_mode_without_an_optimizer_is_returned_unchanged(module):
    net = nn.Linear(2, 2)
    assert module.optimize(net, dtype=torch.bfloat16) is net and net.weight.dtype is torch.float32


@pytest.mark.parametrize("first", [True, False])
def test_a_teacher_for_inference_works_beside_a_training(first, module):
    """Called before the training or after, it is FP32 during the training, in which the autocast is disabled."""
    teacher, net = nn.Linear(3, 2).eval(), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if first:
        teacher = module.optimize(teacher, dtype=torch.bfloat16)
    net, optimizer = module.optimize(net, dtype=torch.bfloat16, optimizer=optimizer)
    if not first:
        teacher = module.optimize(teacher, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(4, 3)
        with torch.no_grad():
            wanted = teacher(x)
        assert wanted.dtype is torch.float32
        nn.functional.mse_loss(net(x), wanted).backward()
    optimizer.step()
    assert net.weight.dtype is torch.bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# What is not served


@pytest.mark.parametrize(
    ("lines", "name", "way_out"),
    [
        ("ipex.llm.optimize(1)", "ipex.llm.optimize", "transformers and vLLM"),
        (
            "from intel_extension_for_pytorch.quantization import prepare\nprepare(1)",
            "ipex.quantization.prepare",
            "torchao",
        ),
        ("import intel_extension_for_pytorch.cpu.runtime as runtime\nruntime.pin()", "ipex.cpu.runtime.pin", "numactl"),
        ("with ipex.verbose(ipex.verbose.VERBOSE_ON): pass", "ipex.verbose", "torch.backends.mkldnn.verbose"),
        ("ipex.xpu.set_device(0)", "ipex.xpu.set_device", "torch.xpu"),
        ("class Net(ipex.nn.FrozenBatchNorm2d): pass", "ipex.nn.FrozenBatchNorm2d", "install IPEX"),
        ("ipex.fast_bert(1)", "ipex.fast_bert", "ipex.optimize"),
        ("torch.compile(torch.nn.Linear(1, 1), backend='ipex')", "backend 'ipex'", "inductor"),
        ("ipex.optimize(torch.nn.Linear(1, 1), dtype=torch.int8)", "dtype=torch.int8", "torch.bfloat16"),
        ("ipex.optimize(torch.nn.Linear(1, 1), level='O2')", "level='O2'", "'O1' or 'O0'"),
    ],
)
def test_a_name_that_is_not_served_is_refused_at_its_use(lines, name, way_out, served):
    script = f"import torch\nimport intel_extension_for_pytorch as ipex\n{lines}\n"
    with pytest.raises(ScriptRefused) as caught:
        run_source(script)
    message = str(caught.value)
    assert f"{name}" in message and f"(train.py, line {script.count(chr(10))})" in message and way_out in message


def test_two_levels_in_one_process_are_refused(module):
    for dtype in (torch.bfloat16, torch.float16):
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if dtype is torch.float16:
            with pytest.raises(
                ScriptRefused, match=r"asks for O2 here, and has asked for O5\+split before.*--level O2"
            ):
                module.optimize(net, dtype=dtype, optimizer=optimizer)
        else:
            module.optimize(net, dtype=dtype, optimizer=optimizer)


def test_settings_of_speed_are_accepted_with_a_note(module, capsys):
    module.enable_onednn_fusion(True)
    module.set_fp32_math_mode(mode=module.FP32MathMode.BF32, device="cpu")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("amp_patch: ipex.enable_onednn_fusion has no effect (test_ipex.py, line ")
    assert second.startswith("amp_patch: ipex.set_fp32_math_mode has no effect")
    assert module.xpu.is_available() is False


# ---------------------------------------------------------------------------------------------------------------------
# The module


def test_the_stand_in_is_found_only_between_install_and_uninstall():
    compile, scaler = torch.compile, torch.amp.GradScaler.__init__
    for _ in range(2):
        assert importlib.util.find_spec(NAME) is None
        ipex.install()
        assert importlib.import_module(f"{NAME}.quantization") and sys.modules[NAME].__version__.startswith("2.8.0")
        ipex.uninstall()
        assert not any(name.startswith(NAME) for name in sys.modules)
        assert torch.compile is compile and torch.amp.GradScaler.__init__ is scaler


def test_an_installed_ipex_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: None) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module(NAME).real
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{NAME}.llm")
    del sys.modules[NAME]


def test_the_core_does_not_name_ipex():
    core = (path for path in (ROOT / "amp_patch").rglob("*.py") if not ROOMS.intersection(path.relative_to(ROOT).parts))
    named = [path for path in core if "ipex" in path.read_text().lower()]
    assert named == []
