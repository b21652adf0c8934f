"""Write the pictures of README.md, light and dark: the card of the demo's report, for each kind of machine.

make picture                     # for this machine, which has BF16 arithmetic or not
make picture PLAYS=avx512        # a machine with BF16 arithmetic uses AVX-512 alone; PLAYS=avx2: AVX2 alone

To draw an existing report: `python benchmarks/demo_picture.py --from out/demo/report.json`. The lines of README.md that
show pictures are replaced by lines for the pictures in docs/.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from poster import poster

from amp_patch.comparison import headline
from amp_patch.comparison.comparison import Comparison
from amp_patch.diagnose.recording.run import loads

ROOT = Path(__file__).parents[1]
# Kind of machine, as in the names of the files -> the text of README.md above its picture.
KINDS = {
    "bf16": "**On a CPU with BF16 arithmetic** (Zen 4, Cooper Lake, Sapphire Rapids and newer):",
    "no-bf16": "**On a CPU without it** (most laptops, servers before these), where BF16 is computed in FP32:",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="report", type=Path, default=ROOT / "out/demo/report.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the pictures go")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the page that shows them")
    args = parser.parse_args()
    comparison = Comparison.from_dict(loads(args.report.read_text()))
    kind = "no-bf16" if lacks_bf16(comparison) else "bf16"
    for name, dark in (("light", False), ("dark", True)):
        picture = poster(comparison, dark=dark, about=about(comparison), machine=machine(comparison))
        (args.docs / f"demo-{kind}-{name}.svg").write_text(picture)
    args.readme.write_text(with_pictures(args.readme.read_text(), args.docs))
    print(f"{kind}: {headline.headline(comparison)}; {headline.gains(comparison)}")


def with_pictures(text: str, docs: Path) -> str:
    """Return the text of README.md with a block for each picture in `docs`, in the order of KINDS."""
    there = [kind for kind in KINDS if (docs / f"demo-{kind}-light.svg").exists()]
    blocks = "".join(f"{block(kind)}\n\n" for kind in there)
    starts = "|".join(re.escape(words) for words in KINDS.values())
    found, count = re.subn(rf"(?:(?:{starts})[^\n]*\n\n)+", lambda _: blocks, text)
    if count != 1:
        raise ValueError(f"README.md shows pictures in {count} places; wanted one, with a line that begins: {starts}")
    return found


def block(kind: str) -> str:
    """Return the line that shows the picture of a kind of machine, light or dark by the reader's setting."""
    alt = (
        "The demo's levels: a bar of speed, a bar of memory by its kinds, and the gap in loss to FP32 on a band of the "
        "margin."
    )
    return (
        f'{KINDS[kind]}<br><picture><source media="(prefers-color-scheme: dark)" srcset="docs/demo-{kind}-dark.svg">'
        f'<img src="docs/demo-{kind}-light.svg" alt="{alt}"></picture>'
    )


def lacks_bf16(comparison: Comparison) -> bool:
    return "bfloat16" in comparison.machine.get("lacks", "").split()


def about(comparison: Comparison) -> str:
    base = comparison.baseline
    millions = f" with {base.runs[0].weights / 4e6:.1f} million parameters" if base is not None else ""
    return f"make demo: a GPT{millions}, {comparison.steps} steps at each level"


def machine(comparison: Comparison) -> str:
    """Describe the machine: first whether it has BF16 arithmetic, then the processor, threads and torch."""
    told = comparison.machine
    threads = "one thread" if told["threads"] == "1" else f"{told['threads']} threads"
    what = "Without" if lacks_bf16(comparison) else "With"
    played = f", played by {told['limited']}" if "limited" in told else ""
    return f"{what} BF16 arithmetic: {told['cpu']}{played}, {threads}, torch {told['torch'].partition('+')[0]}"


if __name__ == "__main__":
    main()
