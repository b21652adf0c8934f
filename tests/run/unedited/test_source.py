"""Which scripts choose their level by amp_patch or Apex, and are not trained at another one."""

from __future__ import annotations

import ast
import types
import zipfile
import zipimport

import pytest

from amp_patch.run.unedited.source import chooses, chooses_its_level

CHOOSES = [
    "from amp_patch import amp\nmodel, optimizer = amp.initialize(model, optimizer)",
    "def main():\n    import amp_patch as ap\n    ap.amp.initialize(model, optimizer)",
    "try:\n    from apex import amp\nexcept ImportError:\n    from torch.cuda import amp\nif fp16: amp.initialize(m)",
    "from apex.amp import initialize as start",
    "from apex.amp import *\ninitialize(model, optimizer)",
    "import apex\nhandle = apex.amp.init()",
    "from apex.fp16_utils import FP16_Optimizer",
    "import apex.fp16_utils",
    "from amp_patch.integrations.lightning import OptLevelPrecision",
    "from amp_patch import graph",
    "import amp_patch\nwith amp_patch.autocast(): pass",
    "from amp_patch.cuda.amp import GradScaler",
    "from helper import start\nfrom amp_patch import amp\nwith amp.scale_loss(loss, optimizer) as scaled: pass",
]
IS_WATCHED = [
    "",
    "import torch",
    "from amp_patch import amp\namp.log(held_out_loss=1.0)",
    "from amp_patch import amp\n# initialize the weights\nmodel.initialize()\nprint('initialize')\namp.log(loss=1)",
    "import amp_patch\ndef initialize(module): pass\nmodel.apply(initialize)\namp_patch.amp.log(loss=1)",
    "from amp_patch import amp\nfrom torch.amp import autocast, GradScaler\nwith autocast('cpu'): amp.log(loss=1)",
    "import deepspeed\nfrom amp_patch import amp\ndeepspeed.initialize(model)\namp.log(loss=1)",
    "from apex import optimizers\noptimizers.FusedAdam(params)",
    "from apex.parallel import SyncBatchNorm",
    "import torch\nfrom amp_patch.optimizers import FusedLAMB\nwith torch.cuda.amp.autocast(): pass",
    "from .amp_patch import initialize",
    "from amp_patches import initialize",
]


@pytest.mark.parametrize("code", CHOOSES)
def test_a_script_that_names_a_choice_of_ours_is_left_alone(code):
    assert chooses(ast.parse(code))


@pytest.mark.parametrize("code", IS_WATCHED)
def test_a_script_that_names_none_is_watched(code):
    assert not chooses(ast.parse(code))


def test_a_file_and_a_zip_file_are_read_before_they_run(tmp_path):
    (tmp_path / "train.py").write_text(CHOOSES[0])
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    assert chooses_its_level(main)
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.writestr("__main__.py", CHOOSES[0])
    main.__file__ = str(tmp_path / "train.zip/__main__.py")
    main.__loader__ = zipimport.zipimporter(str(tmp_path / "train.zip"))
    main.__spec__ = main.__loader__.find_spec("__main__")
    assert chooses_its_level(main)


@pytest.mark.parametrize("code", ["print 'Python 2'", "from amp_patch import amp\namp.log(a=1)"])
def test_other_files_and_other_mains_choose_none(code, tmp_path):
    (tmp_path / "train.py").write_text(code)
    main = types.ModuleType("__main__")
    assert not chooses_its_level(None) and not chooses_its_level(main)
    main.__file__ = str(tmp_path / "train.py")
    assert not chooses_its_level(main)
