"""Modules that stay FP32 in a cast model, inside of and beside others."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import training
from conftest import DEVICES
from crossed import crossed
from low_models import CAST
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from training import LEVELS, SGD, backward, convnet, linear

from amp_patch import amp
from amp_patch.policy import OPT_LEVELS


@crossed(
    {"level": LEVELS, "rule": ["body.0", nn.Conv2d, lambda name, module: name == "body.0", ["body.0", "body.3"]]},
    meet=1,
)
def test_kept_modules_stay_fp32_inside_and_fit_outside(level, rule):
    seen = []
    model = convnet()
    model.body[0].register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    optimizer = SGD(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, keep_fp32=rule)
    assert model.body[0].weight.dtype is torch.float32
    training.train(model, optimizer, 3)
    inside = []
    original = nn.functional.conv2d
    try:
        nn.functional.conv2d = lambda *a, **k: (inside.append(a[0].dtype), original(*a, **k))[1]
        model(training.images(0)[0])
    finally:
        nn.functional.conv2d = original
    assert inside[0] is torch.float32
    assert "weight" in dict(model.body[0].named_parameters()) and all(out is cast for cast, out in seen)


def test_a_batch_norm_with_a_custom_forward_receives_fp32():
    class MyNorm(nn.BatchNorm1d):
        def forward(self, inputs):
            return super().forward(inputs - self.running_mean)

    model = nn.Sequential(nn.Linear(4, 4), MyNorm(4), nn.Linear(4, 4))
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2")
    backward(model(torch.randn(3, 4)).sum() / 64, optimizer)


def test_keep_batchnorm_fp32_false_casts_batch_norms():
    model = amp.initialize(convnet(), opt_level="O2", keep_batchnorm_fp32="False")
    assert model.body[1].weight.dtype is torch.float16


@crossed({"level": LEVELS, "cell": [nn.RNN, nn.LSTM, nn.GRU]}, meet=1)
def test_rnns_train_at_every_level(level, cell):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = cell(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

        def forward(self, inputs):
            return self.out(self.rnn(inputs)[0][:, -1])

    torch.manual_seed(0)
    model = Tagger()
    model, optimizer = amp.initialize(model, training.ADAM(model.parameters()), opt_level=level)
    batch = torch.randn(4, 5, 3), torch.tensor([0, 1, 0, 1])
    losses = training.train(model, optimizer, 12, lambda step: batch)
    assert losses[-1] < losses[0]
    assert all(a is b for a, b in zip(model.rnn._flat_weights, model.rnn.parameters(), strict=True))


@pytest.mark.parametrize("level", CAST)
def test_rnns_take_packed_sequences(level):
    model = amp.initialize(nn.LSTM(3, 4), opt_level=level)
    output, (hidden, _) = model(pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]))
    assert output.data.dtype is hidden.dtype is torch.float32


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.out = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(self.mid(self.embed(ids)))


@pytest.mark.parametrize("kept", [(), "embed", "out"])
@pytest.mark.parametrize("level", LEVELS)
def test_shared_weights_stay_shared(level, kept):
    model = Tied()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, keep_fp32=kept)
    assert model.out.weight is model.embed.weight and len(list(amp.master_params(optimizer))) == 3
    assert not kept or model.out.weight.dtype is torch.float32
    training.train(model, optimizer, 2, lambda step: (torch.tensor([0, 1]), torch.tensor([1, 2])))
    twin = Tied()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.embed.weight, model.state_dict()["out.weight"])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_module_that_stays_fp32_for_a_shared_weight_is_told_of_once_with_its_bytes(level, caplog):
    with caplog.at_level(logging.INFO, "amp_patch"):
        amp.initialize(Tied(), opt_level=level, keep_fp32="out")
        amp.initialize(nn.Sequential(nn.Linear(3, 3)), opt_level=level, keep_fp32="0")
    told = [message for message in caplog.messages if "stay FP32 too" in message]
    assert len(told) == (level != "O1")
    assert all("'embed'" in message and "'out'" not in message and f"{4 * 4 * 3} bytes" in message for message in told)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_is_kept_as_a_whole_is_restored_too(level):
    model = linear([[2.0]])
    amp.initialize(model, SGD(model.parameters()), opt_level=level, keep_fp32=nn.Linear)
    amp.restore()
    assert type(model) is nn.Linear and "_amp" not in vars(model)


class Holding(nn.Module):
    """Reads parameters that containers without a forward hold, in products and sums."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.several = nn.ParameterList([torch.eye(4) * 0.5, torch.full((4,), 1 / 3)])
        self.named = nn.ParameterDict({"gain": torch.full((4,), 0.3)})
        self.holder = nn.Module()
        self.holder.weight, self.holder.layer = nn.Parameter(torch.eye(4) / 3), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x) @ self.several[0] + self.several[1]
        return self.last(self.holder.layer(x * self.named["gain"] @ self.holder.weight))


CONTAINERS = {
    "list": ("several", ["several.0", "several.1"]),
    "dict by its class": (nn.ParameterDict, ["named.gain"]),
    "predicate": (lambda name, _: name in ("several", "named"), ["several.0", "several.1", "named.gain"]),
    "holder and a layer in it": ("holder", ["holder.weight", "holder.layer.weight", "holder.layer.bias"]),
}


@crossed({"device": DEVICES, "level": [*CAST, "O5+split"], "rule": list(CONTAINERS)}, meet=2)
def test_containers_without_a_forward_keep_their_own_parameters(level, rule, device):
    torch.manual_seed(0)
    model = Holding().to(device)
    exact, batch = copy.deepcopy(model), torch.randn(8, 4, device=device)
    options, kept = {"keep_fp32": CONTAINERS[rule][0]}, CONTAINERS[rule][1]
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0, **options)
    plain = SGD(exact.parameters())
    assert {name for name, p in model.named_parameters() if p.dtype is torch.float32} == set(kept)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model(batch).square().mean(), optimizer)
        optimizer.step()
        plain.zero_grad()
        exact(batch).square().mean().backward()
        plain.step()
    eps = torch.finfo(CAST[level[:2]]).eps
    for name in kept:  # updates of less than half a step of the low type are not lost
        torch.testing.assert_close(model.get_parameter(name), exact.get_parameter(name), rtol=0, atol=eps / 2)
    amp.restore()
    assert type(model.several) is nn.ParameterList and {p.dtype for p in model.parameters()} == {torch.float32}


@crossed({"level": LEVELS, "rule": [nn.LayerNorm, nn.Linear, nn.MultiheadAttention]}, meet=1)
def test_modules_inside_a_transformer_can_be_kept_in_train_and_eval(level, rule):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2)
    model = amp.initialize(model, opt_level=level, keep_fp32=rule)
    inputs = torch.randn(1, 3, 8)
    with torch.no_grad():
        trained, evaluated = model.train()(inputs).float(), model.eval()(inputs).float()
    assert torch.allclose(trained, evaluated, atol=0.05)
    amp.restore()
    assert torch.backends.mha.get_fastpath_enabled()


class Recomputing(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.embed, self.mid, self.head, self.reentrant = (
            nn.Embedding(4, 3),
            nn.Linear(3, 3),
            nn.Linear(3, 2),
            reentrant,
        )

    def inner(self, ids, dummy):
        return self.mid(self.embed(ids)) * dummy

    def forward(self, ids):
        dummy = torch.ones(1, dtype=self.mid.weight.dtype, requires_grad=True)
        features = checkpoint(self.inner, ids, dummy, use_reentrant=self.reentrant)
        return checkpoint(self.head, features, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_checkpoints_recompute_kept_modules_and_children_with_the_same_types(level, reentrant):
    model = Recomputing(reentrant)
    (model, _), optimizer = amp.initialize(
        [model, model.head], SGD(model.parameters()), opt_level=level, keep_fp32=nn.Embedding, loss_scale=8.0
    )
    backward(model(torch.tensor([0, 1])).sum(), optimizer)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in amp.master_params(optimizer))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("body.9", r"keep_fp32 names 'body\.9', which matches no module of the given models; did you mean 'body\."),
        (nn.Linear(1, 1), r"keep_fp32 names a Linear, which matches no module of the given models$"),
    ],
    ids=["name", "module"],
)
def test_a_rule_without_a_module_is_refused_with_the_nearest_names(rule, said):
    model = convnet()
    with pytest.raises(ValueError, match=said):
        amp.initialize(model, SGD(model.parameters()), opt_level="O2", keep_fp32=[rule])
    assert model.body[0].weight.dtype is torch.float32


# ----------------------------------------------------------------------------------------------------------------------
# The model's inputs, unrounded


class Centred(nn.Module):
    """A parameter less, and without its mean. `seen` is what the last call received."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.seen = x
        return (x - 1000) * self.weight


class Normed(nn.Module):
    """A module that receives the model's input in the way of `call`, and a layer."""

    def __init__(self, norm: nn.Module, call=lambda norm, x: norm(x)) -> None:
        super().__init__()
        self.layer, self.norm, self.call = linear([[1.0, 2.0, 3.0, 4.0]]), norm, call

    def forward(self, x):
        return self.layer(self.call(self.norm, x["x"][0] if isinstance(x, dict) else x))


CALLS = {
    "itself": (lambda norm, x: norm(x), lambda x: x),
    "rows": (lambda norm, x: norm(x[3:]), lambda x: x[3:]),
    "a transposed view": (lambda norm, x: norm(x.t().t()), lambda x: x),
    "a view": (lambda norm, x: norm(x.view(-1, 2, 4)), lambda x: x.reshape(-1, 2, 4)),
    "detached": (lambda norm, x: norm(x.detach()), lambda x: x),
    "a checkpoint": (lambda norm, x: checkpoint(norm, x, use_reentrant=False), lambda x: x),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("level", CAST)
def test_a_kept_module_gets_the_input_of_the_model_unrounded(level, call, device):
    x = 1000 + torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).to(device)
    way, expected = CALLS[call]
    model = Normed(Centred(), way).to(device)
    optimizer = SGD(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, keep_fp32="norm", loss_scale=1.0)
    for given in (x, x.double(), {"x": [x]}, x.t().contiguous().t()):
        output = model(given)
        assert torch.equal(model.norm.seen, expected(x))
        backward(output.float().sum(), optimizer)
        torch.testing.assert_close(
            model.norm.weight.grad, ((expected(x) - 1000).reshape(-1, 4) * model.layer.weight[0].float()).sum(0)
        )
        model.norm.weight.grad = None


@pytest.mark.parametrize("level", CAST)
def test_a_kept_module_gets_what_the_forward_made_of_the_input_as_the_level_made_it(level):
    x = torch.full((8, 4), 1001.3)
    low = OPT_LEVELS[level].cast_model_type
    for call, expected in (
        (lambda norm, x: norm(x + 1), (x.to(low) + 1).float()),
        (lambda norm, x: norm(x.add_(1)), (x.to(low) + 1).float()),
        (lambda norm, x: norm(x.clone()), x.to(low).float()),
    ):
        model = amp.initialize(Normed(Centred(), call), opt_level=level, keep_fp32="norm")
        model(x.clone())
        assert torch.equal(model.norm.seen, expected)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.SyncBatchNorm(4)])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_batch_norm_of_the_model_s_input_normalizes_it_unrounded_and_no_warning_comes(level, norm):
    x = 1000 + torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    plain = Normed(copy.deepcopy(norm))
    model = amp.initialize(copy.deepcopy(plain), opt_level=level)
    for _ in range(5):
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0.06)
    assert torch.equal(model.norm.running_mean, plain.norm.running_mean)
    amp.restore()
    assert type(model.norm) is type(norm)


def test_an_input_that_a_kept_module_gets_is_not_warned_about_and_one_that_others_get_is():
    x = 1000 + torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    amp.initialize(Normed(Centred()), opt_level="O5", keep_fp32="norm")(x)
    with pytest.warns(UserWarning, match="of the variance"):
        amp.initialize(Normed(Centred(), lambda norm, x: norm(x + 0)), opt_level="O5", keep_fp32="norm")(x)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [Centred(), nn.BatchNorm1d(4)])
def test_a_compiled_forward_passes_inputs_unrounded_too(norm):
    x = 1000 + torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    model = amp.initialize(Normed(norm), opt_level="O5", keep_fp32="norm")
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
