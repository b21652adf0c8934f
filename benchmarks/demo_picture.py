"""The picture of README.md, light and dark: the card of the demo's report, with the name of the CPU that it ran on.

make demo
.venv/bin/python benchmarks/demo_picture.py        # from out/demo, into docs/
"""

from __future__ import annotations

import argparse
from pathlib import Path

from poster import poster

from amp_patch.lab.comparison.comparison import Comparison
from amp_patch.lab.recording.run import loads

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="report", type=Path, default=ROOT / "out/demo/report.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where demo-light.svg and demo-dark.svg go")
    args = parser.parse_args()
    comparison = Comparison.from_dict(loads(args.report.read_text()))
    for name, dark in (("light", False), ("dark", True)):
        picture = poster(comparison, dark=dark, about=about(comparison), machine=machine(comparison))
        (args.docs / f"demo-{name}.svg").write_text(picture)


def about(comparison: Comparison) -> str:
    base = comparison.baseline
    millions = f" with {base.runs[0].weights / 4e6:.1f} million parameters" if base is not None else ""
    return f"make demo: a GPT{millions}, {comparison.steps} steps at each level"


def machine(comparison: Comparison) -> str:
    told = comparison.machine
    threads = "one thread" if told["threads"] == "1" else f"{told['threads']} threads"
    return f"{told['cpu']}, {threads}, torch {told['torch'].partition('+')[0]}"


if __name__ == "__main__":
    main()
