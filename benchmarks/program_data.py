"""Generators of small data sets in the formats that public programs read, for public_programs.py.

A data set has a few hundred kilobytes, and is the same in each run.
"""

from __future__ import annotations

import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

Prepare = Callable[[Path], None]  # receives the folder that the program runs in

# The most frequent words of English.
WORDS = (
    *("the", "of", "and", "to", "in", "a", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they"),
    *("at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we"),
    *("there", "can", "an", "your", "which", "their", "said", "if", "do", "will", "each", "about", "how", "up", "out"),
    *("them", "then", "she", "many", "some", "so", "these", "would", "other", "into", "has", "more", "her", "two"),
)


def mnist(where: str = "../data", results: str = "results") -> Prepare:
    """Return a writer of MNIST's four files. A class is a bright square at its own place, in noise.

    It also creates the folder `results`, in which a program stores its pictures.
    """

    def write(folder: Path) -> None:
        (folder / results).mkdir(exist_ok=True)
        raw = folder / where / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        chance = random.Random(0)
        for kind, count in ("train", 600), ("t10k", 256):
            labels = [n % 10 for n in range(count)]
            images = bytearray(chance.choices(range(64), k=count * 784))
            for n, label in enumerate(labels):
                for row in range(8):
                    at = n * 784 + (4 + 12 * (label // 5) + row) * 28 + 1 + 5 * (label % 5)
                    images[at : at + 5] = bytes([250] * 5)
            (raw / f"{kind}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images)
            (raw / f"{kind}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + bytes(labels))

    return write


def sentences(size: int, seed: int = 0) -> str:
    """Return at least `size` characters of sentences. Only four words can follow a word, so a model can learn them."""
    chance = random.Random(seed)
    after = {word: chance.sample(WORDS, 4) for word in WORDS}
    lines, length, word = [], 0, "the"
    while length < size:
        line = []
        for _ in range(chance.randint(4, 12)):
            word = chance.choice(after[word])
            line.append(word)
        lines.append(" ".join(line).capitalize() + chance.choice([".", "!", "?", ", O God!"]))
        length += len(lines[-1]) + 1
    return "\n".join(lines) + "\n"


def text(*names: str, size: int = 100_000) -> Prepare:
    def write(folder: Path) -> None:
        for seed, name in enumerate(names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(sentences(size, seed))

    return write


def names(name: str = "names.txt", count: int = 3000) -> Prepare:
    def write(folder: Path) -> None:
        chance = random.Random(0)
        syllables = [a + b for a in "bdklmnrst" for b in "aeiou"]
        made = {"".join(chance.choices(syllables, k=chance.randint(1, 4))) for _ in range(count)}
        (folder / name).write_text("\n".join(sorted(made)))

    return write


def cora(where: str = "cora", nodes: int = 1700, features: int = 64) -> Prepare:
    """Return a writer of a citation graph: cora's two files, and an archive of both, cora.tgz."""

    def write(folder: Path) -> None:
        chance = random.Random(0)
        classes = ["Case_Based", "Genetic_Algorithms", "Neural_Networks", "Probabilistic_Methods", "Theory"]
        kinds = [chance.randrange(len(classes)) for _ in range(nodes)]
        (folder / where).mkdir(parents=True, exist_ok=True)
        with open(folder / where / "cora.content", "w") as file:
            for node, kind in enumerate(kinds):
                words = [int(chance.random() < (0.3 if n % len(classes) == kind else 0.05)) for n in range(features)]
                print(node + 1, *words, classes[kind], sep="\t", file=file)
        alike = {kind: [node for node, its in enumerate(kinds) if its == kind] for kind in set(kinds)}
        with open(folder / where / "cora.cites", "w") as file:
            for node, kind in enumerate(kinds):
                for other in chance.sample(alike[kind], 2):
                    print(node + 1, other + 1, sep="\t", file=file)
        with tarfile.open(folder / "cora.tgz", "w:gz") as archive:
            archive.add(folder / where, "cora")

    return write


def images(*folders: str, count: int = 24, size: int = 64, kind: str = "jpg") -> Prepare:
    """Return a writer of pictures, each of a bright disc, by Pillow."""

    def write(folder: Path) -> None:
        from PIL import Image, ImageDraw

        for seed, name in enumerate(folders):
            chance = random.Random(seed)
            (folder / name).mkdir(parents=True, exist_ok=True)
            for n in range(count):
                picture = Image.new("RGB", (size, size), tuple(chance.choices(range(128), k=3)))
                at = [chance.randrange(size) for _ in range(2)]
                ImageDraw.Draw(picture).ellipse([*at, at[0] + size // 3, at[1] + size // 3], "white")
                picture.save(folder / name / f"{n}.{kind}")

    return write


def masks(folder: Path) -> None:
    """Write pictures into data/imgs, and masks of their bright pixels into data/masks, for a U-Net."""
    from PIL import Image

    images("data/imgs", size=96, count=20)(folder)
    (folder / "data" / "masks").mkdir(exist_ok=True)
    for path in (folder / "data" / "imgs").glob("*.jpg"):
        bright = Image.open(path).convert("L").point(lambda value: 255 if value > 200 else 0)
        bright.save(folder / "data" / "masks" / f"{path.stem}.gif")
