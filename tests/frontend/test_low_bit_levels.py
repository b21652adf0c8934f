"""O6 and O7: O4 and O5 with products in FP8 or FP4."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.policy import OPT_LEVELS, PRODUCT_FORMATS, Policy, resolve

BASES = {"O6": "O4", "O7": "O5"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 32)
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 17)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(x + self.down(F.gelu(self.norm(self.up(x)))))


def train(level: str, steps: int = 4, **options: Any) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    losses = []
    for step in range(steps):
        tokens = torch.randint(17, (8, 9), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("level", BASES)
def test_a_level_is_its_base_with_a_format(level):
    policy, base = OPT_LEVELS[level], OPT_LEVELS[BASES[level]]
    changed = {name for name, value in vars(policy).items() if value != getattr(base, name)}
    assert changed == {"opt_level", "product_format"} and policy.product_format == "fp8"
    for name in PRODUCT_FORMATS:
        assert resolve(level, dtype=name) == Policy(**{**vars(policy), "product_format": name})
    assert "product_format=fp8" in str(policy) and "product_format" not in str(base)


@pytest.mark.parametrize("level", BASES)
@pytest.mark.parametrize("name", PRODUCT_FORMATS)
def test_trainings_are_near_their_base_and_none_is_another(name, level):
    losses, model = train(level, dtype=name)
    base, _ = train(BASES[level])
    assert losses[0] != base[0] and losses == pytest.approx(base, rel=0.05)
    low = torch.float32 if level == "O6" else torch.bfloat16
    assert model.up.weight.dtype is low
    assert train(level, dtype=name)[0] == losses  # chance is a function of the numbers
    if name not in ("fp8", "mxfp8"):  # of numbers that are not tiny the power of two that they are divided by is lost
        assert train(level)[0] != losses


@pytest.mark.parametrize("level", BASES)
def test_masters_and_restore_are_the_bases(level):
    _, model = train(level)
    assert all(value.dtype is torch.float32 for value in model.state_dict().values())
    amp.restore()
    assert model.up.weight.dtype is torch.float32 and type(model) is Net


@pytest.mark.parametrize("dtype", ["fp4", torch.float16, torch.bfloat16, "bfloat16"])
def test_other_formats_are_refused_by_name(dtype):
    wanted = (
        f"initialize: dtype is {dtype!r} at opt_level 'O6'; wanted the format of its products, 'fp8' or "
        "'fp8_tensorwise' or 'mxfp8' or 'mxfp8_floor' or 'nvfp4' or 'nvfp4_naive'; all else is torch.bfloat16 there"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        amp.initialize(Net(), opt_level="O6", dtype=dtype)


def test_formats_are_refused_at_other_levels():
    wanted = r"^initialize: dtype is 'mxfp8'; wanted torch\.float16 or torch\.bfloat16; formats .* are for O6 and O7$"
    with pytest.raises(ValueError, match=wanted):
        amp.initialize(Net(), opt_level="O4", dtype="mxfp8")


def formats_of(monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], level: str, **options: Any) -> str | None:
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    model = amp.initialize(Net(), opt_level=level, verbosity=0, **options)
    policy = vars(model)["_amp"].policy
    assert policy.opt_level == asked.get("AMP_PATCH_OPT_LEVEL", level).partition("+")[0]
    return policy.product_format


@pytest.mark.parametrize(
    ("asked", "level", "options", "expected"),
    [
        ({"AMP_PATCH_OPT_LEVEL": "O6"}, "O1", {"dtype": torch.bfloat16}, "fp8"),
        ({"AMP_PATCH_OPT_LEVEL": "O6"}, "O6", {"dtype": "mxfp8"}, "mxfp8"),
        ({"AMP_PATCH_OPT_LEVEL": "O7+nvfp4"}, "O6", {"dtype": "mxfp8"}, "nvfp4"),
        ({"AMP_PATCH_OPT_LEVEL": "O7+nvfp4+split"}, "O2", {}, "nvfp4"),
        ({"AMP_PATCH_DTYPE": "mxfp8"}, "O6", {}, "mxfp8"),
        ({"AMP_PATCH_DTYPE": "bfloat16"}, "O6", {"dtype": "mxfp8"}, "mxfp8"),
        ({"AMP_PATCH_OPT_LEVEL": "O4", "AMP_PATCH_DTYPE": "mxfp8"}, "O6", {"dtype": "nvfp4"}, None),
        ({"AMP_PATCH_OPT_LEVEL": "O4"}, "O6", {"dtype": "mxfp8", "keep_high": ()}, None),
    ],
)
def test_the_environment_chooses_levels_and_formats(asked, level, options, expected, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "amp_patch"):
        assert formats_of(monkeypatch, asked, level, **options) == expected


@pytest.mark.parametrize("name", ["O4+mxfp8", "O6+mxfp8+fp8"])
def test_names_that_cannot_be(name, monkeypatch):
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", name)
    with pytest.raises(ValueError, match=rf"AMP_PATCH_OPT_LEVEL: level '{re.escape(name)}'"):
        amp.initialize(Net(), opt_level="O4")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch 2.15, of a vmap over our products
@pytest.mark.parametrize("level", BASES)
def test_torch_funcs_gradients_are_refused_by_name_and_vmap_is_each_samples_product(level):
    _, model = train(level, steps=1)
    batches = torch.randint(17, (3, 2, 5), generator=torch.Generator().manual_seed(0))
    alone = torch.stack([model(each) for each in batches])
    torch.testing.assert_close(torch.func.vmap(model)(batches), alone, rtol=0.02, atol=0.02)
    params = dict(model.named_parameters())
    with pytest.raises(NotImplementedError, match=r"^torch\.func's grad, vjp and jvp have no rule for products in FP8"):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (batches[0],)).float().sum())(params)
