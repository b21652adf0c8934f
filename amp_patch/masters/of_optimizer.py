"""Makes the FP32 masters of one optimizer, puts them into its groups (`attach`), and removes them again (`detach`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.masters import carried_writes, closed_master
from amp_patch.masters.closed_master import Form, form_of, is_closed, take_closed_masters
from amp_patch.masters.grad_field import drop_gradients, own_grad, set_own_grad, with_gradient
from amp_patch.masters.grad_route import GradRoute
from amp_patch.masters.gradients import FoundInf, Groups
from amp_patch.masters.held_gradients import Gradients, HalfGradients, SteppedGradients
from amp_patch.masters.master import Master
from amp_patch.masters.masters import Link, LinkList, connect, link_of, master_of, settle, stop_waiting
from amp_patch.masters.states import rekey
from amp_patch.multi_tensor.checks import Number
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.distributed import is_dtensor, local, place_in_whole
from amp_patch.support.patches import Attempts
from amp_patch.support.quantized import is_quantized


class GroupParams:
    """The parameters in one optimizer's groups, with their masters. A parameter without a master is paired with itself.

    Attributes:
        pairs: (param, master), in the order of the groups.
        params, masters: the two columns of `pairs`.
        distinct: `pairs`, each parameter once; distinct_params: its first column.
        low, linked_masters: the parameters of `distinct` with a separate master, and their masters.
        bare: the low-precision parameters of `distinct` that have no master.

    Args:
        parts: the ids of sharded parameters whose local shard has a master. They are not in `bare`.
    """

    def __init__(self, pairs: list[tuple[Tensor, Tensor]], parts: Container[int] = ()) -> None:
        self.pairs = pairs
        self.params = [param for param, _ in pairs]
        self.masters = [master for _, master in pairs]
        once = {id(param): (param, master) for param, master in pairs}
        self.distinct = pairs if len(once) == len(pairs) else list(once.values())
        self.distinct_params = [param for param, _ in self.distinct]
        self.low = [param for param, master in self.distinct if param is not master]
        self.linked_masters = [master for param, master in self.distinct if param is not master]
        own = [param for param, master in self.distinct if param is master and param.dtype in LOW_PRECISION]
        self.bare = [param for param in own if id(param) not in parts]


class Part(NamedTuple):
    """The local shard of a sharded low-precision parameter.

    Attributes:
        shard: the DTensor, which the groups hold.
        param: a plain parameter in the memory of the local shard.
        master: the master of `param`.
    """

    shard: Tensor
    param: Tensor
    master: Tensor


class Masters:
    """The parameters of one optimizer as pairs (param, master), and the transfers between the two.

    The optimizer's groups hold the masters, in the user's order. This object stores only the way back from a master to
    the model's parameter. Groups are arguments of the methods, so that no state here has to be synced with them.

    DTensors stay in the groups, because checkpoints look for them there; their local shards have the masters.

    Attributes:
        waiting: the table of deferred low-precision gradients; None if the optimizer defers none.
        by_master: id(master) -> the parameter and its link to this master.
        parts: DTensor's id -> its local shard, for sharded low-precision parameters.
        found_bare: called when the groups hold low-precision parameters without masters for the first time; not copied.
    """

    def __init__(self) -> None:
        self.waiting: HalfGradients | None = None
        self.found_bare: Callable[[], None] | None = None
        self._route = GradRoute()
        self._stepped_grads = SteppedGradients()
        self.parts: dict[int, Part] = {}
        self.by_master: dict[int, tuple[Tensor, Link]] = {}
        # In a copied optimizer: id(DTensor) -> the DTensor, and the draw of the master that `attach` will make for its
        # shard.
        self._draws: dict[int, tuple[Tensor, int | None]] = {}
        self._known: GroupParams | None = None

    def __getstate__(self) -> list[tuple[Tensor, Tensor, bool, int | None]]:
        of_parts = {id(part.master) for part in self.parts.values()}  # a copy makes them again, from its DTensors
        shards = [(part.shard, part.shard, False, getattr(part.master, "draw", None)) for part in self.parts.values()]
        return shards + [
            (param, link.master, link.version.written(), getattr(link.master, "draw", None))
            for param, link in self.links.without(of_parts)
        ]

    def __setstate__(self, pairs: Iterable[Sequence[Any]]) -> None:
        self.__init__()  # type: ignore[misc]
        for param, master, *more in pairs:
            written, draw = (*more, False, None)[:2]  # defaults for older pickles
            if param is master:
                self._draws[id(param)] = param, draw
                continue
            self._add(param, master)
            if written:  # an edit that was not copied back: without this the new link would miss it
                torch.autograd.graph.increment_version(master)
            if draw is not None:  # `keep` reads it from there
                vars(master)["draw"] = draw

    def _add(self, param: Tensor, master: Tensor) -> Link:
        link = connect(param, master)
        if not link.is_routed:
            link.route, link.is_routed = self._route, True
        if isinstance(master, Master) and master.stepped_grads is None:
            master.stepped_grads = self._stepped_grads
        self.by_master[id(master)] = (param, link)
        carried_writes.install()
        self._changed()
        return link

    def pairs(self, groups: Groups) -> Sequence[tuple[Tensor, Tensor]]:
        """Return (param, master) for every parameter in `groups`, as `of_groups`; one without a master is its own."""
        return self.of_groups(groups).pairs

    def of_groups(self, groups: Groups) -> GroupParams:
        """Return the parameters in `groups` with their masters: an identity test for each if none has changed."""
        masters = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        known = self._known
        if known is None or len(masters) != len(known.masters) or not all(map(is_, masters, known.masters)):
            known = self._known = GroupParams([(self.param_of(m), m) for m in masters], self.parts)
            if known.bare and self.found_bare is not None:
                self.found_bare()
        return known

    @cached_property
    def links(self) -> LinkList:
        """The values of `by_master`, in the order of the groups: made once after each change of the table."""
        return LinkList(self.by_master.values())

    @cached_property
    def routes(self) -> list[GradRoute]:
        """The `GradRoute`s of the parameters; several if some of the masters are shared with another optimizer."""
        return list({id(link.route): link.route for link in self.links.links}.values())

    @cached_property
    def stepped_grads(self) -> list[SteppedGradients]:
        """The tables of the last step's gradients; several if some of the masters are shared with another optimizer."""
        tables = (master.stepped_grads for master in self.links.masters if isinstance(master, Master))
        return list({id(table): table for table in tables if table is not None}.values())

    def spend(self, masters: list[Tensor]) -> None:
        """Move the gradients of stepped `masters` to `stepped_grads`, where reads of `grad` find them until cleared."""
        held = Gradients({}, (), {}) if self.waiting is None else self.waiting.hand_over(masters)
        for index in with_gradient(masters):
            if (grad := own_grad(masters[index])) is not None:
                held.fp32[id(masters[index])] = grad
        drop_gradients(masters)
        for table in self.stepped_grads:
            table.hold(held)

    def drop_stepped_grads(self) -> None:
        """Free the gradients of earlier steps."""
        for table in self.stepped_grads:
            table.clear()

    def _changed(self) -> None:
        for name in ("links", "routes", "stepped_grads"):
            vars(self).pop(name, None)
        self._known = None

    def keep(self, form: Form | None) -> None:
        """Convert the masters of bfloat16 parameters to this compressed form; None: all to FP32. In place; no sync."""
        for master in self.links.masters:
            if is_closed(master) and form_of(master) is not form:
                closed_master.make_whole(master)
        if form is not None:
            whole = LinkList((param, link) for param, link in self.links if not is_closed(link.master))
            closed_master.close(list(zip(whole.params, whole.masters, strict=True)), form)
            take_closed_masters()
            whole.versions.save()  # `close` has also rounded edits into the parameters that were not copied back

    def adopt(self) -> None:
        """Write edits of weights by user code into masters that user code has not written itself, in place; no sync.

        Call this before masters are copied: a copy of a master alone would lack the edits of the weight.
        """
        settle(LinkList((param, link) for param, link in self.links if not link.version.written()))

    def let_gradients_wait(self) -> None:
        """Create `waiting`, the table of deferred gradients: the optimizer's strategy takes deferred gradients."""
        if self.waiting is None:
            self.waiting = HalfGradients()
            for _, link in self.by_master.values():
                self._serve(link)

    def _serve(self, link: Link) -> None:
        """Register the master of `link`, so that its gradients are deferred in `waiting`.

        If another optimizer defers them already, or the master is not of the class `Master`, this optimizer
        defers no gradients from now on.
        """
        if self.waiting is None:
            return
        if not isinstance(link.master, Master) or link.master.waiting not in (None, self.waiting):
            self.waiting.make()
            self.waiting = None
            return
        link.master.waiting = self.waiting
        self.waiting.serve(link.master, link.gradients)

    def release(self) -> None:
        """Give up the deferral of gradients, and the tables of the masters, which a newer optimizer takes over."""
        if self.waiting is not None:
            for master in self.links.masters:
                if getattr(master, "waiting", None) is self.waiting:
                    stop_waiting(master)
            self.waiting = None
        self._changed()

    def take_half(self, groups: Groups, inverse: Number | None) -> FoundInf | None:
        """Defer the scaled gradients of parameters with masters, unchanged, and check them for overflow; no sync.

        Args:
            groups: the groups with the parameters.
            inverse: the inverse of the loss scale, FP32, shape []; 1.0 for gradients that are not scaled; None for
                gradients that are not checked either.

        Returns:
            As `gather`. None, with nothing changed, if the gradients of `groups` cannot be deferred.
        """
        waiting, params = self.waiting, self.of_groups(groups)
        if waiting is None or not params.low or not waiting.take(params.low, params.linked_masters):
            return None
        if inverse is None or not waiting.grads:
            return {}
        found_inf = waiting.check(inverse)
        return {found_inf.device: found_inf}

    def attach(
        self, optimizer: Any, group: dict[str, Any], about_to_be_cast: Collection[int] = (), *, form: Form | None = None
    ) -> None:
        """Put masters into one of the optimizer's groups, in place.

        A parameter with its id in `about_to_be_cast` gives its FP32 storage to its master; the caller then gives the
        parameter a low-precision one. If a parameter is float16 or bfloat16 already, its master is the one that another
        optimizer has made, else an FP32 copy. If it is frozen without a master or gradient, or quantized, it gets none.
        The optimizer's state and an existing gradient move to the master.

        With a `form`, each copy is compressed before the next is made, so that only one of them has FP32 memory at a
        time. A sharded parameter (DTensor) stays in the group then, and its local shard gets a master of that form.
        """
        params = group["params"]
        for index, param in enumerate(params):
            low = param.dtype in LOW_PRECISION
            if (id(param) not in about_to_be_cast and not low) or is_quantized(param):
                continue
            if form is not None and is_dtensor(param):
                if param.requires_grad and id(param) not in self.parts:
                    self._attach_part(param, form)
                continue
            master = master_of(param)  # another optimizer may have made it
            if master is None and low and not param.requires_grad and own_grad(param) is None:
                continue
            made = master is None
            if master is None:
                # `.data`, because a detached tensor would also share the parameter's version counter
                master = nn.Parameter(param.data.float(), requires_grad=param.requires_grad)
            link = self._add(param, master)
            self._serve(link)
            _replace(optimizer, params, index, master)
            if form is not None and made and low and id(param) not in about_to_be_cast:
                closed_master.close([(param, master)], form, exact=True)
                link.version.save()
            if (grad := own_grad(param)) is not None:
                master.grad = grad.to(master.dtype)
                set_own_grad(param, None)

    def _attach_part(self, shard: Tensor, form: Form) -> None:
        param = nn.Parameter(local(shard).detach())
        master = nn.Parameter(param.detach().float())
        link = self._add(param, master)
        self._serve(link)
        form.note_part(param, shard)
        vars(master)["draw"] = self._draws.pop(id(shard), (shard, None))[1]
        closed_master.close([(param, master)], form, exact=True)
        vars(master)["start"] = place_in_whole(shard)
        link.version.save()
        self.parts[id(shard)] = Part(shard, param, master)

    def master_of_part(self, shard: Tensor) -> Tensor | None:
        """Return the master of the local tensor of the DTensor `shard`; None if it has none.

        If the local tensor is in other memory than before, `Part.param` is first set to that memory.
        """
        part = self.parts.get(id(shard))
        if part is None:
            return None
        if not part.param.is_set_to(here := local(shard).detach()):
            part.param.data = here
        return part.master

    def exchange(self, optimizer: Any, *, shards: bool) -> None:
        """Replace DTensors in the groups by their local shards' masters; if `shards`, masters by DTensors; in place."""
        pairs = [(part.shard, part.master) for part in self.parts.values()]
        instead = {id(master): shard for shard, master in pairs} if shards else {id(s): master for s, master in pairs}
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if (other := instead.get(id(param))) is not None:
                    _replace(optimizer, group["params"], index, other)

    def detach(self, optimizer: Any) -> None:
        """Undo `attach`: put the parameters back into the groups, and move the state to them.

        A parameter that is FP32 again also gets its master's gradient.
        """
        attempt = Attempts()
        for route in self.routes:
            route.to_masters = route.scaled = False
        for group in optimizer.param_groups:
            attempt(self._detach_group, optimizer, group)
        for _, link in self.by_master.values():
            if getattr(link.master, "waiting", None) is self.waiting:  # another training may use the master
                attempt(stop_waiting, link.master)
        self.by_master.clear()
        self.parts.clear()
        self._changed()
        attempt.finish()

    def _detach_group(self, optimizer: Any, group: dict[str, Any]) -> None:
        params = group["params"]
        for index, master in enumerate(params):
            param = self.param_of(master)
            if param is not master:
                _replace(optimizer, params, index, param)
                if param.dtype is master.dtype:
                    set_own_grad(param, master.grad)
                elif link_of(param) is None and param.dtype in LOW_PRECISION and master.grad is not None:
                    set_own_grad(param, master.grad.to(param.device, param.dtype))  # its original type

    def follow(self, wrapper: Any) -> None:
        """Re-key the state of `wrapper`, which wraps this optimizer (SAM), from the parameters to their masters."""
        for param, link in self.by_master.values():
            rekey(wrapper, param, link.master)

    def unfollow(self, wrapper: Any) -> None:
        """Undo `follow`."""
        for param, link in self.by_master.values():
            rekey(wrapper, link.master, param)

    def param_of(self, master: Tensor) -> Tensor:
        """Return the parameter of `master`, a tensor in the groups; a parameter without a master is its own."""
        known = self.by_master.get(id(master))
        return master if known is None else known[0]


def _replace(optimizer: Any, params: list[Tensor], index: int, new: Tensor) -> None:
    old, params[index] = params[index], new
    rekey(optimizer, old, new)


def take_out_of_tables(link: Link) -> None:
    """Let the next optimizer that gets the master of `link` defer its gradients; no sync."""
    stop_waiting(link.master)
    link.is_routed = False
    if not getattr(link.master, "stepped_grads", None):  # else its last step's gradients can still be read
        vars(link.master).pop("stepped_grads", None)
