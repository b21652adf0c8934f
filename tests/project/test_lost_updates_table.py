"""The table of lost updates in docs/ladder.md: its four runs, shorter ones, from benchmarks/lost_updates.py."""

from __future__ import annotations

import pytest
import scripts


@pytest.fixture(scope="module", name="benchmark")
def benchmark_fixture():
    return scripts.load("lost_updates")


@pytest.mark.slow
def test_the_lost_share_without_masters_grows_with_smaller_steps_and_rungs_lose_nothing(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "LEVELS", ("O5+split", "O5+stochastic", "O3"))
    steps, start = 150, benchmark.starting_weights(300)
    rows = [benchmark.measure(case, 1, steps, start) for case in benchmark.CASES]
    shares = [row["lost"] for row in rows]
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[1] > 0.4 and shares[2] > 0.85 and shares[3] > 0.9
    for row in rows[1:]:  # in the first, of large steps, the seeds are further apart than the levels
        for level in ("O5+split", "O5+stochastic"):
            assert abs(row[level][0]) < 0.005, (row["run"], level)
        assert row["O3"][0] > 0.01, row["run"]
