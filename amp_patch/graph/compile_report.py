"""The report that `Graph.debug` turns on: the graphs that a call compiled, their time, and reasons of graph breaks."""

from __future__ import annotations

import time


class CompileReport:
    """A block that prints the compilations in it; at `level` 1 or more also the reasons of graph breaks."""

    def __init__(self, name: str, level: int) -> None:
        self._name, self._level = name, level

    def __enter__(self) -> None:
        self._graphs, self._breaks, self._start = *_compiled(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        graphs, breaks = _compiled()
        if graphs == self._graphs:
            return
        seconds = time.perf_counter() - self._start
        new = {reason: count for reason, count in breaks.items() if count > self._breaks.get(reason, 0)}
        print(
            f"{self._name}: compiled {graphs - self._graphs} graph(s) in {seconds:.1f} s, {len(new)} graph break(s)",
            flush=True,
        )
        if self._level >= 1:
            for reason in new:
                print(f"{self._name}: graph break: {reason}", flush=True)


def _compiled() -> tuple[int, dict[str, int]]:
    """Return (number of graphs that this process has compiled, its graph breaks: {reason: count})."""
    from torch._dynamo.utils import counters  # imported here, because it takes a second

    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])
