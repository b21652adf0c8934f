"""The model's side: what is cast on the way in and out, what stays FP32, state dicts, methods, copies."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import inspect
import io
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import training
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from training import LEVELS, SGD, backward, convnet, linear

from amp_patch import amp
from amp_patch.frontend import restored
from amp_patch.model import forward

CAST = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


class Probe(nn.Module):
    """Keeps what forward was given, and gives it back."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return args[0] if args else kwargs


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Batch:
    images: torch.Tensor
    labels: torch.Tensor


class Movable:
    def __init__(self, value):
        self.value = value

    def to(self, dtype):
        return Movable(self.value.to(dtype))


def floats():
    return torch.ones(2)


CONTAINERS = {
    "tensor": (floats(), lambda v: v),
    "tuple": ((floats(), 3), lambda v: v[0]),
    "list": ([floats(), None], lambda v: v[0]),
    "dict": ({"a": floats()}, lambda v: v["a"]),
    "OrderedDict": (collections.OrderedDict(a=floats()), lambda v: v["a"]),
    "namedtuple": (Point(floats(), "y"), lambda v: v.x),
    "dataclass": (Batch(floats(), torch.tensor(1)), lambda v: v.images),
    "nested": ({"a": [(floats(),)]}, lambda v: v["a"][0][0]),
    "object with .to": (Movable(floats()), lambda v: v.value),
    "packed": (pack_sequence([floats()]), lambda v: v.data),
    "float64": (floats().double(), lambda v: v),
}


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("level", CAST)
def test_inputs_are_cast_and_outputs_cast_back_through(level, kind):
    value, leaf = CONTAINERS[kind]
    model = amp.initialize(Probe(), opt_level=level)
    for result in (model(value), model.forward(value), model(key=value)["key"]):
        assert type(result) is type(value)
        assert leaf(result).dtype is torch.float32
    (args, kwargs) = model.seen
    assert leaf(kwargs["key"]).dtype is CAST[level] and args == ()
    assert leaf(value).dtype.is_floating_point and leaf(value).dtype is not CAST[level]  # the caller's own is untouched


@pytest.mark.parametrize("level", CAST)
def test_integers_and_unknown_objects_pass_through_as_they_are(level):
    model = amp.initialize(Probe(), opt_level=level)
    ids, thing, batch = torch.tensor([1]), object(), {"ids": torch.tensor([1])}
    for value in (ids, thing, batch, None, "text"):
        assert model(value) is value
        assert model.seen[0][0] is value


@pytest.mark.parametrize("level", LEVELS)
def test_edits_of_a_passed_dict_reach_the_caller(level):
    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, batch, extra):
            batch["score"] = self.layer(batch.pop("image"))
            extra["seen"] = True

    model = amp.initialize(Scorer(), opt_level=level)
    label = torch.ones(1)
    batch, extra = {"image": torch.ones(1, 2), "label": label}, {"weight": torch.ones(1)}
    model(batch, extra=extra)
    assert batch.keys() == {"score", "label"} and batch["label"] is label
    assert extra["seen"] and extra["weight"].dtype is torch.float32
    assert level not in CAST or batch["score"].dtype is torch.float32


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_levels_that_do_not_cast_the_model_leave_inputs_alone(level):
    model, value = amp.initialize(Probe(), opt_level=level), {"a": floats()}
    assert model(value) is value and model.seen[0][0] is value


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16, torch.float64])
def test_cast_model_outputs_decides_the_outputs(level, dtype):
    model = amp.initialize(linear([[1.0]]), opt_level=level, cast_model_outputs=dtype)
    assert model(torch.ones(1, 1)).dtype is dtype


def test_a_forward_follows_the_policy_that_was_set_last():
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", dtype=torch.float16)
    assert model(torch.ones(1, 2)).dtype is torch.float16
    forward.set_policy(model, dataclasses.replace(forward.policy_of(model), dtype=torch.bfloat16))
    assert model(torch.ones(1, 2)).dtype is torch.bfloat16
    assert copy.deepcopy(model)(torch.ones(1, 2)).dtype is torch.bfloat16


def test_the_gradient_reaches_an_fp32_input():
    model = amp.initialize(linear([[2.0]]), opt_level="O2")
    inputs = torch.ones(1, 1, requires_grad=True)
    model(inputs).sum().backward()
    assert inputs.grad.item() == 2.0 and inputs.grad.dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_signature_name_and_isinstance_stay(level):
    plain = convnet()
    model = amp.initialize(convnet(), opt_level=level)
    assert isinstance(model, training.ConvNet) and type(model).__name__ == "ConvNet"
    assert type(model).__module__ == training.ConvNet.__module__
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert repr(model) == repr(plain)


def test_the_class_is_made_once_and_instances_of_it_behave_like_the_base():
    first, second = amp.initialize([convnet(), convnet()], opt_level="O2")
    assert type(first) is type(second)
    fresh = type(first)()
    assert (
        fresh(training.images(0)[0]).dtype is torch.float32 and fresh.state_dict().keys() == first.state_dict().keys()
    )


@pytest.mark.parametrize("level", CAST)
def test_a_named_method_is_cast_like_forward(level):
    model = amp.initialize(convnet(), opt_level=level, methods=("encode",))
    assert model.encode(training.images(0)[0]).dtype is torch.float32


@pytest.mark.parametrize("level", CAST)
def test_a_dtype_error_in_an_unnamed_method_is_re_raised_with_the_advice(level):
    model = amp.initialize(convnet(), opt_level=level)
    with pytest.raises(RuntimeError, match=r"methods=\('encode',\)") as error:
        model.encode(training.images(0)[0])
    assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError) as error:  # another error keeps its own words
        model.encode(torch.ones(1, 3, 8, 8, dtype=CAST[level]))
    assert "methods=" not in str(error.value)


@pytest.mark.parametrize("rule", ["body.0", nn.Conv2d, lambda name, module: name == "body.0", ["body.0", "body.3"]])
@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", CAST)
def test_a_custom_norm_can_be_kept(level):
    class ScaleNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, inputs):
            assert inputs.dtype is torch.float32
            return inputs * self.gain / (inputs * inputs).sum().sqrt()

    model = nn.Sequential(nn.Linear(4, 4), ScaleNorm(), nn.Linear(4, 4))
    model = amp.initialize(model, opt_level=level, keep_fp32=ScaleNorm)
    assert model(torch.full((1, 4), 300.0)).isfinite().all()


def test_a_batch_norm_with_a_forward_of_its_own_is_given_fp32():
    class MyNorm(nn.BatchNorm1d):
        def forward(self, inputs):
            return super().forward(inputs - self.running_mean)

    model = nn.Sequential(nn.Linear(4, 4), MyNorm(4), nn.Linear(4, 4))
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2")
    backward(model(torch.randn(3, 4)).sum() / 64, optimizer)


def test_keep_batchnorm_fp32_false_casts_batch_norms():
    model = amp.initialize(convnet(), opt_level="O2", keep_batchnorm_fp32="False")
    assert model.body[1].weight.dtype is torch.float16


@pytest.mark.parametrize("cell", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("level", LEVELS)
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


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_state_dict_gives_the_masters_and_load_state_dict_sets_both(level):
    model = convnet()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    training.train(model, optimizer, 2)
    state = model.state_dict()
    masters = dict(zip(dict(model.named_parameters()), amp.master_params(optimizer), strict=True))
    assert {v.dtype for v in state.values()} == {torch.float32, torch.int64}
    assert all(torch.equal(state[name], master) for name, master in masters.items())
    assert model.state_dict(prefix="net.").keys() == {f"net.{name}" for name in state}
    assert torch.equal(nn.ModuleDict({"net": model}).state_dict()["net.head.weight"], masters["head.weight"])

    saved = {name: value + 0.001 if value.is_floating_point() else value for name, value in state.items()}
    saved = {name: value.clone() for name, value in saved.items()}
    nn.ModuleDict({"module": model}).load_state_dict({f"module.{k}": v for k, v in saved.items()})  # as DDP does
    for name, param in model.named_parameters():
        assert torch.equal(masters[name], saved[name])
        assert torch.equal(param, saved[name].to(param.dtype))
    assert all(torch.equal(v, saved[name]) for name, v in model.state_dict().items())


def test_load_state_dict_with_assign_is_refused_by_name():
    model, optimizer = amp.initialize(convnet(), None, opt_level="O2"), None
    state = {k: v.clone() + 1 for k, v in model.state_dict().items()}
    before = training.weights(model)
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(state, assign=True)
    assert training.same(training.weights(model), before) and optimizer is None


def test_a_partial_or_wrong_state_dict_behaves_as_in_torch():
    model = convnet()
    model, _ = amp.initialize(model, SGD(model.parameters()), opt_level="O2")
    head = {"head.bias": torch.full((5,), 0.1)}
    assert "head.weight" in model.load_state_dict(head, strict=False).missing_keys
    assert torch.equal(model.state_dict()["head.bias"], head["head.bias"])
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.bias"):
        model.load_state_dict({"head.bias": torch.ones(3)}, strict=False)
    assert torch.equal(model.state_dict()["head.bias"], head["head.bias"])


@pytest.mark.parametrize("level", LEVELS)
def test_fp32_copy_is_a_plain_model_with_the_masters_values(level):
    model = convnet()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, keep_fp32="head")
    training.train(model, optimizer, 2)
    plain = amp.fp32_copy(model)
    if level not in ("O1", "O4"):  # whose casts hold in the whole process, and are held off
        assert [type(m) for m in plain.modules()] == [type(m) for m in convnet().modules()]
    assert training.same(
        [p.detach() for p in plain.parameters()], [p.detach().float() for p in amp.master_params(optimizer)]
    )
    assert not any("_amp" in vars(m) for m in plain.modules())
    assert isinstance(model, training.ConvNet) and ("_amp" in vars(model)) is (level != "O0")
    with torch.no_grad():
        plain.head.weight.zero_()
    assert model.state_dict()["head.weight"].any()


class Generating(nn.Module):
    """Functions, methods and operators that O1 casts, in forward and in methods beside it."""

    def __init__(self):
        super().__init__()
        self.first, self.body, self.norm = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.body(self.first(x))) @ self.first.weight

    def generate(self, x):
        return self.first(x).matmul(self.first.weight)

    def stream(self, x):
        for _ in range(2):
            x = self.first(x)
            yield x


PRECISE = torch.linspace(-1, 1, 12).reshape(3, 4) * 1.001


def generating(level):
    """A model in training at `level`, its FP32 copy, and what the copy gives when there is no training."""
    torch.manual_seed(0)
    model = Generating()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    backward(model(PRECISE).float().sum() / 8, optimizer)
    optimizer.step()
    amp.initialize(linear([[1.0]]), opt_level="O1")  # the newest O1 training need not be the model's own
    plain = amp.fp32_copy(model)
    with torch.no_grad():
        twin = Generating()
        twin.load_state_dict(plain.state_dict())
        with amp.disable_casts():
            expected = [twin(PRECISE), twin.generate(PRECISE), *twin.stream(PRECISE), twin.body(PRECISE)]
        assert not torch.equal(twin(PRECISE), expected[0])  # a bystander is cast
    return model, plain, expected


def in_eager(plain):
    with torch.no_grad():
        return [plain(PRECISE), plain.generate(PRECISE), *plain.stream(PRECISE), plain.body(PRECISE)]


@pytest.mark.parametrize("level", LEVELS)
def test_an_fp32_copy_runs_in_fp32_while_the_training_lives(level):
    _, plain, expected = generating(level)
    amp.initialize(linear([[1.0]]), opt_level="O4")  # a later one neither
    assert isinstance(plain, Generating) and type(plain).__qualname__ == "Generating"
    assert (
        plain.state_dict().keys() == Generating().state_dict().keys()
        and vars(plain).keys() == vars(Generating()).keys()
    )
    for each in (plain, copy.deepcopy(plain), copy.deepcopy({"of it": copy.deepcopy(plain)})["of it"]):
        assert training.same(in_eager(each), expected)
    assert type(pickle.loads(pickle.dumps(plain))) is Generating
    with amp.autocast(dtype=torch.bfloat16):  # the caller's own word
        assert plain.generate(PRECISE).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain.generate(PRECISE).dtype is torch.bfloat16
    assert training.same(in_eager(plain), expected)
    amp.restore()
    assert type(plain) is Generating and type(plain.body) is nn.Sequential
    assert training.same(in_eager(plain), expected)


def test_an_fp32_copy_is_of_the_plain_classes_where_no_casts_of_the_process_act():
    model = amp.initialize(convnet(), opt_level="O2")
    plain = amp.fp32_copy(model)
    assert type(plain) is training.ConvNet
    amp.initialize(linear([[1.0]]), opt_level="O1")
    assert type(plain) is not training.ConvNet
    assert type(plain.head) is nn.Linear  # known by its class to quantization and its like


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("how", ["trace", "script", "export", "compile"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_fp32_copy_is_exported_in_fp32_while_the_training_lives(level, how, fresh_compiler):
    _, plain, expected = generating(level)
    with torch.no_grad():
        if how == "export":
            made = torch.export.export(plain, (PRECISE,), strict=False)  # torch 2.6's default is True
            text = str(made.graph)
            made = made.module()
        elif how == "compile":
            graphs = []
            made = torch.compile(plain, backend=lambda graph, inputs: (graphs.append(graph), graph)[1], fullgraph=True)
            made(PRECISE)
            (graph,) = graphs
            text = graph.code
        else:
            made = torch.jit.trace(plain, PRECISE) if how == "trace" else torch.jit.script(plain)
            text = str(made.inlined_graph)
        assert not any(word in text for word in ("float16", "Half", "bfloat16", "BFloat16", "aten::to", "aten.to"))
        amp.restore()
        assert torch.equal(made(PRECISE), expected[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's exporters, about themselves
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_fp32_copy_becomes_onnx_in_fp32_while_the_training_lives(level, dynamo):
    onnx = pytest.importorskip("onnx", reason="torch.onnx.export needs onnx and onnxscript: pip install both")
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnx and onnxscript: pip install both")
    _, plain, _ = generating(level)
    file = io.BytesIO()
    program = torch.onnx.export(plain, (PRECISE,), None if dynamo else file, dynamo=dynamo)
    graph = (program.model_proto if dynamo else onnx.load_from_string(file.getvalue())).graph
    assert "MatMul" in {node.op_type for node in graph.node} and "Cast" not in {node.op_type for node in graph.node}
    assert {tensor.data_type for tensor in graph.initializer} <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}


def test_a_pickled_fp32_copy_needs_no_amp_patch(tmp_path):
    amp.initialize(linear([[1.0]]), opt_level="O1")
    model = amp.initialize(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), opt_level="O1")
    torch.save(amp.fp32_copy(model), tmp_path / "copy")
    code = (
        "import sys, torch; sys.modules['amp_patch'] = None\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "assert type(model) is torch.nn.Sequential and model(torch.ones(1, 2)).dtype is torch.float32"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "copy"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_parametrizations_of_an_fp32_copy_can_be_removed():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    model = amp.initialize(model, opt_level="O1").eval()
    plain = amp.fp32_copy(model)
    expected = plain(torch.ones(1, 2))
    nn.utils.parametrize.remove_parametrizations(plain[0], "weight")
    assert type(plain[0]) is nn.Linear and torch.equal(plain(torch.ones(1, 2)), expected)


def test_an_fp32_copy_can_be_trained_again():
    plain = amp.fp32_copy(amp.initialize(convnet(), opt_level="O1"))
    for level in LEVELS:
        model, optimizer = amp.initialize(plain, SGD(plain.parameters()), opt_level=level)
        training.train(model, optimizer, 1)
        assert [type(m) for m in amp.fp32_copy(model).body] == [type(m) for m in convnet().body]
    amp.restore()
    assert type(plain) is training.ConvNet and type(plain.body) is nn.Sequential


@pytest.mark.parametrize("level", LEVELS)
def test_data_parallel_s_replicas_run_their_own_weights_on_their_threads(level):
    model = linear([[2.0]])
    model = amp.initialize(model, opt_level=level)
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    for index, replica in enumerate(replicas):
        replica._parameters = {}
        replica.weight = torch.full((1, 1), 10.0 * (index + 1), dtype=model.weight.dtype)
        replica.bias = None
    results = [None, None]

    def run(index):
        results[index] = replicas[index](torch.ones(1, 1))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.item() for r in results] == [10.0, 20.0]
    assert {r.dtype for r in results} == {model(torch.ones(1, 1)).dtype}


@pytest.mark.parametrize("level", LEVELS)
def test_a_parent_and_its_child_in_one_list(level):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.generator = nn.Linear(2, 2), nn.Linear(2, 2)
            self.last = nn.Linear(2, 2)

        def forward(self, inputs):
            return self.last(self.generator(self.encoder(inputs)))

    model = Translator()
    models, optimizer = amp.initialize([model, model.generator], SGD(model.parameters()), opt_level=level)
    backward(model(torch.ones(1, 2)).sum() / 8 + model.generator(torch.ones(1, 2)).sum() / 8, optimizer)
    optimizer.step()
    assert models[1] is model.generator
    assert len(list(amp.master_params(optimizer))) == 6


@pytest.mark.parametrize("level", LEVELS)
def test_shared_weights_stay_shared(level):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids):
            return self.out(self.embed(ids))

    model = Tied()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    assert model.out.weight is model.embed.weight and len(list(amp.master_params(optimizer))) == 1
    training.train(model, optimizer, 2, lambda step: (torch.tensor([0, 1]), torch.tensor([1, 2])))
    twin = Tied()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin.embed.weight, model.state_dict()["out.weight"])


@pytest.mark.parametrize("kept", ["embed", "out"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_kept_module_s_weight_may_be_shared(level, kept):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mid, self.out = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids):
            return self.out(self.mid(self.embed(ids)))

    model = Tied()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, keep_fp32=kept)
    assert model.out.weight is model.embed.weight and model.out.weight.dtype is torch.float32
    training.train(model, optimizer, 2, lambda step: (torch.tensor([0, 1]), torch.tensor([1, 2])))


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_is_kept_as_a_whole_is_restored_too(level):
    model = linear([[2.0]])
    amp.initialize(model, SGD(model.parameters()), opt_level=level, keep_fp32=nn.Linear)
    amp.restore()
    assert type(model) is nn.Linear and "_amp" not in vars(model)


def test_a_module_is_no_longer_kept_when_a_later_call_does_not_name_it():
    model = amp.initialize(convnet(), opt_level="O1", keep_fp32="head")
    assert model(training.images(0)[0]).dtype is torch.float32
    model = amp.initialize(model, opt_level="O1")
    assert model(training.images(0)[0]).dtype is torch.float16 and type(model.head) is nn.Linear


def test_a_child_of_the_same_training_keeps_its_own_types_inside_its_parent():
    class Head(nn.Module):
        def forward(self, inputs):
            assert inputs.dtype is torch.float32
            return inputs

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(2, 2), Head()

        def forward(self, inputs):
            out = self.head(self.layer(inputs).float())
            assert out.dtype is torch.float32
            return out

    model = Parent()
    models = amp.initialize([model, model.head], opt_level="O2")
    assert models[0](torch.ones(1, 2)).dtype is torch.float32


def test_rnn_weights_are_flattened_again_after_the_cast(monkeypatch):
    calls = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: calls.append({p.dtype for p in self.parameters()}))
    amp.initialize(nn.Sequential(nn.LSTM(2, 2)), opt_level="O2")
    assert {torch.float16} in calls


def test_hooks_on_the_model_fire_and_are_kept():
    model, calls = convnet(), []
    model.register_forward_hook(lambda *a: calls.append("forward"))
    model.register_full_backward_hook(lambda *a: calls.append("backward"))
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2")
    training.train(model, optimizer, 1, lambda step: (training.images(0)[0].requires_grad_(), training.images(0)[1]))
    assert calls == ["forward", "backward"]


def accumulation_node(param):
    """The node of autograd that adds up the gradient of `param`, as Horovod and FSDP1 get at it."""
    return param.expand_as(param).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_on_accumulation_nodes_fire_after_the_cast_and_after_the_way_back(level):
    model = linear([[2.0]])
    node, calls = accumulation_node(model.weight), []
    node.register_prehook(lambda grads: calls.append("before"))
    removable = node.register_hook(lambda *_: calls.append(("once", model.weight.grad.dtype)))
    node.register_hook(lambda inputs, grads: calls.append(grads[0].dtype))
    model.weight.register_hook(lambda grad: calls.append("tensor"))
    model.weight.register_post_accumulate_grad_hook(lambda param: calls.append("accumulated"))
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=2.0)
    low = CAST.get(level, torch.float32)

    def fired():
        calls.clear()
        backward(model(torch.ones(1, 1)).sum(), optimizer)
        optimizer.zero_grad()
        return list(calls)

    assert sorted(map(str, fired())) == sorted(map(str, ["tensor", "before", ("once", low), low, "accumulated"]))
    removable.remove()  # the user's own handle still counts
    assert sorted(map(str, fired())) == sorted(map(str, ["tensor", "before", low, "accumulated"]))
    node.register_hook(lambda *_: calls.append("late"))
    for again in ("O5", "O2", "O0", level):
        model, optimizer = amp.initialize(model, optimizer, opt_level=again, loss_scale=2.0)
    assert sorted(map(str, fired())) == sorted(map(str, ["tensor", "before", low, "late", "accumulated"]))
    amp.restore()
    calls.clear()
    model(torch.ones(1, 1)).sum().backward()
    expected = ["tensor", "before", torch.float32, "late", "accumulated"]
    assert sorted(map(str, calls)) == sorted(map(str, expected))


def test_a_hook_before_an_accumulation_node_may_change_the_gradient():
    model = linear([[2.0]])
    node = accumulation_node(model.weight)
    node.register_prehook(lambda grads: (grads[0] * 4,))
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level="O2", loss_scale=2.0)
    backward(model(torch.ones(1, 1)).sum(), optimizer)
    assert next(amp.master_params(optimizer)).grad.item() == 4.0


def test_hooks_on_accumulation_nodes_keep_nothing_alive():
    model = linear([[2.0]])
    owner, known = [accumulation_node(model.weight)], weakref.ref(model.weight)
    owner[0].register_hook(lambda *_, owner=owner: None)
    model = amp.initialize(model, opt_level="O2")
    model(torch.ones(1, 1)).sum().backward()
    del model, owner
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "inference"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_an_ema_that_writes_through_state_dict_moves(level, trained):
    model = linear([[1.0]])
    model = (
        amp.initialize(model, SGD(model.parameters()), opt_level=level)[0]
        if trained
        else amp.initialize(model, opt_level=level)
    )
    average = copy.deepcopy(model)
    with torch.no_grad():
        model.state_dict()["weight"].fill_(2.0)
        assert model(torch.ones(1, 1)).item() == 2.0
        for _ in range(2):
            for mine, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mine.copy_(0.5 * mine + 0.5 * new)
    assert average(torch.ones(1, 1)).item() == 1.75
    assert average.state_dict()["weight"].item() == 1.75


@pytest.mark.parametrize("level", LEVELS)
def test_kept_containers_keep_what_is_inside_them(level):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.heads = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, inputs):
            features = self.trunk(inputs)
            return sum(head(features) for head in self.heads)

    model = amp.initialize(Heads(), opt_level=level, keep_fp32="heads")
    assert {p.dtype for p in model.heads.parameters()} == {torch.float32}
    assert model(torch.ones(1, 2)).isfinite().all()
    if level in ("O1", "O4"):
        assert model(torch.ones(1, 2)).dtype is torch.float32


@pytest.mark.parametrize("rule", [nn.LayerNorm, nn.Linear, nn.MultiheadAttention])
@pytest.mark.parametrize("level", LEVELS)
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


def test_buffers_that_were_half_before_stay_half_after_restore():
    model = nn.BatchNorm1d(2)
    model.register_buffer("table", torch.ones(2, dtype=torch.float16))
    model.register_buffer("mask", torch.ones(2))
    for level in ("O1", "O2"):
        amp.initialize(model, opt_level=level, keep_batchnorm_fp32=None if level == "O1" else False)
    amp.restore()
    assert model.table.dtype is torch.float16 and model.mask.dtype is torch.float32


def other_class(model, optimizer):
    model.__class__ = type("Changed", (type(model),), {})


def other_class_of_the_optimizer(model, optimizer):
    optimizer.__class__ = type("Changed", (type(optimizer),), {})


def other_shape(model, optimizer):
    model.weight.data = torch.ones(2, 3, dtype=torch.float16)


def other_type(model, optimizer):
    for param in model.parameters():
        param.data = param.data.double()


def broken_group(model, optimizer):
    optimizer.param_groups.insert(0, {"params": 1})


def broken_handle(model, optimizer):
    class Handle:
        def remove(self):
            raise ZeroDivisionError("no handle")

    optimizer._amp_stash.neighbours.handles.insert(0, Handle())


BROKEN = {
    other_class: "restore: the class of this Changed was changed after initialize() (parametrizations and fully_shard "
    "do so) and stays, though everything else is undone; undo such a change before restore()",
    other_class_of_the_optimizer: "restore: the class of this Changed was changed after initialize() (parametrizations "
    "and fully_shard do so) and stays, though everything else is undone; undo such a change before restore()",
    other_shape: "restore: parameter 'weight' of this Linear became torch.float16 of shape [2, 3] on cpu after "
    "initialize(), and its master is [1, 1] on cpu; it has the master's value again, and what was written into it "
    "meanwhile is lost: call restore() first, then model.double() and the like",
    other_type: "restore: parameter 'weight' of this Linear became torch.float64 of shape [1, 1] on cpu after "
    "initialize(), and its master is [1, 1] on cpu; it has the master's value again, and what was written into it "
    "meanwhile is lost: call restore() first, then model.double() and the like",
    broken_group: "restore: this SGD could not be restored whole (TypeError: 'int' object is not iterable), everything "
    "else is; it was changed after initialize() in a way from which none is known back: call restore() first",
    broken_handle: "restore: this SGD could not be restored whole (ZeroDivisionError: no handle), everything else is; "
    "it was changed after initialize() in a way from which none is known back: call restore() first",
}


@pytest.mark.parametrize("change", BROKEN)
def test_restore_restores_all_others_and_torch_when_one_cannot_be(change):
    """Others of trainings before and after it, and beside it in its own; a second call finds nothing to do."""
    nets = [linear([[1.0 / 3]]) for _ in range(5)]
    optimizers = [SGD(net.parameters()) for net in nets]
    amp.initialize(nets[0], optimizers[0], opt_level="O1")
    amp.initialize(nets[1:4], optimizers[1:4], opt_level="O2")
    amp.initialize(nets[4], optimizers[4], opt_level="O1")
    changed, its_optimizer = nets[2], optimizers[2]
    change(changed, its_optimizer)
    with pytest.raises(RuntimeError) as told:
        amp.restore()
    assert str(told.value) == BROKEN[change]
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float32
    amp.restore()
    for net, optimizer in zip(nets, optimizers, strict=True):
        assert type(net) is nn.Linear or (net is changed and change is other_class)
        assert type(optimizer) is torch.optim.SGD or change is other_class_of_the_optimizer
        assert net.weight.dtype is (torch.float64 if net is changed and change is other_type else torch.float32)
        assert torch.equal(net.weight.float(), torch.tensor([[1.0 / 3]]))  # the masters': FP16 has another third
        assert not hasattr(net, "_amp") and not hasattr(optimizer, "_amp_stash")
        assert not optimizer._optimizer_step_pre_hooks
        assert optimizer.param_groups[-1]["params"][0] is net.weight
        assert net(torch.ones(1, 1, dtype=net.weight.dtype)).dtype is net.weight.dtype


def test_the_trainings_from_before_stay_when_one_of_a_comparison_cannot_be_restored():
    known, (lost, other) = linear([[1.0]]), (linear([[1.0]]), linear([[1.0]]))
    amp.initialize(known, opt_level="O1")
    with pytest.raises(RuntimeError, match="class of this Changed was changed"), restored():
        amp.initialize([lost, other], opt_level="O2")
        other_class(lost, None)
    assert type(other) is nn.Linear and other.weight.dtype is torch.float32
    assert known(torch.ones(1, 1)).dtype is torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float16


def test_an_initialize_that_fails_tells_why_though_what_it_began_cannot_be_undone(monkeypatch):
    model = linear([[1.0]])

    def fail(*_):
        other_class(model, None)
        raise KeyError("why")

    monkeypatch.setattr("amp_patch.model.tensors.reflatten", fail)
    with pytest.raises(KeyError, match="why"):
        amp.initialize(model, SGD(model.parameters()), opt_level="O2")
    monkeypatch.undo()
    assert model.weight.dtype is torch.float32
    amp.restore()


def test_overrides_of_a_parent_s_method_by_a_property_stay():
    class Parent(nn.Module):
        def size(self):
            return "method"

    class Child(Parent):
        size = property(lambda self: "property")

    model = amp.initialize(Child(), opt_level="O2")
    assert model.size == "property"


def test_a_class_patched_later_is_what_runs():
    class Patched(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs)

    model = amp.initialize(Patched(1, 1), opt_level="O2")
    Patched.forward = lambda self, inputs: inputs * 3
    assert model(torch.ones(1, 1)).item() == 3.0


def test_a_registry_of_the_user_s_classes_sees_none_of_ours():
    registry = []

    class Registered(nn.Module):
        def __init_subclass__(cls, *, tag, **kwargs):
            registry.append(cls)

        def forward(self, inputs):
            return inputs

    class Net(Registered, tag=1):
        pass

    amp.initialize(Net(), opt_level="O2")
    assert registry == [Net]


@pytest.mark.parametrize("copied", [False, True])
def test_a_state_dict_under_inference_mode_can_be_written_through_later(copied):
    model = amp.initialize(linear([[1.0]]), opt_level="O2")
    model = copy.deepcopy(model) if copied else model
    with torch.inference_mode():
        state = model.state_dict()
    with torch.no_grad():
        state["weight"].fill_(2.0)
        assert model(torch.ones(1, 1)).item() == 2.0


def test_fp32_copy_takes_a_part_or_a_wrapper_of_a_model():
    model = amp.initialize(convnet(), opt_level="O2")
    for part in (model.body, nn.ModuleDict({"net": model})):
        plain = amp.fp32_copy(part)
        assert {p.dtype for p in plain.parameters()} == {torch.float32}
        assert not any("_amp" in vars(m) for m in plain.modules())
    assert "_amp" in vars(model)


CHILD = """
import sys, pickle, torch
from torch import nn
with open(sys.argv[1], "rb") as file:
    o1, (o2, optimizer), kept = pickle.load(file)
assert o1(torch.ones(1, 2)).dtype is torch.float16
from amp_patch import amp
with amp.scale_loss(o2(torch.ones(1, 2)).sum() / 8, optimizer) as scaled_loss:
    scaled_loss.backward()
assert nn.utils.clip_grad_norm_(o2.parameters(), 1.0) > 0
with torch.no_grad():
    kept.eval()(torch.ones(1, 3, 8))
"""


def test_models_and_optimizers_work_when_another_process_loads_them(tmp_path):
    o1 = amp.initialize(nn.Linear(2, 2), opt_level="O1")
    o2 = nn.Linear(2, 2)
    pair = amp.initialize(o2, torch.optim.SGD(o2.parameters(), lr=0.1), opt_level="O2")
    kept = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    kept = amp.initialize(kept, opt_level="O2", keep_fp32="linear2")
    (tmp_path / "pickle").write_bytes(pickle.dumps((o1, pair, kept)))
    done = subprocess.run([sys.executable, "-c", CHILD, tmp_path / "pickle"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


CONVERSIONS = {
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to("cpu", torch.float32),
    "type": lambda model: model.type(torch.float32),
    "of a wrapper": lambda model: nn.Sequential(model).to(torch.float16).float(),
}


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("level", CAST)
def test_a_conversion_of_a_cast_model_is_refused_with_the_ways_out(level, convert):
    model = convnet()  # at O2 and O5 its batch norm is FP32, so that any conversion changes something
    model, _ = amp.initialize(model, SGD(model.parameters()), opt_level=level, keep_fp32="head")
    before = training.weights(model)
    words = rf"initialize\(opt_level='{level}'\).*amp\.restore\(\).*amp\.fp32_copy\(model\).*keep_fp32"
    with pytest.raises(RuntimeError, match=words):
        CONVERSIONS[convert](model)
    assert training.same(training.weights(model), before)
    assert {p.dtype for p in model.body[0].parameters()} == {CAST[level]}
    amp.restore()
    assert {p.dtype for p in model.float().parameters()} == {torch.float32}


@pytest.mark.parametrize("level", LEVELS)
def test_moves_that_keep_the_type_are_torch_s(level):
    model = amp.initialize(convnet(), opt_level=level)
    types = [p.dtype for p in model.parameters()]
    for move in (lambda: model.to("cpu"), model.cpu, model.share_memory, lambda: model.to(torch.ones(1).device)):
        assert move() is model and [p.dtype for p in model.parameters()] == types
    assert {p.device.type for p in model.to("meta").parameters()} == {"meta"}
    if level in ("O0", "O1", "O4"):
        model.float()


CHANGES = {
    "a part": lambda model, inputs: (model.head.float(), model(inputs)),
    "a part in another half": lambda model, inputs: (
        model.head.to(torch.float16 if model.head.weight.dtype is torch.bfloat16 else torch.bfloat16),
        model(inputs),
    ),
    "functional_call": lambda model, inputs: torch.func.functional_call(
        model, {"head.weight": torch.ones(5, 36)}, (inputs,)
    ),
    "a new layer": lambda model, inputs: (setattr(model, "head", nn.Linear(36, 5)), model(inputs)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("level", CAST)
def test_weights_of_another_type_are_named_where_forward_fails_on_them(level, change):
    model = amp.initialize(convnet(), opt_level=level)
    with pytest.raises(RuntimeError, match=r"'head\.weight'.* got another type since.*keep_fp32") as error:
        CHANGES[change](model, training.images(0)[0])
    assert isinstance(error.value.__cause__, RuntimeError) and str(error.value).startswith(str(error.value.__cause__))


@pytest.mark.parametrize("level", LEVELS)
def test_functional_call_takes_values_of_the_model_s_types(level):
    model, inputs = amp.initialize(convnet(), opt_level=level), training.images(0)[0]
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not torch.func.functional_call(model, zeros, (inputs,)).any()
    assert torch.func.functional_call(model, dict(model.named_parameters()), (inputs,)).any()


class Called(nn.Module):
    """Defines __call__ in place of forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def __call__(self, inputs):
        return self.layer(inputs)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_defines_only_call_is_refused_by_name_or_named(level):
    with pytest.raises(ValueError, match=r"Called defines __call__ and no forward.*methods=\('__call__',\)"):
        amp.initialize(Called(), opt_level=level)
    model = amp.initialize(Called(), opt_level=level, methods=("__call__",))
    assert model(torch.ones(1, 2)).dtype is {"O1": torch.float16, "O4": torch.bfloat16}.get(level, torch.float32)
