"""FP32 masters that are stored in compressed form: in the BF16 weight, and for split masters an int16 tensor.

A closed master has no FP32 memory. Its `Form` stores and restores the value: split_master.py stores the low half next
to the weight, stochastic_master.py the weight alone. If a torch function receives a closed master, the FP32 value is
materialized: the master is open. The next forward or step stores the writes into an open master, and frees its memory.
If another tensor (for example a detached one) references that memory, it stays allocated, and follows each step.

If an open master has no new writes, each read restores its value again, because a replay of a CUDA graph may have
changed the weight.
"""

from __future__ import annotations

import functools
import importlib
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
from amp_patch.masters.recycled_memory import holders, lone_holders
from amp_patch.support import device_sync, tree
from amp_patch.support.blocks import without_grad
from amp_patch.support.compiled import asks_first
from amp_patch.support.patches import Installation, Patches

Kept = tuple[Tensor, "ClosedMaster", Tensor]  # weight, master, value
_DATA: Any = Tensor.data
_raw = torch._C.DisableTorchFunctionSubclass  # in its `with` block torch reads a master's memory as it is
lock = RLock()  # held while masters are opened or closed, because another thread may read them
_constructors = Installation()
_ATTRIBUTES = ("form", "low_half", "draw", "edits", "weight", "joined", "captured", "has_memory")

# C++ code bypasses `__torch_function__`: make it raise instead of reading freed memory. Without the extension only
# functions that request a mutable data pointer raise.
_SUCH = "a master without memory of its own (master_weights='split' or 'stochastic')"
_NO_MEMORY = (
    f"{_SUCH} was handed to compiled code that does not ask for its value: torch.func, TorchScript, to_dlpack or an "
    "extension; give it master.detach()"
)
_C: Any = multi_tensor.extension()
_deny_memory: Any = getattr(_C, "deny_memory", lambda tensor, _: torch._C._set_throw_on_mutable_data_ptr(tensor))

used = False  # whether any master was ever closed in this process; if not, callers skip their checks


class Form:
    """A way to store FP32 masters in fewer bytes: split or stochastic. One object serves many masters."""

    is_exact = True  # whether a value written into a master is restored bit for bit
    seed = 0  # the seed of stochastic rounding

    def check_step(self) -> None:
        """Raise if the masters cannot be written now, for example in the capture of a CUDA graph."""

    def begin(self, param: Tensor, master: ClosedMaster, value: Tensor | None) -> None:
        """Store the start value of `master`: `value` (FP32, the strides of weight `param`); None: the weight itself."""
        raise NotImplementedError

    def read(self, masters: list[Kept]) -> None:
        """Restore the value of each (weight, master, value) into `value`, FP32 with the weight's strides; no sync."""
        raise NotImplementedError

    def write(self, masters: list[Kept]) -> None:
        """Store each (weight, master, value): split the value into weight and low half, or round it into the weight."""
        raise NotImplementedError


class ClosedMaster(Master):
    """A master that is stored in compressed form, and has FP32 memory only while it is open.

    `close` gives a master this class, and `make_whole` removes it. Copies and pickles are ordinary FP32 tensors.

    Attributes:
        form: how the value is stored; None in a copy, which is an ordinary tensor.
        low_half: the int16 low half of a split master, with the weight's strides; else None.
        draw: selects the random bits of the next stochastic rounding; else None.
        edits: the number of stores of user edits since the last step (stochastic rounding).
        weight: returns the parameter, or None if it was freed.
        joined: of an open master, its version counter when the stored value was last restored into the memory. If the
            counter has changed since, the master has writes that are not stored. None during a step.
        captured: of an open master, whether its value was materialized during the capture of a CUDA graph.
        has_memory: whether the FP32 memory is allocated and has the value.
    """

    form: Form | None = None
    low_half: Tensor | None = None
    draw: int | None = None
    edits = 0
    weight: Callable[[], Tensor | None] = staticmethod(lambda: None)
    joined: int | None = None
    captured = has_memory = False

    @property
    def is_open(self) -> bool:
        """Whether the FP32 memory is allocated and has the value."""
        return self.form is None or self.has_memory

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        memory = [] if func in _of_no_value() else opened(tree.tensors([*args, *kwargs.values()]))
        others = [kind for kind in types if not issubclass(kind, ClosedMaster)]
        try:
            if others:
                return others[0].__torch_function__(func, tuple(others), args, kwargs)
            with _raw():
                return func(*args, **kwargs)
        finally:
            memory.clear()  # a traceback may keep this frame, and with it the memory

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _ATTRIBUTES}


def form_of(master: Tensor) -> Form | None:
    """Return the form of a closed master; None for any other tensor, and for a copy."""
    return master.form if type(master) is ClosedMaster else None


def is_closed(master: Tensor) -> bool:
    """Return whether `master` is stored in compressed form, open or not."""
    return form_of(master) is not None


@functools.cache
def _of_no_value() -> frozenset[Any]:
    """Return the torch functions that access metadata (shape, grad, hooks), never values: they open no master."""
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
# Compressing masters, and undoing it


@without_grad
def close(pairs: Iterable[tuple[Tensor, Tensor]], form: Form, *, exact: bool = False) -> None:
    """Store the masters (param, master) of bfloat16 parameters in this `form`, in place, on the device; no sync.

    The form also writes the parameters, except if `exact`: then each master equals its parameter.
    """
    global used
    used = True
    for param, master in pairs:
        if is_closed(master) or param.dtype is not torch.bfloat16:
            continue
        with _raw():
            value = None if exact else _laid_out_as(param, master.detach())
            master.__class__ = ClosedMaster
            assert isinstance(master, ClosedMaster)
            form.begin(param, master, value)
            del value  # `value` may share the master's memory, which would then not be freed
        master.form = form
        master.weight = weakref.ref(param)
        with _raw():
            _note_open(master)
        _close(master)


@without_grad
def make_whole(master: Tensor) -> None:
    """Make `master` an ordinary FP32 master, in place."""
    if isinstance(master, ClosedMaster) and is_closed(master):
        _bring_up_to_date([master])
    for name in _ATTRIBUTES:
        vars(master).pop(name, None)
    master.__class__ = Master


def _note_open(master: ClosedMaster) -> None:
    """Register `master` as open, with the stored value in its memory. Call it in a `_raw` block."""
    master.joined, master.captured = master._version, device_sync.is_capturing()
    master.has_memory = True


# ----------------------------------------------------------------------------------------------------------------------
# Opening and closing masters


def materialize(masters: Iterable[Tensor]) -> None:
    """Materialize the values of `masters` in their memory for a step, in place, on the device; no sync.

    Until the step ends, the memory counts as the newest value, whether or not the version counter changes: torch's
    fused kernels do not increment it.

    Raises:
        RuntimeError: the parameter of a master was freed, and the value with it; or `check_step` of a form raises.
    """
    closed = [master for master in masters if isinstance(master, ClosedMaster)]
    for form in {master.form for master in closed if master.form is not None}:
        form.check_step()
    with lock:
        _bring_up_to_date(closed)
        for master in closed:
            master.joined = None


def follow(held: Iterable[ClosedMaster]) -> None:
    """Restore, after a step, the stored values of masters whose memory `release` could not free; in place, no sync."""
    if not device_sync.is_capturing():  # each replay would write into memory that is not the graph's
        _bring_up_to_date(held)


def _bring_up_to_date(masters: Iterable[ClosedMaster]) -> None:
    """Materialize the stored value of each master, unless it is open and has writes that are not stored yet."""
    behind = [master for master in masters if _stored_is_newest(master)]
    if behind:
        with lock:
            _outside_of_modes(_join, list(dict.fromkeys(filter(_stored_is_newest, behind))))


def _stored_is_newest(master: ClosedMaster) -> bool:
    """Tell whether the stored value is the newest: the master is closed, or was not written since it was opened."""
    if not master.is_open:
        return True
    if master.form is None or master.joined is None or master.weight() is None:
        return False
    with _raw():
        return master.joined == master._version


def _outside_of_modes(function: Callable[[Any], None], argument: Any) -> None:
    """Call `function` outside of torch.func transforms, dispatch modes and inference mode.

    Without this, a transform would wrap the tensors that `function` creates, and FakeTensorMode would make fake ones.
    Each of torch's context managers is entered only if needed, because Ctrl-C inside it may leave its state changed.
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
    """Open the closed masters among `tensors`; return their storages, which stay while the caller references them."""
    masters = [t for t in tensors if isinstance(t, ClosedMaster)]
    with lock:
        _bring_up_to_date(masters)
        with _raw():
            for master in masters:
                _note_stream(master)
            return [master.untyped_storage() for master in masters]


@without_grad
def _join(masters: list[ClosedMaster]) -> None:
    """Restore the stored values of `masters` into their memory, which is allocated first if there is none."""
    kept: list[Kept] = []
    others: list[tuple[Tensor, Tensor]] = []  # (value of a master, buffer) if the weight's strides have changed
    with _raw():
        for master in masters:
            param = master.weight()
            if param is None:
                raise RuntimeError(
                    f"{_SUCH} was read whose parameter is gone, and the value with it; keep the model as long as its "
                    "masters, or copies of them: [p.detach().clone() for p in amp.master_params(optimizer)]"
                )
            _give_memory(master, param)
            value = _DATA.__get__(master)  # `.data` has a separate version counter: this write is no edit
            if param.dtype is torch.bfloat16:
                joined = value if _is_alike(value, param) else torch.empty_like(param, dtype=torch.float32)
                kept.append((param, master, joined))
                if joined is not value:
                    others.append((value, joined))
            else:  # user code changed the dtype: the parameter itself has the whole value
                value.copy_(param)
        for form, group in _by_form(kept):
            form.read(group)
        for value, joined in others:
            value.copy_(joined)
        for master in masters:
            _note_open(master)


def _give_memory(master: Tensor, param: Tensor) -> None:
    """If `master` has no memory, allocate it, with the strides that the master's state has; call this in `_raw`.

    In the capture of a CUDA graph always allocate, from the graph's pool: other memory may be freed before a replay.
    """
    if master.device != param.device or master.shape != param.shape:
        _DATA.__set__(master, torch.empty_like(param, dtype=torch.float32, requires_grad=False))
    elif master.untyped_storage().nbytes() < 4 * master.numel() or device_sync.is_capturing():
        _DATA.__set__(master, torch.empty_like(master, requires_grad=False))


@without_grad
def store(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Store the values written into the open masters of `pairs` (param, master), and close them; no sync.

    Raises:
        RuntimeError: a master was written before the capture of a CUDA graph; each replay would store that write again.
    """
    opened = [(param, m) for param, m in pairs if isinstance(m, ClosedMaster) and m.has_memory]
    written = [(param, master) for param, master in opened if not _stored_is_newest(master)]
    if device_sync.is_capturing() and not all(master.captured for _, master in written):
        raise RuntimeError(
            f"{_SUCH} was written before the capture of a CUDA graph began, and each replay would bring that value "
            "back; call the model, or its state_dict(), between the write and the capture"
        )
    with _raw():
        _write_all(written)  # a separate call: its lists reference the memory, and must be gone before `_close`
    held = [master for _, master in opened if not _close(master)]
    follow(master for master in held if master.form is not None and not master.form.is_exact)


def _write_all(pairs: list[tuple[Tensor, ClosedMaster]]) -> None:
    for form, group in _by_form((param, master, _laid_out_as(param, master.detach())) for param, master in pairs):
        form.write(group)


def _by_form(values: Iterable[Kept]) -> Iterable[tuple[Form, list[Kept]]]:
    """Group `values` by form and device, for one kernel call each; low halves get the strides of their weights."""
    groups: dict[tuple[Form, torch.device], list[Kept]] = {}
    for param, master, value in values:
        form = master.form
        assert form is not None
        if master.low_half is not None:
            master.low_half = _laid_out_as(param, master.low_half)
        groups.setdefault((form, param.device), []).append((param, master, value))
    return [(form, group) for (form, _), group in groups.items()]


@without_grad
def drop_joined(masters: Iterable[Tensor]) -> None:
    """Close open masters without storing them, for example after a change of the weight: unstored writes are lost.

    Memory that another tensor references stays allocated, and is joined with the weight again: it gets the value that
    is stored in the weight (and low half).
    """
    follow(release(masters))


@without_grad
def release(masters: Iterable[Tensor]) -> list[ClosedMaster]:
    """Free the memory of open masters; return the masters whose memory another tensor references, for `follow`."""
    held = [m for m in masters if isinstance(m, ClosedMaster) and m.has_memory and not _close(m)]
    for master in held:
        master.has_memory = False
    return held


def _close(master: ClosedMaster) -> bool:
    """Free the memory of `master`, whose value is stored. If another tensor references it, keep it, return False."""
    with lock, _raw():
        if not master.is_open:  # another thread closed it; is_shared() of denied memory would abort the process
            return True
        storage = master.untyped_storage()
        if holders(storage) != lone_holders() or (master.device.type == "cpu" and storage.is_shared()):
            master.joined = master._version
            return False  # in shared memory: another process may reference it
        # Without this, a backward whose graph has saved this master would read freed memory.
        torch.autograd.graph.increment_version(master)
        master.has_memory = False
        _note_stream(master)
        if not storage.resizable():  # it was exported to a NumPy array
            _DATA.__set__(master, torch.empty_like(master, requires_grad=False))
        master.untyped_storage().resize_(0)
        if master.numel():
            _deny_memory(master, _NO_MEMORY)
        return True


def _note_stream(master: ClosedMaster) -> None:
    """Let the freed memory be reused only after the current stream's pending work on it; call this in `_raw`."""
    if master.is_cuda:  # else the allocating stream could reuse the memory at once
        master.record_stream(torch.cuda.current_stream(master.device))


def _is_alike(tensor: Tensor, param: Tensor) -> bool:
    return tensor.device == param.device and tensor.shape == param.shape and tensor.stride() == param.stride()


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor`, or if only its strides or device differ from those of `param`, a copy with those of `param`."""
    if _is_alike(tensor, param) or tensor.shape != param.shape:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def take_closed_masters() -> None:
    """Make `torch.tensor`, `as_tensor` and `asarray` open a closed master, and read its value; idempotent."""
    _constructors.install(_redirect)


def _redirect(patches: Patches) -> None:
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, name, _that_asks(getattr(torch, name)))


@functools.cache  # cached forever: torch.jit stores the function's id, which must not be reused
def _that_asks(own: Any) -> Any:
    builtins = importlib.import_module("torch.jit._builtins")
    function = asks_first(own, ClosedMaster, opened)
    function.__module__, function.__qualname__ = "torch", own.__name__  # where pickle looks for it
    if (operator := builtins._find_builtin(own)) is not None:
        builtins._register_builtin(function, operator)
    return function
