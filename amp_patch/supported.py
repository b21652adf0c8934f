"""The table of options and surroundings that cannot be combined: the reason, and the way out.

Error messages take their reasons from it, docs/limits.md prints it, and tests/frontend/test_supported.py tests each
entry.
"""

from __future__ import annotations

OPTIONS = {
    "split": '`master_weights="split"`',
    "stochastic": '`master_weights="stochastic"`',
    "8bit": '`optimizer_state="8bit"`',
    "act8": '`saved_activations="8bit"`',
    "offload": '`master_device="cpu"`',
    "gradient_release": "`gradient_release=True`",
    "formats": "O6, O7",
}
SURROUNDINGS = (
    *("a closure", "FSDP2", "ZeRO", "DDP", "several optimizers", "wrappers", "CUDA graphs", "registered classes"),
)

_CLOSURE = (
    "the step computes gradients inside, in which forwards read masters that the step is writing: call the closure's "
    "body first, then step() without it, or leave master_weights at None"
)
_PROCESSES = "several processes add up their gradients before a step: leave gradient_release out"

# (option, surrounding) -> why not, and the way out. Any other combination is supported.
_REFUSED = {
    ("split", "a closure"): _CLOSURE,
    ("split", "FSDP2"): "its FP32 shards are the masters themselves: leave master_weights at None",
    ("stochastic", "a closure"): _CLOSURE,
    ("stochastic", "FSDP2"): (
        "the FP32 shards are the masters, and each process has those of its share alone: leave master_weights at None"
    ),
    ("stochastic", "ZeRO"): (
        "it sends each process's share in FP32, for which all masters are made whole: use master_weights='split', or "
        "fully_shard with master_weights at None"
    ),
    ("stochastic", "CUDA graphs"): (
        "each replay would round with the random bits of the capture: leave the step out of the graph, or use "
        "master_weights='split'"
    ),
    ("8bit", "FSDP2"): (
        "each process keeps the state of its shards alone already, in DTensors, which are not stored as codes: leave "
        "optimizer_state at None"
    ),
    ("8bit", "ZeRO"): (
        "the optimizer inside keeps the state of this process's share alone already: leave optimizer_state at None"
    ),
    ("8bit", "CUDA graphs"): (
        "no replay would encode what was written into the state: leave the step out of the graph, or optimizer_state "
        "at None"
    ),
    ("act8", "FSDP2"): (
        "the weights that it gathers cannot be told from activations, and would be coded too: leave saved_activations "
        "at None, or checkpoint the activations"
    ),
    ("offload", "a closure"): (
        "the step computes gradients inside, and forwards there read weights that the host has yet to send: call the "
        "closure's body first, then step() without it, or leave master_device at None"
    ),
    ("offload", "FSDP2"): (
        "its FP32 shards are the masters, and torch moves them to the host by itself: give fully_shard "
        "offload_policy=CPUOffloadPolicy(), and leave master_device at None"
    ),
    ("offload", "ZeRO"): (
        "it broadcasts the masters of each share on the device: leave master_device at None, or use an optimizer of "
        "torch.optim"
    ),
    ("offload", "CUDA graphs"): (
        "the host steps, and a graph holds work of the device alone: leave the iteration out of the graph, or "
        "master_device at None"
    ),
    ("formats", "FSDP2"): "DTensors have no product in FP8 or FP4: choose opt_level O4 or O5",
    ("gradient_release", "a closure"): "they come when the step has begun: call the closure's body first",
    ("gradient_release", "FSDP2"): _PROCESSES,
    ("gradient_release", "ZeRO"): _PROCESSES,
    ("gradient_release", "DDP"): _PROCESSES,
    ("gradient_release", "wrappers"): (
        "they move the weights between backward and step: give the optimizer inside, or leave gradient_release out"
    ),
    ("gradient_release", "registered classes"): (
        "its class is not one of torch.optim, which alone are known to step single parameters without a count of their "
        "own: use one of those, or leave gradient_release out"
    ),
    ("gradient_release", "CUDA graphs"): "a replay runs no hook of backward: leave the iteration out of the graph",
}

# (option, surrounding) -> why not, or None if the combination is supported.
SUPPORTED = {
    (option, surrounding): _REFUSED.get((option, surrounding)) for option in OPTIONS for surrounding in SURROUNDINGS
}


def reason(option: str, surrounding: str) -> str:
    """Return why `option` is refused with `surrounding`, and the way out."""
    found = SUPPORTED[option, surrounding]
    if found is None:
        raise KeyError(f"supported.reason: {option!r} goes with {surrounding!r}")
    return found
