"""`master_device="cpu"`: masters and state on the host, weights and gradients on the device.

Quick tests copy between two places of the CPU's memory. The slow ones train on a device of their own, which counts.
"""

from __future__ import annotations

import pytest
import torch
from offloaded import (
    FEW,
    LEVELS,
    MAKERS,
    WAYS,
    accumulated,
    clipped,
    differ,
    edited,
    net,
    plain,
    resumed,
    scheduled,
    train,
    train_apart,
)
from offloaded_scenes import RELEASED, SCENES, scene, with_gaps
from scripts import report_of

from amp_patch import amp, multi_tensor
from amp_patch.environment import name_of, named_level
from amp_patch.support import device_sync


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_each_way_trains_to_the_bits_of_masters_beside_the_weights(way, level):
    for name in ("AdamW", "of another package"):
        assert not differ(train_apart(way, name, **LEVELS[level]), train(way, name, **LEVELS[level])), name


@pytest.mark.parametrize("name", MAKERS)
def test_each_optimizer_trains_to_the_same_bits(name):
    for level in ("O5", "O2"):
        for way in FEW:
            assert not differ(train_apart(way, name, **LEVELS[level]), train(way, name, **LEVELS[level])), (level, way)


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "of another package"])
def test_without_the_extension_the_bits_are_the_same(name):
    with multi_tensor.use_backend("torch"):
        for way in (plain, clipped, accumulated, edited, resumed):
            assert not differ(train_apart(way, name, **LEVELS["O2"]), train(way, name, **LEVELS["O2"])), way


@pytest.mark.parametrize("level", ["O5", "O2"])
@pytest.mark.parametrize("way", SCENES, ids=lambda way: way.__name__)
def test_other_models_and_optimizers_train_to_the_same_bits(way, level):
    wanted = scene(way, **LEVELS[level])
    for release in (False, True) if level == "O5" and way in RELEASED else (False,):
        found = scene(way, apart=True, master_device="cpu", gradient_release=release, **LEVELS[level])
        assert not differ(found, wanted), release


def test_a_capture_of_forward_and_backward_alone_is_refused_by_name(monkeypatch):
    def captured(training, step):
        monkeypatch.setattr(device_sync, "is_capturing", lambda: True)
        training.backward(step)

    with pytest.raises(RuntimeError, match=r"scale_loss: a CUDA graph is being captured, and master_device='cpu'"):
        train_apart(lambda training: captured(training, 0), "AdamW", opt_level="O5")


def test_weights_with_gaps_in_memory_train_too():
    found = []
    for apart in (False, True):
        found.append(scene(with_gaps, apart=apart, master_device="cpu" if apart else None, opt_level="O5"))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)  # kernels for gaps and without may differ in the last bit


def test_eight_bit_state_is_on_the_host_too():
    options = {"opt_level": "O5", "optimizer_state": "8bit"}
    assert not differ(train_apart(clipped, "AdamW", **options), train(clipped, "AdamW", **options))


# ----------------------------------------------------------------------------------------------------------------------
# On a machine with a CPU alone, and what is refused


@pytest.mark.parametrize("release", [False, True])
def test_on_one_device_the_option_changes_nothing(release):
    options = {"opt_level": "O5", "gradient_release": release}
    found, wanted = (train(plain, "AdamW", master_device=device, **options) for device in ("cpu", None))
    assert not differ(found, wanted)


def test_with_gradient_release_the_step_is_made_by_step_and_clipping_works():
    for way in (plain, clipped, scheduled):
        found = train_apart(way, "AdamW", opt_level="O5", gradient_release=True)
        assert not differ(found, train(way, "AdamW", opt_level="O5"))


def test_the_rung_is_the_option(monkeypatch):
    assert named_level("O5+offload").options == {"master_device": "cpu"}
    model = net()
    model, optimizer = amp.initialize(model, MAKERS["AdamW"](list(model.parameters())), opt_level="O5+8bit+offload")
    assert name_of(optimizer._amp_stash.policy) == "O5+8bit+offload"
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "O2+offload")
    model = net()
    model, optimizer = amp.initialize(model, MAKERS["AdamW"](list(model.parameters())), opt_level="O1")
    assert optimizer._amp_stash.policy.master_device == "cpu"
    monkeypatch.setenv("AMP_PATCH_OPT_LEVEL", "O1")
    amp.initialize(net(), opt_level="O5", master_device="cpu")  # dropped, and logged


@pytest.mark.parametrize(
    ("options", "words"),
    [({"opt_level": level}, "wanted None, or 'cpu' at O2 or O5") for level in ("O0", "O1", "O3", "O4", "O6", "O7")]
    + [
        ({"opt_level": "O5", "master_device": "cuda"}, "master_device is 'cuda'"),
        ({"opt_level": "O5", "master_weights": "split"}, "master_weights is 'split'"),
        ({"opt_level": "O5+stochastic"}, "master_weights is 'stochastic'"),
        ({"opt_level": "O5", "master_weights": False}, "master_weights is False"),
        ({"opt_level": "O5", "cast_model_type": torch.float32}, "master_weights is None"),
    ],
)
def test_what_has_no_whole_masters_is_refused(options, words):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=words):
        amp.initialize(model, optimizer, **{"master_device": "cpu", **options})
    assert type(optimizer) is torch.optim.AdamW and model[0].weight.dtype is torch.float32


# ----------------------------------------------------------------------------------------------------------------------
# On a device that counts


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The report of offloaded.py."""
    return report_of("offloaded.py", tmp_path_factory.mktemp("device"))


@pytest.mark.slow  # a compiler works for a minute, and the trainings for another
def test_on_a_device_each_training_has_the_bits_of_a_cpu_and_of_masters_on_the_device(elsewhere):
    assert elsewhere["trained"] > 90 and elsewhere["differ"] == []


@pytest.mark.slow
def test_a_step_copies_two_bytes_a_parameter_each_way_and_waits_once(elsewhere):
    for level, counts in elsewhere["counts"].items():
        step, kind = counts["step"], "Half" if level == "O2" else "BFloat16"
        assert step[f"down {kind}"] == step[f"up {kind}"] == 2 * counts["elements"], level
        others = {name: count for name, count in step.items() if name.startswith(("down", "up")) and kind not in name}
        assert sum(others.values()) <= 8, (level, "the loss scale and the flag", others)
        assert step["waits"] == 1 and "waits" not in counts["backward"], level
    assert elsewhere["counts"]["O2"]["scale"] == 256.0, "no step of O2 was skipped"


@pytest.mark.slow
def test_the_device_holds_weights_and_gradients_alone(elsewhere):
    kept, released = (elsewhere["counts"][name] for name in ("O5", "released"))
    weights, largest, some = 2 * kept["elements"], 2 * 2**16, 2**13
    assert weights <= kept["step"]["held"] < weights + some
    assert 2 * weights <= kept["step"]["peak"] < 2 * weights + some
    assert weights + largest <= released["step"]["peak"] < weights + largest + some
