"""More of the stories of tests/training/test_stories.py: new ones by their seeds, and the scripts of those that fail.

    make stories                      # 1,000 stories
    make stories COUNT=2000 SEED=7    # 2,000 of them from the seed 7 on

A story whose two trainings part is told again with ever fewer events, and its shortest form is printed as a script:
run that with tests/helpers on PYTHONPATH. Exits non-zero if there is one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def begin() -> None:
    """What pytest does for the tests: warnings are errors, a process has one thread."""
    import torch

    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    from stories import DESERVED

    for pattern in DESERVED:
        warnings.filterwarnings("ignore", pattern)


def told(seed: int) -> str:
    from lives import tell
    from stories import complaint, drawn

    return complaint(drawn(seed), tell)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="how many stories")
    parser.add_argument("--seed", type=int, default=1000, help="the first one's seed; 0 to 599 are make test-all's")
    parser.add_argument("--workers", type=int, default=2, help="how many processes tell them")
    given = parser.parse_args()
    failed, start = 0, time.monotonic()
    seeds = range(given.seed, given.seed + given.count)
    with multiprocessing.get_context("spawn").Pool(given.workers, begin) as pool:
        for number, text in enumerate(pool.imap(told, seeds, chunksize=5), 1):
            if text:
                failed += 1
                print(f"\n{text}\n", flush=True)
            if number % 100 == 0 or number == given.count:
                print(
                    f"{number} of {given.count} stories, {failed} failed, {time.monotonic() - start:.0f} s", flush=True
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
