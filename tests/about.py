"""The tests about a word, by their sentences: a name that is read as one, and what the docstring adds to it.

    make tests-about WORD=overflow
    make tests-about WORD="split master"    # tests that have both words

A word is looked for in the path of a file, in its first docstring, and in a test's name and docstring. Nothing is
imported. Exits non-zero if there is no such test.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Sentence(NamedTuple):
    path: str
    line: int
    of_file: str  # the file's docstring
    text: str

    def has(self, words: Sequence[str]) -> bool:
        """Tell whether each word is in the test's name, its file's name or its file's docstring."""
        everything = f"{self.path} {self.of_file} {self.text}".lower().replace("_", " ")
        return all(word.lower().replace("_", " ") in everything for word in words)


def sentences(root: Path) -> Iterator[Sentence]:
    """Those of all tests under `root`, in the order of the files."""
    for path in sorted(root.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        of_file = ast.get_docstring(tree) or ""
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = " ".join((ast.get_docstring(node) or "").split())
                text = node.name.removeprefix("test_").replace("_", " ") + (f": {said}" if said else "")
                yield Sentence(str(path.relative_to(root.parent)), node.lineno, of_file, text)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT / "tests") -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="WORD")
    words = parser.parse_args(arguments).words
    found = [sentence for sentence in sentences(root) if sentence.has(words)]
    path = ""
    for sentence in found:
        if sentence.path != path:
            path = sentence.path
            print(f"{path}: {' '.join(sentence.of_file.split())}")
        print(f"    {sentence.line}: {sentence.text}")
    print(f"{len(found)} tests about {' '.join(words)}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
