"""The peak of the bytes that autograd saves for the backward pass of one step.

torch's saved-tensor hooks see each tensor that is saved, and a weak reference notifies of the end of its memory. So the
figure does not depend on an allocator or its cache, on any device. The hooks return their argument: the step's numbers
are the same to the bit. Hooks of user code (of a checkpoint, which recomputes in backward) still run, and the objects
that they save instead of a tensor are counted.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from amp_patch.casts.upcast import AsItIs
from amp_patch.diagnose.recording.run import Event
from amp_patch.support import distributed, tree
from amp_patch.support.blocks import unlike_users
from amp_patch.support.compiled import eager_only
from amp_patch.support.patches import Patches

_torch: Any = torch._C._autograd
_checkpoint: Any = torch.utils.checkpoint


class SavedBytes:
    """A counter of the storages that autograd has saved, each once, for as long as it lives.

    Parameters and their views are not counted, nor are tensors that `leave_out` received.

    Attributes:
        peak: the most bytes alive at once. None before the first saved tensor (a replayed CUDA graph saves tensors
            without calling hooks), and after a tensor of unknown size was saved.
    """

    def __init__(self) -> None:
        self._peak: int | None = 0
        self._seen = False
        self._live = 0
        self._lock = threading.Lock()  # autograd runs a backward on its own threads, one a device
        self._ended: deque[int] = deque()  # keys of freed storages, which `_note` subtracts
        # id of a storage -> a weak reference, and its bytes (0 if it is left out). torch keeps the Python object of a
        # storage as long as its memory, so the id is not reused before the reference's callback.
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    @property
    def peak(self) -> int | None:
        """See above."""
        return self._peak if self._seen else None

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count the storages of these tensors, if they are saved."""
        for tensor in tensors:
            with suppress(Exception):
                self._note(tensor, counts=False)

    def count(self, tensor: Tensor) -> None:
        """Count the tensor's storages, which autograd has saved, unless it is a parameter or a view of one."""
        self._seen = True
        try:
            base = tensor._base if tensor._base is not None else tensor
            counts = not (base.is_leaf and base.requires_grad)
            self._note(tensor, counts=counts)
        except Exception:  # a tensor subclass may raise anything, which would end the training
            self._peak = None

    def _note(self, tensor: Tensor, *, counts: bool) -> None:
        storages = [part.untyped_storage() for part in _parts(tensor)]
        with self._lock:
            while self._ended:
                self._live -= self._known.pop(self._ended.popleft())[1]
            for storage in storages:
                key = id(storage)
                if key in self._known:
                    continue
                size = storage.nbytes() if counts else 0
                self._known[key] = weakref.ref(storage, partial(self._ends, key)), size
                self._live += size
            if self._peak is not None:
                self._peak = max(self._peak, self._live)

    def _ends(self, key: int, _: Any) -> None:
        self._ended.append(key)  # no lock: a storage may be freed inside of `_note` too, which holds the lock


class WeighedStep:
    """A count of the bytes that autograd saves in one step.

    Construct it between two steps of a user's loop, and call `leave` after the next step.

    Args:
        at_rest: tensors that live between steps and may be saved: parameters and buffers.
        step: the number of steps before this one.
    """

    def __init__(self, at_rest: Iterable[Tensor], step: int) -> None:
        self._step = step
        self._bytes = SavedBytes()
        self._bytes.leave_out(at_rest)
        self._hooks = (self._pack, AsItIs.unpack)
        self._patches = Patches()
        self._whole = False  # whether the hooks have seen every tensor that was saved since construction
        # Not under hooks of user code around the loop: torch calls the innermost hooks only, so our hooks would replace
        # the user's, and the end of the user's block would pop ours. torch before 2.8 cannot tell whether hooks exist.
        known = hasattr(_torch, "_top_saved_tensors_default_hooks")
        if known and _torch._saved_tensors_hooks_is_enabled() and _top() is None:
            self._push = _torch._push_saved_tensors_default_hooks
            self._push(*self._hooks)
            self._whole = True
            self._patches.set(_torch, "_push_saved_tensors_default_hooks", self._push_others)
            disable = _torch._saved_tensors_hooks_disable
            self._patches.set(_torch, "_saved_tensors_hooks_disable", self._before(disable))
            self._patches.set(_checkpoint, "_VersionWrapper", self._see_and_wrap(_checkpoint._VersionWrapper))

    def leave_out_inputs(self, args: Any, kwargs: Any) -> None:
        """Do not count inputs of a forward that no autograd function made, such as the batch: all levels hold them."""
        with suppress(RuntimeError):  # a container that holds itself
            self._bytes.leave_out(tensor for tensor in tree.tensors((args, kwargs)) if tensor.grad_fn is None)

    @eager_only
    def leave(self) -> Event:
        """End the count, and return the "memory" event."""
        whole = self._whole
        self.abandon()
        return {"event": "memory", "step": self._step, "activations": self._bytes.peak if whole else None}

    def abandon(self) -> None:
        """End the count. Saved-tensor hooks that other code has pushed since the construction stay."""
        if not self._whole:
            return
        self._whole = False
        self._patches.remove()
        above = []
        while (top := _top()) is not None and top[0] is not self._hooks[0]:
            above.append(top)
            _torch._pop_saved_tensors_default_hooks()
        if top is not None:  # None: the script has popped them, or this is another thread
            _torch._pop_saved_tensors_default_hooks()
        for pair in reversed(above):
            self._push(*pair)

    @unlike_users
    def _pack(self, tensor: Tensor) -> AsItIs:
        self._see(tensor)
        return AsItIs.of(tensor)

    vars()["_pack"]._amp_counts = True  # the mark lets casts/upcast.py push its hooks above these

    def _push_others(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        if isinstance(pack, torch.fx.GraphModule):  # torch.compile inlines it, and would not take a wrapper
            self._push(pack, unpack)
            return

        def pack_and_see(tensor: Tensor) -> Any:
            try:
                packed = pack(tensor)
            except BaseException:  # a checkpoint ends its recomputation by an exception, and keeps the last tensor
                self._see(tensor)
                raise
            with suppress(RuntimeError):  # a container that holds itself
                for kept in tree.tensors(packed):
                    self._see(kept)
            return packed

        self._push(_MarkedAs(pack, pack_and_see), unpack)

    def _see_and_wrap(self, wrap: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts its argument, and then calls `wrap`.

        `wrap` is torch's, for outputs that a selective checkpoint keeps: no saved-tensor hook receives these.
        """

        def see_and_wrap(value: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(value, Tensor):
                self._see(value)
            return wrap(value, *args, **kwargs)

        return see_and_wrap

    def _before(self, disable: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that ends the count, and then calls `disable`, by which torch.func disables hooks.

        Without this, torch.func would refuse to run under this count's saved-tensor hooks.
        """

        def leave_and_disable(*args: Any, **kwargs: Any) -> Any:
            self.abandon()
            return disable(*args, **kwargs)

        return leave_and_disable

    def _see(self, tensor: Tensor) -> None:
        if self._whole:  # the graph, and these hooks in it, may outlive the step
            self._bytes.count(tensor)


class _MarkedAs:
    """A pack hook that calls `call`, and has the attributes of `pack`, the hook that it replaces.

    Torch 2.15 recognises the hook of a checkpoint by such attributes.
    """

    def __init__(self, pack: Any, call: Callable[[Tensor], Any]) -> None:
        self._pack, self._call = pack, call

    def __call__(self, tensor: Tensor) -> Any:
        return self._call(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pack, name)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that store `tensor`: the values and indices of a sparse one, else `tensor` alone."""
    local = distributed.local(tensor)
    return (local._values(), local._indices()) if local.is_sparse else (local,)


def _top() -> Any:
    """Return the innermost saved-tensor hooks of this thread, as (pack, unpack); None if there are none."""
    return _torch._top_saved_tensors_default_hooks(True)
