"""FP32 masters in two halves: the BF16 weight is the high one, and an int16 tensor keeps the other 16 bits.

Such a master has no memory of its own. Whoever hands it to a function of torch finds an FP32 tensor, joined at that
moment: the master is open then. What was written into it is split again before the next forward or step, which also
gives its memory back. Somebody may hold that memory by another tensor, a detached one say: then it stays, and is joined
anew after each step.

An open master that nobody has written is joined anew by each read. Halves change without Python, too: in the replays of
a CUDA graph.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from amp_patch import multi_tensor
from amp_patch.masters.grad_field import GRAD
from amp_patch.masters.master import Master
from amp_patch.support import device_sync, tree
from amp_patch.support.blocks import without_grad
from amp_patch.support.compiled import asks_first
from amp_patch.support.patches import Installation, Patches

_DATA: Any = Tensor.data
_raw = torch._C.DisableTorchFunctionSubclass  # in its `with` block torch reads a master's own memory, joined or not
_opening = RLock()
_constructors = Installation()
_ATTRIBUTES = ("low_half", "weight", "joined", "captured")

# C++ code bypasses `__torch_function__`: make it raise instead of reading freed memory. Without the extension torch can
# make only those functions raise that want a pointer to write to.
_NO_MEMORY = (
    "a split master (master_weights='split') was handed to compiled code that does not ask for its value: torch.func, "
    "TorchScript, to_dlpack or an extension; give it master.detach()"
)
_C: Any = multi_tensor.extension()
_deny_memory: Any = getattr(_C, "deny_memory", lambda tensor, _: torch._C._set_throw_on_mutable_data_ptr(tensor))

# id(master) -> the masters whose memory has the joined value.
_open: dict[int, weakref.ref[SplitMaster]] = {}
used = False  # whether any master was ever split in this process; if not, no master needs a look


class SplitMaster(Master):
    """A master that is kept as halves.

    `split` gives a master this class, `unsplit` takes it away. A copy is whole, and so is what is pickled.

    Attributes:
        low_half: int16, laid out as the weight; None: this one is whole, as copies are.
        weight: gives the parameter, or None where that is gone.
        joined: while it is open, its version when its memory had what the halves had; None where a step may write.
        captured: while it is open, whether the joining is a part of a CUDA graph, with the memory.
    """

    low_half: Tensor | None = None
    weight: Callable[[], Tensor | None] = staticmethod(lambda: None)
    joined: int | None = None
    captured = False

    @property
    def is_open(self) -> bool:
        """Whether the memory has the value."""
        return self.low_half is None or id(self) in _open

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        memory = [] if func in _of_no_value() else opened(tree.tensors([*args, *kwargs.values()]))
        others = [kind for kind in types if not issubclass(kind, SplitMaster)]
        try:
            if others:
                return others[0].__torch_function__(func, tuple(others), args, kwargs)
            with _raw():
                return func(*args, **kwargs)
        finally:
            memory.clear()  # a traceback may keep this frame

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        return {name: value for name, value in kept.items() if name not in _ATTRIBUTES}


def weight_is(master: Tensor, param: Tensor | None) -> None:
    """Let a split `master` hold `param` weakly, as the weight that is its high half; None: hold nothing."""
    if is_split(master):
        assert isinstance(master, SplitMaster)
        master.weight = (lambda: None) if param is None else weakref.ref(param)


def low_half(master: Tensor) -> Tensor | None:
    """The half (int16) that a split master keeps beside the weight; None of any other, and of a copy."""
    return master.low_half if type(master) is SplitMaster else None


def is_split(master: Tensor) -> bool:
    """Whether `master` is kept as halves."""
    return low_half(master) is not None


@functools.cache
def _of_no_value() -> frozenset[Any]:
    """Torch's functions that read or set metadata (shape, grad, hooks), never the values."""
    names = "shape dtype device layout ndim is_leaf retains_grad grad_fn requires_grad output_nr names itemsize nbytes"
    names += " is_cpu is_cuda is_xpu is_mps is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn _version"
    names += " _backward_hooks _post_accumulate_grad_hooks _grad_fn _base"
    attributes = [attribute for name in names.split() if (attribute := getattr(Tensor, name, None)) is not None]
    found = {attribute.__get__ for attribute in (*attributes, GRAD)}
    settable: tuple[Any, ...] = (GRAD, Tensor.requires_grad, Tensor._backward_hooks)  # noqa: SLF001
    found |= {GRAD.__delete__, *(attribute.__set__ for attribute in settable)}
    methods = "size dim stride numel nelement element_size storage_offset is_contiguous is_floating_point is_complex"
    methods += " is_inference is_same_size requires_grad_ get_device register_hook retain_grad"
    methods += " register_post_accumulate_grad_hook __len__ _is_view is_neg is_conj is_coalesced"
    found |= {getattr(Tensor, name) for name in methods.split() if hasattr(Tensor, name)}
    found |= {getattr(torch, name) for name in ("is_floating_point", "is_complex", "numel") if hasattr(torch, name)}
    return frozenset(found)


# ----------------------------------------------------------------------------------------------------------------------
# Masters become halves, and whole again


@without_grad
def split(pairs: Iterable[tuple[Tensor, Tensor]], *, exact: bool = False) -> None:
    """Keep the masters (param, master) of bfloat16 parameters as halves, in place, on the device; no sync.

    The parameters are rounded anew: ties away from zero. Not where the masters have `exact`ly their values.
    """
    global used
    used = True
    for param, master in pairs:
        if is_split(master) or param.dtype is not torch.bfloat16:
            continue
        half = torch.zeros_like(param, dtype=torch.int16, requires_grad=False)
        if not exact:
            with _raw():
                multi_tensor.multi_tensor_split([_laid_out_as(param, master)], [param], [half])
        master.__class__ = SplitMaster
        assert isinstance(master, SplitMaster)
        master.low_half = half
        weight_is(master, param)
        with _raw():
            _note_open(master)
        _close(master)


@without_grad
def unsplit(master: Tensor) -> None:
    """Make `master` an ordinary one, in place."""
    if isinstance(master, SplitMaster) and is_split(master):
        _bring_up_to_date([master])
        _open.pop(id(master), None)
    for name in _ATTRIBUTES:
        vars(master).pop(name, None)
    master.__class__ = Master


def _note_open(master: SplitMaster) -> None:
    """Note that the memory of `master` has what the halves have; `_raw`."""
    master.joined, master.captured = master._version, device_sync.is_capturing()
    _open[id(master)] = weakref.ref(master, functools.partial(_forget, id(master)))


def _forget(key: int, reference: Any) -> None:
    if _open.get(key) is reference:
        del _open[key]


# ----------------------------------------------------------------------------------------------------------------------
# Masters are opened and closed


def materialize(masters: Iterable[Tensor]) -> None:
    """Join the halves of `masters` for a step, in place, on the device; no sync.

    From now on the memory counts, whatever their versions say: torch's fused kernels leave these as they are.

    Raises:
        RuntimeError: the parameter of one is gone, and the high half with it.
    """
    split = [master for master in masters if isinstance(master, SplitMaster)]
    with _opening:
        _bring_up_to_date(split)
        for master in split:
            master.joined = None


def follow(held: Iterable[SplitMaster]) -> None:
    """Join the masters that `release` returned anew, for those who hold their memory, in place; no sync.

    Not while a CUDA graph is captured: each replay would write into that memory, which is not the graph's.
    """
    if not device_sync.is_capturing():
        _bring_up_to_date(held)


def _bring_up_to_date(masters: Iterable[SplitMaster]) -> None:
    """Join the halves of those that are closed, and of those that are open and that nobody has written."""
    behind = [master for master in masters if _halves_count(master)]
    if behind:
        with _opening:
            once = {id(master): master for master in behind if _halves_count(master)}
            _outside_of_modes(_join, list(once.values()))


def _halves_count(master: SplitMaster) -> bool:
    """Whether the halves have the value of `master`: it is closed, or open and not written since it was joined."""
    if not master.is_open:
        return True
    if master.low_half is None or master.joined is None or master.weight() is None:
        return False
    with _raw():
        return master.joined == master._version


def _outside_of_modes(function: Callable[[Any], None], argument: Any) -> None:
    """Call `function` where the memory that it makes is ordinary: a transform of torch.func would have it for its own.

    A dispatch mode, which FakeTensorMode is, would make other tensors.

    torch's context managers are entered where they are needed alone: what they undo is lost by an interrupt in them.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        with temporarily_clear_interpreter_stack():
            _outside_of_modes(function, argument)
    elif torch._C._len_torch_dispatch_stack() > 0:
        with _disable_current_modes():
            _outside_of_modes(function, argument)
    elif torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            function(argument)
    else:
        function(argument)


def opened(tensors: list[Tensor]) -> list[Any]:
    """Open the split masters among `tensors`; their memory, which no other thread's step takes while this is held."""
    masters = [t for t in tensors if isinstance(t, SplitMaster)]
    with _opening:
        _bring_up_to_date(masters)
        with _raw():
            for master in masters:
                _note_stream(master)
            return [master.untyped_storage() for master in masters]


@without_grad
def _join(masters: list[SplitMaster]) -> None:
    lists = _Lists()
    others: list[tuple[Tensor, Tensor]] = []  # masters whose weight lies otherwise in memory by now, and their values
    with _raw():
        for master in masters:
            param = master.weight()
            if param is None or master.low_half is None:
                raise RuntimeError(
                    "a split master was read whose parameter is gone, and with it one half of the value; keep the "
                    "model as long as its masters, or take copies of them before: [p.detach().clone() for p in "
                    "amp.master_params(optimizer)]"
                )
            _give_memory(master, param)
            value = _DATA.__get__(master)  # a tensor with a version counter of its own: this is no edit
            if param.dtype is torch.bfloat16:
                master.low_half = _laid_out_as(param, master.low_half)
                joined = value if _is_alike(value, param) else torch.empty_like(param, dtype=torch.float32)
                lists.add(param, param, master.low_half, joined)
                if joined is not value:
                    others.append((value, joined))
            else:  # a script gave the parameter another type: it holds the whole value
                value.copy_(param)
        for weights, halves, values in lists.of_devices:
            multi_tensor.multi_tensor_join(weights, halves, values)
        for value, joined in others:
            value.copy_(joined)
        for master in masters:
            _note_open(master)


def _give_memory(master: Tensor, param: Tensor) -> None:
    """Memory for the value, laid out as the master ever was, as the optimizer's state is; `_raw`.

    While a CUDA graph is captured it is the graph's own: replays write into it, long after other memory was given back.
    """
    if master.device != param.device or master.shape != param.shape:
        _DATA.__set__(master, torch.empty_like(param, dtype=torch.float32, requires_grad=False))
    elif master.untyped_storage().nbytes() < 4 * master.numel() or device_sync.is_capturing():
        _DATA.__set__(master, torch.empty_like(master, requires_grad=False))


@without_grad
def split_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Split those of the masters (param, master) that were written, in place, on the device; close the open ones.

    Raises:
        RuntimeError: a CUDA graph is being captured, and one was written before: each replay would split that again.
    """
    opened = [(param, m) for param, m in pairs if isinstance(m, SplitMaster) and id(m) in _open]
    written = [(param, master) for param, master in opened if not _halves_count(master)]
    if device_sync.is_capturing() and not all(master.captured for _, master in written):
        raise RuntimeError(
            "a split master (master_weights='split') was written before the capture of a CUDA graph began, and each "
            "replay would bring that value back; call the model, or its state_dict(), between the write and the capture"
        )
    with _raw():
        _split_all(written)  # a call of its own: its lists hold the memory too
    for _, master in opened:
        _close(master)


def _split_all(pairs: list[tuple[Tensor, SplitMaster]]) -> None:
    lists = _Lists()
    for param, master in pairs:
        assert master.low_half is not None
        master.low_half = _laid_out_as(param, master.low_half)
        lists.add(param, _laid_out_as(param, master.detach()), param, master.low_half)
    for masters, weights, halves in lists.of_devices:
        multi_tensor.multi_tensor_split(masters, weights, halves)


class _Lists:
    """Per device three lists of tensors, for one call of a kernel."""

    def __init__(self) -> None:
        self._of: dict[torch.device, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}

    def add(self, param: Tensor, *tensors: Tensor) -> None:
        for some, tensor in zip(self._of.setdefault(param.device, ([], [], [])), tensors, strict=True):
            some.append(tensor)

    @property
    def of_devices(self) -> Iterable[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        return self._of.values()


@without_grad
def drop_joined(masters: Iterable[Tensor]) -> None:
    """Give back the memory of those `masters` that are open; what was written there and not split is lost.

    One whose memory somebody else holds is joined anew: after the halves have changed, or to see what was written into
    the weight.
    """
    follow(release(masters))


@without_grad
def release(masters: Iterable[Tensor]) -> list[SplitMaster]:
    """`drop_joined`, save that masters whose memory somebody else holds are returned, to be joined anew by `follow`."""
    opened = [m for m in masters if id(m) in _open and isinstance(m, SplitMaster)] if _open else []
    held = [master for master in opened if not _close(master)]
    for master in held:
        _open.pop(id(master), None)
    return held


def _close(master: SplitMaster) -> bool:
    """Give back the memory of an open `master`, which has what the halves have; not where somebody else holds it."""
    with _opening, _raw():
        storage = master.untyped_storage()
        if _holders(storage) != _lone_holders() or (master.device.type == "cpu" and storage.is_shared()):
            master.joined = master._version
            return False  # another process may hold shared memory
        # Else a backward pass for which autograd has saved this master would read freed memory.
        torch.autograd.graph.increment_version(master)
        _open.pop(id(master), None)
        _note_stream(master)
        if not storage.resizable():  # an array has had it
            _DATA.__set__(master, torch.empty_like(master, requires_grad=False))
        master.untyped_storage().resize_(0)
        if master.numel():
            _deny_memory(master, _NO_MEMORY)
        return True


def _note_stream(master: SplitMaster) -> None:
    """Let the memory wait, once it is given back, for what the current stream has yet to do with it; `_raw`.

    It goes back to the stream that it was taken on, where it may be another tensor's at once.
    """
    if master.is_cuda:
        master.record_stream(torch.cuda.current_stream(master.device))


def _holders(storage: Any) -> tuple[int, int]:
    """How many tensors, views and the like hold this memory, and how many the object that Python has of it."""
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _lone_holders() -> tuple[int, int]:
    """The holders of a storage that is one tensor's, and that one variable has."""
    alone = torch.empty(1, dtype=torch.float32, device="cpu")
    storage = alone.untyped_storage()
    return _holders(storage)


def _is_alike(tensor: Tensor, param: Tensor) -> bool:
    return tensor.device == param.device and tensor.shape == param.shape and tensor.stride() == param.stride()


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it that lies in memory as `param` does, on its device."""
    if _is_alike(tensor, param) or tensor.shape != param.shape:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def take_split_masters() -> None:
    """Let `torch.tensor`, `as_tensor` and `asarray` find the value of a split master; idempotent."""
    _constructors.install(_redirect)


def _redirect(patches: Patches) -> None:
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, name, _that_asks(getattr(torch, name)))


@functools.cache  # cached for good: torch.jit keeps its id, which no other function may get
def _that_asks(own: Any) -> Any:
    builtins = importlib.import_module("torch.jit._builtins")
    function = asks_first(own, SplitMaster, opened)
    if (operator := builtins._find_builtin(own)) is not None:
        builtins._register_builtin(function, operator)
    return function
