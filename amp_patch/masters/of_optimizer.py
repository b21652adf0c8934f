"""The masters of one optimizer: put into its groups in the place of low-precision parameters, and taken out again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from amp_patch.masters import split_master
from amp_patch.masters.gradients import FoundInf, Groups
from amp_patch.masters.half_gradients import HalfGradients
from amp_patch.masters.master import Master
from amp_patch.masters.masters import Link, Linked, Watch, connect, master_of, note_published, publish
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.patches import Attempts

Pair = tuple[Tensor, Tensor]  # (param, master)


class Pairs:
    """The pairs of one optimizer.

    Attributes:
        pairs: as the groups have them.
        distinct: each once.
        params, masters: of `pairs`.
        low, linked_masters: of those of `distinct` that are two tensors.
    """

    def __init__(self, pairs: list[Pair]) -> None:
        self.pairs = pairs
        self.params = [param for param, _ in pairs]
        self.masters = [master for _, master in pairs]
        once = {id(param): (param, master) for param, master in pairs}
        self.distinct = pairs if len(once) == len(pairs) else list(once.values())
        self.low = [param for param, master in self.distinct if param is not master]
        self.linked_masters = [master for param, master in self.distinct if param is not master]


class Links:
    """The parameters that have a master.

    Attributes:
        linked: with their links.
        params, masters: of these.
        watch: tells which masters were written since they were published.
    """

    def __init__(self, linked: list[Linked]) -> None:
        self.linked = linked
        self.params = [param for param, _ in linked]
        self.masters = [link.master for _, link in linked]
        self.watch = Watch([link.noted for _, link in linked])

    def publish_written(self) -> list[Linked]:
        """As `masters.publish_written`."""
        written = [self.linked[index] for index in self.watch.written()]
        if written:
            publish(written)
        return written


class Masters:
    """The parameters of one optimizer as pairs (param, master), and what moves between the two.

    The optimizer's groups hold the masters, in the user's order. All that is kept here is the way back from a master to
    the model's parameter. The groups are arguments, so that nothing here has to be kept in step with them.

    Attributes:
        waiting: where gradients wait in low precision; None where they do not.
    """

    def __init__(self) -> None:
        self.waiting: HalfGradients | None = None
        self._params: dict[int, Linked] = {}  # id(master) -> the parameter and its link to this master
        self._links: Links | None = None  # of these
        self._pairs: Pairs | None = None

    def __getstate__(self) -> list[tuple[Tensor, Tensor]]:
        return [(param, link.master) for param, link in self._params.values()]

    def __setstate__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.__init__()  # type: ignore[misc]
        self._params = {id(master): (param, connect(param, master)) for param, master in pairs}

    def pairs(self, groups: Groups) -> Sequence[Pair]:
        """(param, master) for every parameter in `groups`; the same tensor twice where it is its own master."""
        return self.of_groups(groups).pairs

    def of_groups(self, groups: Groups) -> Pairs:
        """The pairs of the parameters in `groups`, made anew when these have changed."""
        masters = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        known = self._pairs
        if known is None or len(masters) != len(known.masters) or not all(map(is_, masters, known.masters)):
            params = self._params
            known = self._pairs = Pairs([(params[id(m)][0] if id(m) in params else m, m) for m in masters])
        return known

    def links(self) -> Links:
        """The parameters that have a master, and what is asked of all of them at once."""
        if self._links is None:
            self._links = Links(list(self._params.values()))
        return self._links

    def linked(self) -> Sequence[Linked]:
        """The parameters that have a master, with their links."""
        return self.links().linked

    def _changed(self) -> None:
        self._links = self._pairs = None

    @property
    def by_master(self) -> Mapping[int, Linked]:
        """By the master's id the parameter that has it, and the link between the two."""
        return self._params

    def keep(self, *, split: bool) -> None:
        """Keep the masters of bfloat16 parameters as halves, or all of them whole, in place; no sync."""
        pairs = [(param, link.master) for param, link in self.linked()]
        if split:
            split_master.split(pairs)
            note_published(self.linked())
            return
        for _, master in pairs:
            if split_master.is_split(master):
                split_master.join_for_good(master)

    def let_gradients_wait(self) -> None:
        """Leave gradients in low precision from now on (`take_half`): the optimizer knows what to do with them."""
        if self.waiting is None:
            self.waiting = HalfGradients()
            for _, link in self._params.values():
                self._serve(link)

    def _serve(self, link: Link) -> None:
        """Let gradients of this master wait; those of no master where another optimizer has it, or it cannot tell."""
        if self.waiting is None:
            return
        if not isinstance(link.master, Master) or link.master.waiting not in (None, self.waiting):
            self.waiting.make()
            self.waiting = None
            return
        link.master.waiting = self.waiting
        self.waiting.serve(link.master, link.gradients)

    def take_half(self, groups: Groups, inverse: Tensor | None) -> FoundInf | None:
        """Let the scaled gradients of parameters with masters wait as they are; overflow is checked; no sync.

        Args:
            groups: whose parameters.
            inverse: of the loss scale, FP32, shape []; None for a scale of 1 whose gradients nobody checks.

        Returns:
            As `gather`; None, and nothing was changed, where they cannot wait.
        """
        waiting, pairs = self.waiting, self.of_groups(groups)
        if waiting is None or not pairs.low or not waiting.take(pairs.low, pairs.linked_masters):
            return None
        if inverse is None or not waiting.grads:
            return {}
        found_inf = waiting.check(inverse)
        return {found_inf.device: found_inf}

    def attach(self, optimizer: Any, group: dict[str, Any], about_to_be_cast: Collection[int] = ()) -> None:
        """Put masters into one of the optimizer's groups, in place.

        A parameter whose id is in `about_to_be_cast` gives its FP32 storage to its master: the caller gives the
        parameter a low-precision one next. A parameter that is float16 or bfloat16 already gets the master that it
        has, or an FP32 copy. The optimizer's state and an existing gradient move to the master.
        """
        params = group["params"]
        for index, param in enumerate(params):
            if id(param) not in about_to_be_cast and param.dtype not in LOW_PRECISION:
                continue
            master = master_of(param)  # another optimizer's, maybe
            if master is None:
                # `.data`, since a detached tensor would share the parameter's version counter too
                master = nn.Parameter(param.data.float(), requires_grad=param.requires_grad)
            self._params[id(master)] = (param, connect(param, master))
            self._changed()
            self._serve(self._params[id(master)][1])
            _replace(optimizer, params, index, master)
            if param.grad is not None:
                master.grad, param.grad = param.grad.to(master.dtype), None

    def detach(self, optimizer: Any) -> None:
        """Undo `attach`: put the parameters into the groups again, and move the state to them.

        A parameter that is FP32 again gets its master's gradient too.
        """
        attempt = Attempts()
        for group in optimizer.param_groups:
            attempt(self._detach_group, optimizer, group)
        self._params.clear()
        self._changed()
        attempt.finish()

    def _detach_group(self, optimizer: Any, group: dict[str, Any]) -> None:
        params = group["params"]
        for index, master in enumerate(params):
            param = self._param_of(master)
            if param is not master:
                _replace(optimizer, params, index, param)
                if param.dtype is master.dtype:
                    param.grad = master.grad

    def follow(self, wrapper: Any) -> None:
        """Move what `wrapper`, around an optimizer with these masters, keeps for the parameters to the masters."""
        for param, link in self._params.values():
            _rekey(wrapper, param, link.master)

    def unfollow(self, wrapper: Any) -> None:
        """Undo `follow`."""
        for param, link in self._params.values():
            _rekey(wrapper, link.master, param)

    def _param_of(self, master: Tensor) -> Tensor:
        known = self._params.get(id(master))
        return master if known is None else known[0]


def _replace(optimizer: Any, params: list[Tensor], index: int, new: Tensor) -> None:
    old, params[index] = params[index], new
    _rekey(optimizer, old, new)


def _rekey(optimizer: Any, old: Tensor, new: Tensor) -> None:
    state = getattr(optimizer, "state", None)
    if state is not None and old in state:
        state[new] = state.pop(old)
