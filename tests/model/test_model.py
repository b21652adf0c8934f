"""Models in a training: casts of inputs and outputs, modules that stay FP32, state dicts, methods, copies."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import inspect
import threading
import weakref

import pytest
import torch
import training
from crossed import crossed
from low_models import CAST
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from training import LEVELS, SGD, backward, convnet, linear

from amp_patch import amp
from amp_patch.model import forward


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


@crossed({"level": list(CAST), "kind": list(CONTAINERS)}, meet=1)
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


@pytest.mark.parametrize("level", LEVELS)
def test_signature_name_and_isinstance_stay(level):
    plain = convnet()
    model = amp.initialize(convnet(), opt_level=level)
    assert isinstance(model, training.ConvNet) and type(model).__name__ == "ConvNet"
    assert type(model).__module__ == training.ConvNet.__module__
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert repr(model) == repr(plain)


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


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_data_parallel_s_replicas_run_their_own_weights_on_their_threads(level, copied):
    model = linear([[2.0]])
    model, _ = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    model = copy.deepcopy(model) if copied else model
    replicas = [model._replicate_for_data_parallel() for _ in range(2)]
    for index, replica in enumerate(replicas):
        replica._parameters = {}
        replica.weight = torch.full((1, 1), 10.0 * (index + 1), dtype=model.weight.dtype)
        replica._former_parameters = {"weight": replica.weight}  # as torch's `replicate` has it
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


def accumulation_node(param):
    """Return the AccumulateGrad node of `param`, as Horovod and FSDP1 do."""
    return param.expand_as(param).grad_fn.next_functions[0][0]


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_on_accumulation_nodes_fire_after_the_cast_and_after_the_way_back(level):
    model = linear([[2.0]])
    node, calls = accumulation_node(model.weight), []
    node.register_prehook(lambda grads: calls.append("before"))
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

    wanted = sorted(map(str, ["tensor", "before", low, "accumulated"]))
    assert sorted(map(str, fired())) == wanted
    for again in ("O5", "O2", "O0", level):
        model, optimizer = amp.initialize(model, optimizer, opt_level=again, loss_scale=2.0)
    assert sorted(map(str, fired())) == wanted
    amp.restore()
    calls.clear()
    model(torch.ones(1, 1)).sum().backward()
    expected = ["tensor", "before", torch.float32, "accumulated"]
    assert sorted(map(str, calls)) == sorted(map(str, expected))


def test_hooks_on_accumulation_nodes_keep_nothing_alive():
    model = linear([[2.0]])
    owner, known = [accumulation_node(model.weight)], weakref.ref(model.weight)
    owner[0].register_hook(lambda *_, owner=owner: None)
    model = amp.initialize(model, opt_level="O2")
    model(torch.ones(1, 1)).sum().backward()
    del model, owner
    gc.collect()
    assert known() is None


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
    "a new tensor": lambda model, inputs: (
        setattr(model.head, "weight", nn.Parameter(torch.ones(5, 36))),
        model(inputs),
    ),
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
