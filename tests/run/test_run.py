"""`python -m amp_patch run`: a script runs as under `python`, but finds Apex."""

from __future__ import annotations

import signal
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from paths import ROOT
from scripts import environment, run_each

from amp_patch.run import run

pytestmark = pytest.mark.program

ENVIRONMENT = environment(PYTHONDONTWRITEBYTECODE="1")

# Prints all that a script can see of how it was started. (Python's versions differ in an empty __annotations__.)
PROBE = """
import pickle, sys

class Net:
    pass

seen = {name: repr(value) for name, value in globals().items()}
for name in sorted(seen.keys() - {"__loader__", "__spec__", "__annotations__"}):
    print(name, seen[name])
print(type(__loader__).__name__, getattr(__spec__, "name", None), getattr(__spec__, "origin", None))
print(sys.argv, sys.path)
print(pickle.loads(pickle.dumps(Net)) is Net, Net.__module__, sys.modules["__main__"].__dict__ is globals())
"""

STARTS = [
    ["script.py", "--help", "-m", "--device=1", "--", "a b"],
    ["elsewhere/link.py"],
    ["package"],
    ["packed.zip", "x"],
    ["-m", "package", "-h"],
    ["-m", "package.module"],
]

# Scripts, and what Python exits with after them.
ENDS = {
    "raises.py": ("def f():\n    1 / 0\nf()", 1),
    "own_hook.py": ("import sys\nsys.excepthook = lambda *_: print(_[2].tb_frame.f_code.co_name)\n[].pop()", 1),
    "exits.py": ("raise SystemExit(3)", 3),
    "exits_with_words.py": ("import sys; sys.exit('that is all')", 1),
    "does_not_compile.py": ("x = 1\nif x\n", 1),
    "is_interrupted.py": ("raise KeyboardInterrupt", -signal.SIGINT),
    "goes_on_at_exit.py": ("import atexit, __main__\natexit.register(lambda: print(__main__.x))\nx = 'last'", 0),
}

MISSING = [["missing.py"], ["-m", "missing"], ["missing/"], []]


def python(*arguments: str, cwd: Path) -> list[str | int]:
    """Run python. Return its stdout, its stderr and its exit code."""
    command = [sys.executable, *arguments]
    ran = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    return [ran.stdout, ran.stderr, ran.returncode]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, (script, _) in ENDS.items():
        (folder / name).write_text(script)
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sibling.py").write_text("value = 1\n")
    (package / "__main__.py").write_text(PROBE)
    (package / "module.py").write_text("from .sibling import value\n" + PROBE)
    (folder / "script.py").write_text(PROBE)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "link.py").symlink_to(folder / "script.py")
    with zipfile.ZipFile(folder / "packed.zip", "w") as packed:
        packed.writestr("__main__.py", PROBE)
    return folder


@pytest.fixture(scope="module")
def ran(scripts) -> dict[str, list[str | int]]:
    """Return stdout, stderr and exit code of `run` for each list of arguments."""
    cases = [*STARTS, *([name] for name in ENDS), *MISSING]
    ended = run_each(scripts, [(case, {}) for case in cases], ENVIRONMENT)
    return {" ".join(case): result for case, result in zip(cases, ended, strict=True)}


@pytest.mark.parametrize("arguments", STARTS, ids=" ".join)
def test_a_script_under_run_has_the_environment_of_python(scripts, ran, arguments):
    plain = python(*arguments, cwd=scripts)
    assert plain[0].count("\n") > 10 and plain[1:] == ["", 0]
    assert ran[" ".join(arguments)] == plain


@pytest.mark.parametrize("name", ENDS)
def test_a_script_under_run_ends_as_under_python(scripts, ran, name):
    plain = python(name, cwd=scripts)
    assert plain[2] == ENDS[name][1]
    assert ran[name] == plain


def test_a_missing_script_fails_as_under_python(scripts, ran):
    for arguments in MISSING[:-1]:
        printed, errors, code = ran[" ".join(arguments)]
        assert code == python(*arguments, cwd=scripts)[2] != 0
        assert "missing" in errors and "Traceback" not in errors and not printed
    assert ran[""][2] == 2 and "usage: python -m amp_patch run" in ran[""][1]


SPAWNS = """
import json, os, sys
import torch
from apex import amp
import amp_C

class Net:
    pass

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return index, __name__, Net(), amp.__name__

def work(rank, depth):
    print(rank, depth, __name__, sys.argv[1:], flush=True)
    if depth:
        torch.multiprocessing.spawn(work, args=(depth - 1,), nprocs=1)

if __name__ == "__main__":
    # amp_patch is not to be found from here unless somebody says where.
    os.chdir("/")
    del os.environ["PYTHONPATH"]
    sys.path[:] = [path for path in sys.path if path != sys.argv[1]]
    torch.multiprocessing.spawn(work, args=(1,), nprocs=1)
    loader = torch.utils.data.DataLoader(
        Numbers(), num_workers=1, batch_size=2, multiprocessing_context="forkserver", collate_fn=list
    )
    for batch in loader:
        for index, name, net, served_by in batch:
            print(index, name, type(net) is Net, served_by)
"""


def test_child_processes_of_a_script_find_apex(tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    printed, errors, code = python("-m", "amp_patch", "run", "spawns.py", str(ROOT), cwd=tmp_path)
    assert (errors, code) == ("", 0)
    assert printed.splitlines() == [
        f"0 1 __mp_main__ ['{ROOT}']",
        f"0 0 __mp_main__ ['{ROOT}']",
        "0 __mp_main__ True amp_patch.apex.amp",
        "1 __mp_main__ True amp_patch.apex.amp",
    ]


def test_a_fork_server_does_not_import_the_script():
    """From Python 3.14 on, a fork server would import the script with its own sys.path, which has no Apex."""
    name = "init_main_from_path"
    told = partial(run._preparation_data, lambda process: {name: "train.py", "sys_path": []}, None)
    assert told("ignore") == {"sys_path": []}
    assert name in told("Process-1")


DISTRIBUTED = """
import os, sys
import torch
import apex.amp
torch.distributed.init_process_group("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
sys.stdout.write(f"{sys.argv[1:]} {os.path.basename(__file__)} {total.item()}\\n")  # in one piece
sys.stdout.flush()
torch.distributed.destroy_process_group()
"""


def test_a_script_under_run_trains_in_every_rank_of_a_launcher(tmp_path):
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "amp_patch"]
    printed, errors, code = python(*launcher, "run", "train.py", "--theirs", "x", cwd=tmp_path)
    assert code == 0, errors
    assert printed.count("['--theirs', 'x'] train.py 2.0") == 2


# A thread that needs the interpreter once more when the script is done, as gloo's do after a backward of DDP.
STRAGGLER = """
import atexit, os, threading, time
import torch
over = threading.Event()
def straggle():
    over.wait()
    time.sleep(0.02)
    os.write(1, b"through")
threading.Thread(target=straggle, daemon=True).start()
torch.distributed.init_process_group("nccl", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
atexit.register(over.set)
torch.distributed.destroy_process_group()
"""


def test_run_waits_for_gloo_threads_at_the_end(tmp_path):
    (tmp_path / "train.py").write_text(STRAGGLER)
    printed, _, code = python("-m", "amp_patch", "run", "--device", "cpu", "train.py", cwd=tmp_path)
    assert (printed.splitlines()[-1], code) == ("through", 0)  # torch 2.8's gloo prints how many ranks it knows


def test_a_script_next_to_a_real_apex_imports_it_with_amp(tmp_path):
    """A script imports the copy of Apex in its folder or in the working directory, and finds our amp in it."""
    apex = tmp_path / "apex"
    apex.mkdir()
    (apex / "__init__.py").write_text("theirs = True\n")
    (tmp_path / "train.py").write_text("import apex\nfrom apex import amp\nprint(apex.theirs, amp.__name__)\n")
    for arguments, cwd in ([str(tmp_path / "train.py")], ROOT), (["-m", "train"], tmp_path):
        assert run_each(cwd, [(arguments, {})], ENVIRONMENT) == [["True amp_patch.apex.amp\n", "", 0]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script finds its GPU")
def test_a_script_without_a_gpu_fails_with_a_hint_at_device_cpu(tmp_path):
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.Linear(2, 2).cuda()\n")
    ((_, errors, code),) = run_each(tmp_path, [(["train.py"], {})], ENVIRONMENT)
    assert code == 1 and errors.splitlines()[-1].endswith("python -m amp_patch run --device cpu ...")


def test_a_script_of_ipex_fails_with_the_level_that_replaces_it(tmp_path):
    (tmp_path / "train.py").write_text("import intel_extension_for_pytorch as ipex\nipex.optimize\n")
    (tmp_path / "guarded.py").write_text(
        "try:\n    import intel_extension_for_pytorch\nexcept ImportError:\n    print(1)\n"
    )
    (_, errors, code), guarded = run_each(tmp_path, [(["train.py"], {}), (["guarded.py"], {})], ENVIRONMENT)
    assert code == 1 and "No module named 'intel_extension_for_pytorch'" in errors
    assert errors.splitlines()[-1].endswith(
        "leave its lines out and run the script with --level O5+split (BF16), or O2 (FP16)"
    )
    assert guarded == ["1\n", "", 0]
