"""explain: the expected rows, unchanged numbers of the forward, and no hooks left."""

from __future__ import annotations

import copy
import inspect
import pkgutil
import sys
import types

import pytest
import torch
import training
from apexed import apex_amp  # noqa: F401  the fixture `amp`: Apex's
from crossed import crossed
from torch import nn
from torch.nn import functional as F

import amp_patch
from amp_patch import explain, initialize
from amp_patch.casts import functions, install
from amp_patch.casts.oplists import rules_by_name
from amp_patch.diagnose.explanation import Explanation, OpCall
from amp_patch.support import tree

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

lib = types.ModuleType("lib")
lib.scaled = lambda x, weight: x * weight  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def registry():
    """Remove the functions that a test registers."""
    before = dict(install._registered)
    yield
    install.uninstall()
    install._registered.clear()
    install._registered.update(before)


class MixedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.norm = nn.BatchNorm2d(2)
        self.kept = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, images):
        x = self.norm(self.conv(images)).mean((2, 3))
        x = self.kept(x)
        x = lib.scaled(x, self.weight)
        return (x @ self.weight + self.weight[0]).softmax(-1)


def net(**options):
    torch.manual_seed(0)
    model = MixedNet()
    initialize(model, keep_fp32="kept", **options)
    return model


def images():
    return torch.randn(2, 1, 3, 3, generator=torch.Generator().manual_seed(1))


def rows(explanation):
    """(module, op, got, ran, gave, decided): op without its address, of types the first letter: F is FP32, L is low."""
    letters = {FP32: "F", HALF: "L", BF16: "L"}

    def short(dtypes):
        return "".join(letters[dtype] for dtype in dtypes)

    return [
        (call.module, call.op.rpartition(".")[2], short(call.got), short(call.ran), short(call.gave), call.decided)
        for call in explanation.calls
    ]


NONE = "none: torch's own promotion"


def o1(emulated=""):
    """At O1 and O4: `emulated` stands behind what a CPU without FP16 arithmetic emulates."""
    return [
        ("conv", "conv2d", "FFF", "LLL", "L", "lower" + emulated),
        ("norm", "batch_norm", "LFFFF", "LFFFF", "L", NONE),
        ("", "mean", "L", "L", "L", NONE),
        ("kept", "cast", "L", "L", "F", "keep_fp32"),
        ("kept", "linear", "FFF", "FFF", "F", "keep_fp32"),
        ("", "scaled", "FF", "LL", "L", "your register_half_function"),
        ("", "mul", "LL", "LL", "L", NONE),
        ("", "__matmul__", "LF", "LL", "L", "lower" + emulated),
        ("", "__getitem__", "F", "F", "F", NONE),
        ("", "add", "LF", "LF", "F", NONE),
        ("", "softmax", "F", "F", "F", "fp32"),
    ]


def o2(emulated=NONE, norm="keep_batchnorm_fp32"):
    return [
        ("", "cast", "F", "F", "L", "cast_model_type"),
        ("conv", "conv2d", "LLL", "LLL", "L", emulated),
        ("norm", "batch_norm", "LFFFF" if norm != NONE else "LLLLL", "LFFFF" if norm != NONE else "LLLLL", "L", norm),
        ("", "mean", "L", "L", "L", NONE),
        ("kept", "cast", "L", "L", "F", "keep_fp32"),
        ("kept", "linear", "FFF", "FFF", "F", "keep_fp32"),
        ("kept", "cast", "F", "F", "L", "keep_fp32"),
        ("", "mul", "LL", "LL", "L", NONE),
        ("", "matmul", "LL", "LL", "L", emulated),
        ("", "__getitem__", "L", "L", "L", NONE),
        ("", "add", "LL", "LL", "L", NONE),
        ("", "softmax", "L", "L", "L", NONE),
        ("", "cast", "L", "L", "F", "cast_model_outputs"),
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"opt_level": "O1", "cpu_half": "native"}, o1()),
        ({"opt_level": "O1", "cpu_half": "emulate"}, o1(", emulated FP16")),
        ({"opt_level": "O1", "dtype": BF16, "cpu_half": "native"}, o1()),
        ({"opt_level": "O4", "cpu_half": "native"}, o1()),
        ({"opt_level": "O4", "cpu_half": "emulate"}, o1(", emulated BF16")),
        ({"opt_level": "O2", "cpu_half": "native"}, o2()),
        ({"opt_level": "O2", "cpu_half": "emulate"}, o2("emulated FP16")),
        ({"opt_level": "O5", "cpu_half": "native"}, o2()),
        ({"opt_level": "O5", "cpu_half": "emulate"}, o2("emulated BF16")),
        ({"opt_level": "O3", "cpu_half": "native"}, o2(norm=NONE)),
        ({"opt_level": "O3", "cpu_half": "emulate"}, o2("emulated FP16", NONE)),
    ],
)
def test_explain_gives_the_expected_rows(wrappers, options, expected):
    functions.register_half_function(lib, "scaled")
    model = net(**options)
    found = explain(model, images())
    assert rows(found) == expected
    assert found.policy is model._amp.policy
    masters = options["opt_level"] in ("O2", "O5")
    assert found.kept == ({"norm": "keep_batchnorm_fp32"} if masters else {}) | {"kept": "keep_fp32"}


def test_explain_shows_no_decision_at_o0():
    found = explain(net(opt_level="O0"), images())
    assert {call.decided for call in found.calls} == {NONE}
    assert {dtype for call in found.calls for dtype in (*call.got, *call.ran, *call.gave)} == {FP32}
    never = explain(MixedNet(), images())
    assert never.policy is None and [call.op for call in never.calls] == [call.op for call in found.calls]


def test_explain_shows_public_addresses_of_functions(wrappers):
    functions.register_half_function(lib, "scaled")
    ops = {call.op for call in explain(net(opt_level="O4"), images()).calls}
    assert {"torch.nn.functional.conv2d", "torch.Tensor.__matmul__", "lib.scaled", "torch.Tensor.add"} <= ops


class Asks(nn.Module):
    """Functions of each rule that is not in Net."""

    def forward(self, x, probabilities):
        low = x @ x
        out = torch.zeros(2, 2)
        out[0] = low[0]
        a = torch.einsum("ij,jk->ik", x, x)
        b = torch.dot(low[0], x[0])
        c = torch.atan2(low, x)
        d = F.binary_cross_entropy(probabilities.bfloat16(), x)
        e = torch.ones(2, 2).addmm_(low, low)
        return torch.mm(x, x, out=torch.empty(2, 2)), out, a, b, c, d, e


def test_explain_names_the_list_of_each_decision(wrappers):
    model = Asks()
    initialize(model, opt_level="O4", allow_banned=True, cpu_half="native")
    calls = explain(model, torch.ones(2, 2), torch.ones(2, 2)).calls
    decided = {call.op.rpartition(".")[2]: call.decided for call in calls}
    assert decided == {
        "__matmul__": "lower",
        "zeros": NONE,
        "__getitem__": NONE,
        "__setitem__": "match_self",
        "einsum": "lower (einsum)",
        "dot": "widest",
        "atan2": "widest",
        "bfloat16": NONE,
        "binary_cross_entropy": "banned",
        "ones": NONE,
        "addmm_": "match_self",
        "empty": NONE,
        "mm": NONE,  # out= is the user's word
    }


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = nn.LSTM(4, 4)

    def forward(self, x):
        return self.recurrent(self.attention(x, x, x)[0])[0]


def test_explain_shows_the_decided_parts_of_a_composite_function(wrappers):
    model = Block()
    initialize(model, opt_level="O4", cpu_half="native")
    calls = explain(model, torch.ones(2, 3, 4)).calls
    found = [(call.module, call.op.rpartition(".")[2], call.decided) for call in calls]
    decided = [row for row in found if row[2] != NONE]
    assert decided == [
        ("attention", "linear", "lower"),
        ("attention", "bmm", "lower"),
        ("attention", "softmax", "fp32"),
        ("attention", "bmm", "lower"),
        ("attention", "linear", "lower"),
        ("recurrent", "lstm", "lower (rnn)"),
    ]
    assert {row[1] for row in found if row[2] == NONE} == {"transpose", "zeros"}
    amp_patch.restore()
    plain = [(call.module, call.op.rpartition(".")[2]) for call in explain(Block(), torch.ones(2, 3, 4)).calls]
    assert ("attention", "multi_head_attention_forward") in plain


# ---------------------------------------------------------------------------------------------------------------------
# It changes nothing


def namespace():
    """Return the current object at every place that amp_patch may patch."""
    owners = [(pkgutil.resolve_name(address), name) for address, name in rules_by_name("apex")]
    owners += [(tree, "cast_floats"), (torch.overrides, "has_torch_function"), (lib, "scaled")]
    return [inspect.getattr_static(owner, name, None) for owner, name in owners] + [
        torch._C._len_torch_function_stack()
    ]


def unchanged(before):
    return all(a is b or a == b for a, b in zip(before, namespace(), strict=True))


class Whole(nn.Module):
    """A model with dropout, a batch norm, and torch's fused encoder layer (in eval mode)."""

    def __init__(self):
        super().__init__()
        self.body = training.convnet()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x):
        encoded = self.body.body(x).flatten(2).transpose(1, 2)
        return self.encoder(encoded).sum((1, 2)) + self.body(x).sum(1)


def whole(level, **options):
    torch.manual_seed(0)
    model = Whole()
    return initialize(model, opt_level=level, **options)


@crossed({"level": training.LEVELS, "training_mode": [True, False]}, meet=1)
def test_explain_changes_no_number_of_a_forward(wrappers, level, training_mode):
    model, x = whole(level).train(training_mode), training.images(0)[0]
    state, random = training.weights(model), torch.random.get_rng_state()
    before, state_dict = namespace(), copy.deepcopy(model.state_dict())
    assert explain(model, x).calls
    assert training.same(state, training.weights(model)) and torch.equal(random, torch.random.get_rng_state())
    assert unchanged(before)
    outputs = []
    model.register_forward_hook(lambda *call: outputs.append(call[-1].detach()))
    for call in (model, lambda x: explain(model, x), model):
        torch.manual_seed(1)
        model.load_state_dict(copy.deepcopy(state_dict))
        with torch.no_grad():
            call(x)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.fail = True

    def forward(self, x):
        x = self.layer(x)
        if self.fail:
            raise ArithmeticError("planted")
        return x.softmax(-1)


def test_explain_leaves_no_hook_after_an_exception(wrappers):
    model = initialize(Fails(), opt_level="O4")
    before = namespace()
    with pytest.raises(ArithmeticError):
        explain(model, torch.ones(1, 2))
    assert unchanged(before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.fail = False
    assert len(explain(model, torch.ones(1, 2)).calls) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Forms


def test_the_table_of_explain_shows_whole_names_and_merges_equal_calls():
    def call(module, op="torch.Tensor.add", decided=NONE, dtype=FP32):
        return OpCall(module, op, (dtype, HALF, torch.int64), (dtype,), (dtype,), decided)

    name = "layers.0." * 20 + "attention.projection"
    model = net(opt_level="O2", cpu_half="native")
    found = Explanation(explain(model, images()).policy, {name: "keep_fp32"}, [call("a"), call("b"), call("a")])
    lines = str(found).splitlines()
    assert "  cast_model_type        FP16" in lines and "  loss_scale             dynamic" in lines
    assert lines[-3].split() == ["module", "op", "got", "ran", "gave", "decided", "by", "times"]
    assert lines[-2].split() == ["a", "Tensor.add", "FP32,FP16", "FP32", "FP32", *NONE.split(), "2"]
    assert lines[-1].split()[0] == "b" and lines[-1].split()[-1] == "1"
    found.calls += [call(name, op="torch.nn.functional." + "scaled_dot_product_attention" * 2, dtype=torch.bfloat16)]
    found.calls += [call("", decided="your register_promote_function, emulated FP16")]
    lines = str(found).splitlines()
    assert lines[lines.index(name) + 1].startswith(" ")  # too long for a column: whole, on a line for itself
    assert f"  {name}" in lines
    assert "..." not in str(found)
    assert "never went through" in str(explain(MixedNet(), images()))
    assert "no function" in str(explain(nn.Identity(), torch.ones(1)))


def test_explain_finds_the_policy_of_a_wrapped_model(wrappers):
    model = initialize(nn.Linear(2, 2), opt_level="O4", cpu_half="native")
    found = explain(nn.Sequential(model), torch.ones(1, 2))
    assert found.policy is model._amp.policy
    assert [(call.module, call.decided) for call in found.calls] == [("0", "lower")]


@pytest.mark.slow
def test_explain_runs_a_compiled_model_eagerly_and_keeps_its_graph(capsys):
    model = initialize(nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)), opt_level="O4", cpu_half="native")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    given = torch.ones(1, 2)
    plain = compiled(given)
    assert "torch._dynamo" in sys.modules and capsys.readouterr().out == ""
    found = explain(compiled, given)
    assert [call.decided for call in found.calls] == ["lower", "fp32"]
    assert torch.equal(compiled(given), plain) and capsys.readouterr().out == ""
    inner = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"), nn.Softmax(-1))
    assert [call.op.rpartition(".")[2] for call in explain(inner, given).calls] == ["linear", "softmax"]
    assert amp_patch.explain is explain
