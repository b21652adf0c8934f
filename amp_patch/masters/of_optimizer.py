"""Makes the FP32 masters of one optimizer, puts them into its groups (`attach`), and removes them again (`detach`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters import carried_writes, closed_master, on_host
from amp_patch.masters.closed_master import Form, form_of, is_closed, take_closed_masters
from amp_patch.masters.grad_field import drop_gradients, own_grad, set_own_grad, with_gradient
from amp_patch.masters.gradients import FoundInf, Groups, take
from amp_patch.masters.held_gradients import DirectGradients, HalfGradients
from amp_patch.masters.master import Master
from amp_patch.masters.masters import LinkList, connect, disconnect, link_of, links_of, master_of, settle
from amp_patch.masters.record import Record, Route
from amp_patch.masters.states import rekey
from amp_patch.multi_tensor.checks import Number
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.distributed import is_dtensor
from amp_patch.support.patches import Attempts
from amp_patch.support.quantized import is_quantized


class GroupParams:
    """The parameters in one optimizer's groups, with their records. A parameter without a master is its own master.

    Attributes:
        params, records, masters: lists of one length, in the order of the groups.
        pairs: (param, master) of each.
        distinct: `pairs`, each parameter once; distinct_params: its first column.
        low, linked, linked_masters: the parameters of `distinct` with a separate master, their records and masters.
        own: the pairs of `distinct` without a separate master; bare: their low-precision parameters.
        is_sharded: whether any parameter is a DTensor.
    """

    def __init__(self, params: list[Tensor], records: list[Record]) -> None:
        self.params, self.records = params, records
        self.masters = [record.master for record in records]
        self.pairs = list(zip(params, self.masters, strict=True))
        once = dict(zip(params, records, strict=True))
        self.distinct = self.pairs if len(once) == len(params) else [(p, r.master) for p, r in once.items()]
        self.distinct_params = params if len(once) == len(params) else list(once)
        self.own = [pair for pair in self.distinct if pair[0] is pair[1]]
        self.linked = [record for param, record in once.items() if param is not record.master]
        self.low = [param for param, master in self.distinct if param is not master]
        self.linked_masters = [record.master for record in self.linked]
        self.bare = [param for param, _ in self.own if param.dtype in LOW_PRECISION]
        self.is_sharded = any(map(is_dtensor, params))

    def without(self, params: Container[Tensor]) -> GroupParams:
        """Return the same without `params`."""
        kept = [(p, record) for p, record in zip(self.params, self.records, strict=True) if p not in params]
        return GroupParams([param for param, _ in kept], [record for _, record in kept])


class Masters:
    """The records of one optimizer's parameters, and the transfers between parameters and masters.

    The optimizer's groups hold the masters, in the user's order. This object stores only the way back from a master to
    the model's parameter.

    Attributes:
        waiting: the deferred low-precision gradients; None if the optimizer defers none.
        direct: the gradients that a running body's backward leaves on the masters themselves.
        aside: the records whose gradient a body has set aside (`Record.aside`).
        strays: the records of parameters with masters that got gradients from the backward of another optimizer's loss.
        cleared: the number of calls of the optimizer's `zero_grad`.
        frees: whether gradients of masters on the host leave the device in backward (`gradient_release=True`).
        found_bare: called when the groups hold low-precision parameters without masters for the first time; not copied.
    """

    def __init__(self) -> None:
        self.waiting: HalfGradients | None = None
        self.direct: DirectGradients | None = None
        self.found_bare: Callable[[], None] | None = None
        self.aside: list[Record] = []
        self.strays: list[Record] = []
        self.cleared = 0
        self.frees = False
        self._route = Route()
        self._params: dict[Record, Tensor] = {}  # the parameters that have separate masters
        self._known = GroupParams([], [])
        self._is_stale = True

    def __getstate__(self) -> list[tuple[Tensor, Tensor, bool, int | None]]:
        return [
            (param, record.master, record.version.written(), getattr(record.master, "draw", None))
            for param, record in self.links
        ]

    def __setstate__(self, pairs: Iterable[tuple[Tensor, Tensor, bool, int | None]]) -> None:
        self.__init__()  # type: ignore[misc]
        for param, master, written, draw in pairs:
            self._add(param, master)
            if written:  # an edit that was not copied back: without this the new record would miss it
                torch.autograd.graph.increment_version(master)
            if draw is not None:  # `keep` reads it from there
                vars(master)["draw"] = draw

    def _add(self, param: Tensor, master: Tensor) -> Record:
        record = connect(param, master)
        if not record.is_routed:
            record.route, record.is_routed = self._route, True
        self._params[record] = param
        carried_writes.install()
        self._changed()
        return record

    def pairs(self, groups: Groups) -> Sequence[tuple[Tensor, Tensor]]:
        """Return (param, master) for every parameter in `groups`, as `of_groups`; one without a master is its own."""
        return self.of_groups(groups).pairs

    def of_groups(self, groups: Groups) -> GroupParams:
        """Return the parameters in `groups` with their records: an identity test for each if none has changed."""
        held = self.of_some(groups)
        if held is not self._known:
            self._known, self._is_stale = held, False
            if held.bare and self.found_bare is not None:
                self.found_bare()
        return held

    def of_some(self, groups: Groups) -> GroupParams:
        """Return as `of_groups`, also for groups that hold some of the optimizer's parameters, or others."""
        masters = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        known = self._known
        if not self._is_stale and len(masters) == len(known.masters) and all(map(is_, masters, known.masters)):
            return known
        found = {record.master: record for record in known.records} | self._index
        records = [found.get(master) or Record(master) for master in masters]
        return GroupParams([self._params.get(record, record.master) for record in records], records)

    def known(self, groups: Groups) -> GroupParams:
        """Return the result of the last `of_groups`, unless masters were added or removed since."""
        return self.of_groups(groups) if self._is_stale else self._known

    @property
    def known_masters(self) -> list[Tensor]:
        return self._known.masters

    @cached_property
    def links(self) -> LinkList:
        """The parameters that have masters, in the order of the groups."""
        return LinkList((param, record) for record, param in self._params.items())

    @cached_property
    def _index(self) -> dict[Tensor, Record]:
        return {record.master: record for record in self._params}

    @cached_property
    def routes(self) -> list[Route]:
        """The `Route`s of the parameters; several if some of the masters are shared with another optimizer."""
        return list(dict.fromkeys(record.route for record in self._params))

    def spend(self, records: list[Record]) -> None:
        """Make the gradients of stepped masters the ones of the last step, which reads of `grad` find until cleared."""
        masters = self.links.masters if records is self.links.records else [record.master for record in records]
        for index in with_gradient(masters):
            records[index].last = own_grad(masters[index])
        if self.waiting:
            self.waiting.spent = self.waiting.factors
            for record in records:
                if record.half is not None:
                    record.last = record.half
            self.waiting.clear(records)
        drop_gradients(masters)

    def drop_last(self) -> None:
        """Free the gradients of earlier steps, and those that a body has set aside for its time."""
        for record in self.links.records:
            record.earlier = record.last = None
            if on_host.used and record.host is not None:
                record.host.forget()  # what an exception has left behind

    def end_direct(self) -> None:
        """Unscale the gradients that a body's backward has left on the masters themselves; no sync."""
        direct, self.direct = self.direct, None
        if direct is not None:
            direct.finish()

    def set_aside(self, params: GroupParams) -> None:
        """Set the gradients of the `params` without a master aside, for the time of a body."""
        for param, record in zip(params.params, params.records, strict=True):
            if param is record.master and (aside := take(param)) is not None:
                record.aside = aside
                self.aside.append(record)

    def forget_aside(self, is_forgotten: Callable[[Tensor], bool]) -> None:
        """Drop the gradients set aside of the parameters that `is_forgotten` selects."""
        for record in self.aside:
            if record.aside is not None and is_forgotten(record.aside.param):
                record.aside = None
        self.aside = [record for record in self.aside if record.aside is not None]

    def forget_entries(self) -> None:
        """Forget which parameters have state, because the optimizer's state was replaced."""
        for record in self._known.records:
            record.entries = None

    def changed(self) -> None:
        """Look at the groups again before their parameters are used."""
        self._is_stale = True

    def _changed(self) -> None:
        for name in ("links", "routes", "_index"):
            vars(self).pop(name, None)
        self._is_stale = True

    def keep(self, form: Form | None) -> None:
        """Convert the masters of bfloat16 parameters to this compressed form; None: all to FP32. In place; no sync."""
        for master in self.links.masters:
            if is_closed(master) and form_of(master) is not form:
                closed_master.make_whole(master)
        if form is not None:
            whole = self.links.without({record for record in self.links.records if is_closed(record.master)})
            closed_master.close(list(zip(whole.params, whole.masters, strict=True)), form)
            take_closed_masters()
            whole.versions.save()  # `close` has also rounded edits into the parameters that were not copied back

    def adopt(self) -> None:
        """Write edits of weights by user code into masters that user code has not written itself, in place; no sync.

        Call this before masters are copied: a copy of a master alone would lack the edits of the weight.
        """
        settle(self.links.without({record for record in self.links.records if record.version.written()}))

    def let_gradients_wait(self) -> None:
        """Create `waiting`, the table of deferred gradients: the optimizer's strategy takes deferred gradients."""
        if self.waiting is None:
            self.waiting = HalfGradients()
            for record in self._params:
                self._serve(record)

    def _serve(self, record: Record) -> None:
        """Defer the gradients of the master of `record` in `waiting`.

        If another optimizer defers them already, or the master is not of the class `Master`, this optimizer
        defers no gradients from now on.
        """
        if self.waiting is None:
            return
        if not isinstance(record.master, Master) or record.waiting not in (None, self.waiting):
            self.waiting.make()
            self.waiting = None
            return
        record.waiting = self.waiting

    def release(self, records: Collection[Record]) -> None:
        """Give up the deferral of gradients if a newer optimizer takes over masters of `records`."""
        if self._params.keys().isdisjoint(records):
            return
        if self.waiting is not None:
            attempt = Attempts()
            self._stop_waiting(attempt)
            self.waiting = None
            attempt.finish()
        self._changed()

    def _stop_waiting(self, attempt: Attempts) -> None:
        for record in self._params:
            if record.waiting is self.waiting:  # another training may use the master
                attempt(record.stop_waiting)

    def take_half(self, params: GroupParams, inverse: Number | None) -> FoundInf | None:
        """Defer the scaled gradients of parameters with masters, unchanged, and check them for overflow; no sync.

        Args:
            params: the parameters of the optimizer.
            inverse: the inverse of the loss scale, FP32, shape []; 1.0 for gradients that are not scaled; None for
                gradients that are not checked either.

        Returns:
            As `gather`. None, with nothing changed, if the gradients cannot be deferred.
        """
        waiting = self.waiting
        if waiting is not None and self.links.on_host:
            return waiting.take_to_host(params.low, params.linked, inverse)
        if waiting is None or not params.low or not waiting.take(params.low, params.linked, params.linked_masters):
            return None
        if inverse is None or not waiting:
            return {}
        found_inf = waiting.check(inverse)
        return {found_inf.device: found_inf}

    def attach(
        self,
        optimizer: Any,
        group: dict[str, Any],
        about_to_be_cast: Collection[Tensor] = (),
        *,
        form: Form | None = None,
        device: str | None = None,
    ) -> None:
        """Put masters into one of the optimizer's groups, in place, on `device` (None: on that of the parameter).

        A parameter of `about_to_be_cast` gives its FP32 storage to its master; the caller then gives the
        parameter a low-precision one. If a parameter is float16 or bfloat16 already, its master is the one that another
        optimizer has made, else an FP32 copy. If it is frozen without a master or gradient, or quantized, it gets none.
        The optimizer's state and an existing gradient move to the master.

        With a `form`, each copy is compressed before the next is made, so that only one of them has FP32 memory at a
        time.
        """
        params = group["params"]
        for index, param in enumerate(params):
            low = param.dtype in LOW_PRECISION
            if (not low and param not in about_to_be_cast) or is_quantized(param):
                continue
            master = master_of(param)  # another optimizer may have made it
            place = param.device if device is None else torch.device(device)
            if master is not None and master.device != place and on_host.used:  # an earlier training's
                settle(links_of([param]))
                disconnect(param)
                master = nn.Parameter(master.detach().to(place), requires_grad=master.requires_grad)
            if master is None and low and not param.requires_grad and own_grad(param) is None:
                continue
            made = master is None
            if master is None:
                # `.data`, because a detached tensor would also share the parameter's version counter
                master = nn.Parameter(param.data.to(place).float(), requires_grad=param.requires_grad)
            record = self._add(param, master)
            self._serve(record)
            _replace(optimizer, params, index, master)
            if form is not None and made and low and param not in about_to_be_cast:
                closed_master.close([(param, master)], form, exact=True)
                record.version.save()
            if (grad := own_grad(param)) is not None:
                master.grad = grad.to(master.device).to(master.dtype)
                set_own_grad(param, None)

    def detach(self, optimizer: Any) -> None:
        """Undo `attach`: put the parameters back into the groups, and move the state to them.

        A parameter that is FP32 again also gets its master's gradient.
        """
        attempt = Attempts()
        for route in self.routes:
            route.to_masters = route.scaled = False
        params = dict(zip(self.links.masters, self.links.params, strict=True))
        for group in optimizer.param_groups:
            attempt(self._detach_group, optimizer, group, params)
        self._stop_waiting(attempt)
        self._params.clear()
        self._changed()
        attempt.finish()

    def _detach_group(self, optimizer: Any, group: dict[str, Any], params: dict[Tensor, Tensor]) -> None:
        for index, master in enumerate(group["params"]):
            if (param := params.get(master)) is not None:
                _replace(optimizer, group["params"], index, param)
                if param.dtype is master.dtype:
                    set_own_grad(param, None if master.grad is None else master.grad.to(param.device))
                elif link_of(param) is None and param.dtype in LOW_PRECISION and master.grad is not None:
                    set_own_grad(param, master.grad.to(param.device, param.dtype))  # its original type

    def follow(self, wrapper: Any) -> None:
        """Re-key the state of `wrapper`, which wraps this optimizer (SAM), from the parameters to their masters."""
        for record, param in self._params.items():
            rekey(wrapper, param, record.master)

    def unfollow(self, wrapper: Any) -> None:
        """Undo `follow`."""
        for record, param in self._params.items():
            rekey(wrapper, record.master, param)

    def param_of(self, master: Tensor) -> Tensor:
        """Return the parameter of `master`, a tensor in the groups; a parameter without a master is its own."""
        record = self._index.get(master)
        return master if record is None else self._params[record]


def _replace(optimizer: Any, params: list[Tensor], index: int, new: Tensor) -> None:
    old, params[index] = params[index], new
    rekey(optimizer, old, new)


def take_out_of_tables(record: Record) -> None:
    """Let the next optimizer that gets the master of `record` defer its gradients; no sync."""
    record.stop_waiting()
    record.is_routed = False
