"""FP32 masters without memory of their own: the BF16 weight, and perhaps something beside it, has the value.

A `Form` says what is kept, and makes the value of it: split_master.py has the weight's low half beside it,
stochastic_master.py nothing. Whoever hands such a master to a function of torch finds an FP32 tensor, joined at that
moment of what is kept: the master is open then. What was written into it is stored before the next forward or step,
which also gives its memory back. Somebody may hold that memory by another tensor, a detached one say: then it stays,
and is joined anew after each step.

An open master that nobody has written is joined anew by each read: the replays of a CUDA graph change weights, too.
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

_DATA: Any = Tensor.data
_raw = torch._C.DisableTorchFunctionSubclass  # in its `with` block torch reads a master's own memory, joined or not
lock = RLock()  # held wherever masters are opened and closed: another thread may read them
_constructors = Installation()
_ATTRIBUTES = ("form", "low_half", "draw", "start", "edits", "weight", "joined", "captured")

# C++ code bypasses `__torch_function__`: make it raise instead of reading freed memory. Without the extension torch can
# make only those functions raise that want a pointer to write to.
_SUCH = "a master without memory of its own (master_weights='split' or 'stochastic')"
_NO_MEMORY = (
    f"{_SUCH} was handed to compiled code that does not ask for its value: torch.func, TorchScript, to_dlpack or an "
    "extension; give it master.detach()"
)
_C: Any = multi_tensor.extension()
_deny_memory: Any = getattr(_C, "deny_memory", lambda tensor, _: torch._C._set_throw_on_mutable_data_ptr(tensor))

# id(master) -> the masters whose memory has the joined value.
_open: dict[int, weakref.ref[ClosedMaster]] = {}
used = False  # whether any master was ever closed in this process; if not, no master needs a look


class Form:
    """How the values of masters are kept that have no memory of their own; one object serves many masters."""

    is_exact = True  # whether what is written into a master is read from it again to the bit
    seed = 0  # of the draws by which kernels round weights

    def check_step(self) -> None:
        """Raise where no step can be made now."""

    def note_part(self, part: Tensor, whole: Tensor) -> None:
        """Take note that the parameter `part` is what is here of `whole`."""

    def begin(self, param: Tensor, master: ClosedMaster, value: Tensor | None) -> None:
        """Keep `value`, FP32 and laid out as the weight `param`, as that of `master`; None: the weight has it."""
        raise NotImplementedError

    def read(self, masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> None:
        """Write the values into FP32 tensors laid out as the weights: of each (weight, master, value); no sync."""
        raise NotImplementedError

    def write(self, masters: list[tuple[Tensor, ClosedMaster, Tensor]]) -> None:
        """Keep these values: of each (weight, master, value); weights are written too; no sync."""
        raise NotImplementedError


class ClosedMaster(Master):
    """A master without memory of its own.

    `close` gives a master this class, `make_whole` takes it away. A copy is whole, and so is what is pickled.

    Attributes:
        form: how the value is kept; None: this one is whole, as copies are.
        low_half: what is kept beside the weight, laid out as that, where there is anything.
        draw, start: by which the next step rounds the weight; of a part, the place of its first element in the whole.
        edits: how often the weight was rounded since the last step, for what else was written into the master.
        weight: gives the parameter, or None where that is gone.
        joined: while it is open, its version when its memory had what is kept; None where a step may write.
        captured: while it is open, whether the joining is a part of a CUDA graph, with the memory.
    """

    form: Form | None = None
    low_half: Tensor | None = None
    draw: int | None = None
    start = edits = 0
    weight: Callable[[], Tensor | None] = staticmethod(lambda: None)
    joined: int | None = None
    captured = False

    @property
    def is_open(self) -> bool:
        """Whether the memory has the value."""
        return self.form is None or id(self) in _open

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
            memory.clear()  # a traceback may keep this frame

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in _ATTRIBUTES}


def weight_is(master: Tensor, param: Tensor | None) -> None:
    """Let a closed `master` hold `param` weakly, as its weight; None: hold nothing."""
    if is_closed(master):
        assert isinstance(master, ClosedMaster)
        master.weight = (lambda: None) if param is None else weakref.ref(param)


def form_of(master: Tensor) -> Form | None:
    """How a closed master is kept; None of any other, and of a copy."""
    return master.form if type(master) is ClosedMaster else None


def is_closed(master: Tensor) -> bool:
    """Whether `master` has no memory of its own."""
    return form_of(master) is not None


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
# Masters are closed for good, and whole again


@without_grad
def close(pairs: Iterable[tuple[Tensor, Tensor]], form: Form, *, exact: bool = False) -> None:
    """Keep the masters (param, master) of bfloat16 parameters in this `form`, in place, on the device; no sync.

    The parameters are rounded anew, as the form has it. Not where the masters have `exact`ly their values.
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
            del value  # it may be the master's memory, which somebody would seem to hold
        master.form = form
        weight_is(master, param)
        with _raw():
            _note_open(master)
        _close(master)


@without_grad
def make_whole(master: Tensor) -> None:
    """Make `master` an ordinary one, in place."""
    if isinstance(master, ClosedMaster) and is_closed(master):
        _bring_up_to_date([master])
        _open.pop(id(master), None)
    for name in _ATTRIBUTES:
        vars(master).pop(name, None)
    master.__class__ = Master


def _note_open(master: ClosedMaster) -> None:
    """Note that the memory of `master` has what is kept; `_raw`."""
    master.joined, master.captured = master._version, device_sync.is_capturing()
    _open[id(master)] = weakref.ref(master, functools.partial(_forget, id(master)))


def _forget(key: int, reference: Any) -> None:
    if _open.get(key) is reference:
        del _open[key]


# ----------------------------------------------------------------------------------------------------------------------
# Masters are opened and closed


def materialize(masters: Iterable[Tensor]) -> None:
    """Have the values of `masters` in their memory for a step, in place, on the device; no sync.

    From now on the memory counts, whatever their versions say: torch's fused kernels leave these as they are.

    Raises:
        RuntimeError: the parameter of one is gone, and the value with it; what `check_step` of a form has.
    """
    closed = [master for master in masters if isinstance(master, ClosedMaster)]
    for form in {master.form for master in closed if master.form is not None}:
        form.check_step()
    with lock:
        _bring_up_to_date(closed)
        for master in closed:
            master.joined = None


def follow(held: Iterable[ClosedMaster]) -> None:
    """Join the masters that `release` returned anew, for those who hold their memory, in place; no sync."""
    if not device_sync.is_capturing():  # each replay would write into that memory, which is not the graph's
        _bring_up_to_date(held)


def _bring_up_to_date(masters: Iterable[ClosedMaster]) -> None:
    """Join those that are closed, and those that are open and that nobody has written."""
    behind = [master for master in masters if _kept_counts(master)]
    if behind:
        with lock:
            once = {id(master): master for master in behind if _kept_counts(master)}
            _outside_of_modes(_join, list(once.values()))


def _kept_counts(master: ClosedMaster) -> bool:
    """Whether what is kept is the value of `master`: it is closed, or open and not written since it was joined."""
    if not master.is_open:
        return True
    if master.form is None or master.joined is None or master.weight() is None:
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
    """Open the closed masters among `tensors`; their memory, which no other thread's step takes while this is held."""
    masters = [t for t in tensors if isinstance(t, ClosedMaster)]
    with lock:
        _bring_up_to_date(masters)
        with _raw():
            for master in masters:
                _note_stream(master)
            return [master.untyped_storage() for master in masters]


@without_grad
def _join(masters: list[ClosedMaster]) -> None:
    kept = _ByForm()
    others: list[tuple[Tensor, Tensor]] = []  # masters whose weight lies otherwise in memory by now, and their values
    with _raw():
        for master in masters:
            param = master.weight()
            if param is None:
                raise RuntimeError(
                    f"{_SUCH} was read whose parameter is gone, and the value with it; keep the model as long as its "
                    "masters, or copies of them: [p.detach().clone() for p in amp.master_params(optimizer)]"
                )
            _give_memory(master, param)
            value = _DATA.__get__(master)  # a tensor with a version counter of its own: this is no edit
            if param.dtype is torch.bfloat16:
                joined = value if _is_alike(value, param) else torch.empty_like(param, dtype=torch.float32)
                kept.add(param, master, joined)
                if joined is not value:
                    others.append((value, joined))
            else:  # a script gave the parameter another type: it holds the whole value
                value.copy_(param)
        for form, group in kept.groups:
            form.read(group)
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
def store(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Keep what was written into the masters (param, master), in place, on the device; close the open ones.

    Raises:
        RuntimeError: a CUDA graph is being captured, and one was written before: each replay would store that again.
    """
    opened = [(param, m) for param, m in pairs if isinstance(m, ClosedMaster) and id(m) in _open]
    written = [(param, master) for param, master in opened if not _kept_counts(master)]
    if device_sync.is_capturing() and not all(master.captured for _, master in written):
        raise RuntimeError(
            f"{_SUCH} was written before the capture of a CUDA graph began, and each replay would bring that value "
            "back; call the model, or its state_dict(), between the write and the capture"
        )
    with _raw():
        _write_all(written)  # a call of its own: its lists hold the memory too
    held = [master for _, master in opened if not _close(master)]
    follow(master for master in held if master.form is not None and not master.form.is_exact)


def _write_all(pairs: list[tuple[Tensor, ClosedMaster]]) -> None:
    kept = _ByForm()
    for param, master in pairs:
        kept.add(param, master, _laid_out_as(param, master.detach()))
    for form, group in kept.groups:
        form.write(group)


class _ByForm:
    """(weight, master, value) for each of some masters, by their form and device: one call of a kernel each."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, torch.device], tuple[Form, list[tuple[Tensor, ClosedMaster, Tensor]]]] = {}

    def add(self, param: Tensor, master: ClosedMaster, value: Tensor) -> None:
        form = master.form
        assert form is not None
        if master.low_half is not None:
            master.low_half = _laid_out_as(param, master.low_half)
        self._of.setdefault((id(form), param.device), (form, []))[1].append((param, master, value))

    @property
    def groups(self) -> Iterable[tuple[Form, list[tuple[Tensor, ClosedMaster, Tensor]]]]:
        return self._of.values()


@without_grad
def drop_joined(masters: Iterable[Tensor]) -> None:
    """Give back the memory of those `masters` that are open; what was written there and not stored is lost.

    One whose memory somebody else holds is joined anew: after what is kept has changed, or to see what was written into
    the weight.
    """
    follow(release(masters))


@without_grad
def release(masters: Iterable[Tensor]) -> list[ClosedMaster]:
    """`drop_joined`, save that masters whose memory somebody else holds are returned, to be joined anew by `follow`."""
    held = [m for m in masters if id(m) in _open and isinstance(m, ClosedMaster) and not _close(m)] if _open else []
    for master in held:
        _open.pop(id(master), None)
    return held


def _close(master: ClosedMaster) -> bool:
    """Give back the memory of `master`, which has what is kept; not where somebody else holds it."""
    with lock, _raw():
        if not master.is_open:  # another thread has closed it: torch ends the process at is_shared() of denied memory
            return True
        storage = master.untyped_storage()
        if holders(storage) != lone_holders() or (master.device.type == "cpu" and storage.is_shared()):
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


def _note_stream(master: ClosedMaster) -> None:
    """Let the memory wait, once it is given back, for what the current stream has yet to do with it; `_raw`."""
    if master.is_cuda:  # the stream that it was taken on may give it to another tensor at once
        master.record_stream(torch.cuda.current_stream(master.device))


def _is_alike(tensor: Tensor, param: Tensor) -> bool:
    return tensor.device == param.device and tensor.shape == param.shape and tensor.stride() == param.stride()


def _laid_out_as(param: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it that lies in memory as `param` does, on its device."""
    if _is_alike(tensor, param) or tensor.shape != param.shape:
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def take_closed_masters() -> None:
    """Let `torch.tensor`, `as_tensor` and `asarray` find the value of a closed master; idempotent."""
    _constructors.install(_redirect)


def _redirect(patches: Patches) -> None:
    for name in ("tensor", "as_tensor", "asarray"):
        patches.set(torch, name, _that_asks(getattr(torch, name)))


@functools.cache  # cached for good: torch.jit keeps its id, which no other function may get
def _that_asks(own: Any) -> Any:
    builtins = importlib.import_module("torch.jit._builtins")
    function = asks_first(own, ClosedMaster, opened)
    if (operator := builtins._find_builtin(own)) is not None:
        builtins._register_builtin(function, operator)
    return function
