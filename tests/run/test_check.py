"""`python -m amp_patch check`, and the table of the surface that it and docs/apex.md show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from paths import ROOT

import amp_patch.apex
from amp_patch.__main__ import main
from amp_patch.run import apex_served, apex_surface, check

AMP = "apex.amp"


def names_in(tmp_path: Path, source: str, file: str = "train.py") -> dict[str, list[str]]:
    """The names that a script uses, with the lines."""
    path = tmp_path / file
    path.write_text(source)
    uses, errors = check.read([path])
    assert not errors
    return {name: [place.removeprefix(f"{path}:") for place in places] for name, places in uses.items()}


FORMS = {
    "from apex import amp\namp.initialize(m)": {AMP: ["1"], "apex.amp.initialize": ["2"]},
    "import apex\napex.amp.scale_loss": {"apex": ["1"], "apex.amp.scale_loss": ["2"]},
    "import apex.amp\napex.amp.init()": {AMP: ["1"], "apex.amp.init": ["2"]},
    "import apex.amp as a\na.init()": {AMP: ["1"], "apex.amp.init": ["2"]},
    "from apex.parallel import DistributedDataParallel as DDP\nDDP(m)": {
        "apex.parallel.DistributedDataParallel": ["1", "2"]
    },
    "import amp_C as c\nc.multi_tensor_scale(1, b, l, 1.)": {"amp_C": ["1"], "amp_C.multi_tensor_scale": ["2"]},
    "from apex.fp16_utils import *\ntofp16()\nprint()": {
        "apex.fp16_utils.*": ["1"],
        "apex.fp16_utils.tofp16": ["2"],
    },
    "from apex import amp\namp._amp_state.loss_scalers[0]._loss_scale = 2**20": {
        AMP: ["1"],
        "apex.amp._amp_state.loss_scalers[]._loss_scale": ["2"],
    },
    "from apex.amp import _amp_state as s\nx = s.loss_scalers[i]\nx.loss_scale()": {
        "apex.amp._amp_state": ["1"],
        "apex.amp._amp_state.loss_scalers": ["2"],
        "apex.amp._amp_state.loss_scalers[].loss_scale": ["3"],
    },
    "from apex.amp._amp_state import _amp_state\n_amp_state.opt_properties.master_weights": {
        "apex.amp._amp_state._amp_state": ["1"],
        "apex.amp._amp_state._amp_state.opt_properties.master_weights": ["2"],
    },
    "for p in self.opt._amp_stash.all_fp16_params:\n  opt._lazy_init_maybe_master_weights()": {
        "optimizer._amp_stash.all_fp16_params": ["1"],
        "optimizer._lazy_init_maybe_master_weights": ["2"],
    },
    "if hasattr(optimizer, '_amp_stash'): pass": {"optimizer._amp_stash": ["1"]},
    "try:\n  from apex import amp\nexcept ImportError:\n  amp = None\namp.initialize()\namp.gone": {
        AMP: ["2"],
        "apex.amp.initialize": ["5"],
        "apex.amp.gone": ["6"],
    },
    "from importlib import import_module\na = import_module('apex.amp')\na.initialize()": {
        AMP: ["2"],
        "apex.amp.initialize": ["3"],
    },
    "def f():\n  import apex\n  return getattr(apex.amp, 'initialize')": {
        "apex": ["2"],
        "apex.amp.initialize": ["3"],
        AMP: ["3"],
    },
    "from apex import amp\namp.initialize(m, o,\n  opt_level='O1', combine_grad=True, made_up=1, **more)": {
        AMP: ["1"],
        "apex.amp.initialize": ["2"],
        "apex.amp.initialize().combine_grad": ["3"],
        "apex.amp.initialize().made_up": ["3"],
    },
    "from apex.contrib.sparsity import ASP": {"apex.contrib.sparsity.ASP": ["1"]},
    "import fused_layer_norm_cuda": {"fused_layer_norm_cuda": ["1"]},
    # Not Apex: another package's amp, hasattr, a relative import, a variable of the script.
    "from apex import amp\nfrom torch.cuda import amp\namp.autocast()": {AMP: ["1"]},
    "import apex\nhasattr(apex, 'transformer')\ngetattr(apex.amp, 'gone', None)": {"apex": ["1", "2"], AMP: ["3"]},
    "from .apex import amp\nfrom . import apex\nimport apexes\namp.x\napex = 3": {},
}


@pytest.mark.parametrize("source", FORMS)
def test_check_finds_apex_names_in_every_form_of_import(tmp_path, source):
    assert names_in(tmp_path, source) == FORMS[source]


def test_check_tells_served_differing_and_missing_names_apart():
    def status(name: str) -> tuple[str, str]:
        found = apex_served.finding(name, [])
        return found.status, found.note

    assert status("apex.amp.master_params") == status("apex_C.flatten") == ("served", "")
    assert status("apex.parallel.DistributedDataParallel")[0] == "differs"
    # Every path to an object gives the same answer.
    assert status("apex.parallel.distributed.DistributedDataParallel") == status(
        "apex.parallel.DistributedDataParallel"
    )
    assert status("apex.amp.frontend.initialize") == status("apex.amp.initialize")
    assert status("apex.amp.initialize().combine_ddp") == ("missing", "")
    assert status("apex.amp.initialize().opt_level") == ("served", "")
    for name in (
        "apex.amp.gone",
        "apex.amp.initialize().gone",
        "amp_C.gone",
        "apex.amp._amp_state.loss_scalers[].gone",
        "optimizer._amp_stash.gone",
    ):
        assert status(name) == ("missing", "")
    assert status("apex.contrib.sparsity.ASP") == ("missing", amp_patch.apex.ELSEWHERE["contrib"])
    assert status("fused_layer_norm_cuda")[0] == "missing"


def test_check_reports_names_and_exits_with_1_if_one_is_missing(tmp_path, capsys):
    (tmp_path / "a.py").write_text("from apex import amp\namp.master_params(o)\n")
    (tmp_path / "b.py").write_text("import apex.contrib.sparsity\nfrom apex.parallel import DistributedDataParallel\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.py").write_text("import apex.gone")

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check", *arguments])
        return ended.value.code, capsys.readouterr().out

    code, printed = run(str(tmp_path))
    assert code == 1
    lines = printed.splitlines()
    assert [line.split()[:2] for line in lines if line[0] != " "] == [
        ["missing", "apex.contrib.sparsity"],
        ["differs", "apex.parallel.DistributedDataParallel"],
        ["served", "apex.amp"],
        ["served", "apex.amp.master_params"],
        ["4", "names"],
    ]
    assert lines[-1] == "4 names of Apex: 3 served, 1 of them with differences, 1 missing"
    assert f"{tmp_path}/b.py:1" in printed and "apex.contrib" in printed
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)

    code, printed = run("--json", str(tmp_path / "a.py"))
    assert code == 0
    assert json.loads(printed) == {
        "names": [
            {"name": "apex.amp", "status": "served", "note": "", "places": [f"{tmp_path}/a.py:1"]},
            {"name": "apex.amp.master_params", "status": "served", "note": "", "places": [f"{tmp_path}/a.py:2"]},
        ],
        "errors": [],
    }


BAD = {
    "two.py": ("import apex\nprint 'epoch'\n", r"two\.py:2: not Python 3 \(2to3 converts Python 2\): "),
    "except.py": ("try:\n  pass\nexcept IOError, e:\n  pass\n", r"except\.py:3: not Python 3"),
    "broken.py": ("def f(:\n", r"broken\.py:1: not Python 3"),
    "null.py": ("x = '\0'\n", r"null\.py:"),
    "bad.ipynb": ("{", r"bad\.ipynb: "),
    "missing.py": (None, r"missing\.py: No such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_check_names_an_unreadable_file_and_reads_the_others(tmp_path, capsys, name):
    source, words = BAD[name]
    if source is not None:
        (tmp_path / name).write_text(source)
    (tmp_path / "good.py").write_text("import apex.amp")
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path / name), str(tmp_path / "good.py")])
    assert ended.value.code == 2
    printed = capsys.readouterr().out
    assert "served   apex.amp" in printed
    assert re.search(words, " ".join(printed.split()))


@pytest.mark.parametrize("command", [["compare"], ["search"], ["run"], ["run", "--level", "O5"], ["check", "--run"]])
def test_a_notebook_is_refused_with_its_conversion(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "")  # `check --run` sets it
    monkeypatch.chdir(tmp_path)
    Path("my nb.ipynb").write_text(json.dumps({"cells": []}))
    with pytest.raises(SystemExit) as caught:
        main([*command, "my nb.ipynb"])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "my nb.ipynb is a notebook: convert it" in said
    assert "jupyter nbconvert --to script 'my nb.ipynb', and give 'my nb.py'" in said
    assert ("amp.compare(train)" in said) is (command == ["compare"])


def test_check_reads_the_code_cells_of_notebooks(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": "from apex import amp"},
        {"cell_type": "code", "source": ["!pip install apex\n", "%matplotlib inline\n", "from apex import amp\n"]},
        {"cell_type": "code", "source": "if x:\n    !ls\namp.initialize(model)"},
        {"cell_type": "code", "source": "%%bash\nfrom apex import amp"},
    ]
    used = names_in(tmp_path, json.dumps({"cells": cells}), "train.ipynb")
    path = tmp_path / "train.ipynb"
    assert used == {"apex.amp": [f"{path}[2]:3"], "apex.amp.initialize": [f"{path}[3]:3"]}


def test_check_finds_every_name_of_the_legacy_programs_served(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", str(ROOT / "examples" / "legacy")])
    assert ended.value.code == 0
    assert "apex.amp.initialize" in capsys.readouterr().out


def page() -> dict[str, str]:
    """The names of docs/apex.md's table, each with its difference from Apex."""
    shown = (ROOT / "docs" / "apex.md").read_text().partition("<!-- surface: begin -->")[2]
    told = {}
    for line in shown.partition("<!-- surface: end -->")[0].strip().splitlines()[2:]:
        family, served_by, difference = line.strip("| ").split(" | ")
        first, *names = re.findall(r"`([^`]+)`", family)
        assert served_by
        for name in [f"{first}.{name}" for name in names] or [first]:
            assert name not in told
            told[name] = "" if difference == "nothing" else difference
    return told


def test_check_tells_the_differences_that_the_page_on_apex_shows():
    findings = [apex_served.finding(name, []) for name in page()]
    assert {found.name: found.note for found in findings} == page()
    assert not [found.name for found in findings if found.status == "missing"]
    assert set(apex_surface.DIFFERENCES.values()) == set(page().values()) - {""}


def test_each_public_name_is_on_the_page_on_apex():
    objects = {id(apex_served.resolve(path)) for path in page()}
    objects |= {id(module) for module in apex_served.modules().values()}
    public = {
        f"{name}.{public}"
        for name, module in apex_served.modules().items()
        for public in getattr(module, "__all__", ())
    }
    assert len(public) > 100
    assert not {name for name in public - set(page()) if id(apex_served.resolve(name)) not in objects}


def test_check_of_an_fp32_script_points_to_the_check_that_runs_it(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import torch\ntorch.nn.Linear(1, 1)(torch.ones(1)).backward()\n")
    with pytest.raises(SystemExit) as end:
        main(["check", str(path)])
    assert end.value.code == 0 and "for an FP32 script, check --run" in capsys.readouterr().out
