"""Generators of small data sets in the formats that public programs read, for public_programs.py.

A data set has a few hundred kilobytes, and is the same in each run.
"""

from __future__ import annotations

import json
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


def classes(*folders: str, size: int = 64) -> Prepare:
    """Return a writer of pictures in two classes, in folders as torchvision's ImageFolder reads them."""
    return images(*(f"{folder}/{name}" for folder in folders for name in ("one", "two")), size=size)


def words(where: str, count: int = 96) -> Prepare:
    """Return a writer of pictures of words, with the lists of Synth90k: a lexicon, and a line for each picture."""

    def write(folder: Path) -> None:
        from PIL import Image, ImageDraw

        home = folder / where
        home.mkdir(parents=True, exist_ok=True)
        (home / "lexicon.txt").write_text("\n".join(WORDS) + "\n")
        chance = random.Random(0)
        for kind, many in ("train", count), ("val", 32):
            lines = []
            for n in range(many):
                at = chance.randrange(len(WORDS))
                picture = Image.new("L", (100, 32), chance.randrange(64))
                ImageDraw.Draw(picture).text((4, 8), WORDS[at], fill=chance.randrange(160, 256))
                picture.save(home / f"{kind}{n}.jpg")
                lines.append(f"./{kind}{n}.jpg {at}")
            (home / f"annotation_{kind}.txt").write_text("\n".join(lines) + "\n")

    return write


def small_graphs(where: str, count: int = 120) -> Prepare:
    """Return a writer of graphs of two classes, cycles and stars: a line for each node with its tag and neighbors."""

    def write(folder: Path) -> None:
        (folder / where).parent.mkdir(parents=True, exist_ok=True)
        chance = random.Random(0)
        lines = [str(count)]
        for n in range(count):
            size = chance.randint(6, 14)
            lines.append(f"{size} {n % 2}")
            for node in range(size):
                cycle = [(node - 1) % size, (node + 1) % size]
                near = cycle if n % 2 else list(range(1, size)) if node == 0 else [0]
                lines.append(" ".join(map(str, [chance.randrange(3), len(near), *near])))
        (folder / where).write_text("\n".join(lines) + "\n")

    return write


def tokenizer(folder: Path, kind: str, first: tuple[str, ...], **options: str) -> None:
    """Write the tokenizer `kind` of transformers. Its tokens are the names of bytes and the special tokens `first`."""
    import transformers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {token: n for n, token in enumerate([*first, *bytes_to_unicode().values()])}
    getattr(transformers, kind)(vocab=vocabulary, merges=[], **options).save_pretrained(folder)


def language_model(folder: Path) -> None:
    """Write a GPT-2 of two layers with its tokenizer into model, preferences into pairs, and texts into texts."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    end = "<|endoftext|>"
    tokenizer(folder / "model", "GPT2Tokenizer", (end,), eos_token=end, pad_token=end)
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 257}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder / "model")
    lines = [line for line in sentences(9000).splitlines() if len(line) > 20]
    pairs = [{"prompt": line[:8], "chosen": line[8:], "rejected": line[:7:-1]} for line in lines]
    json_lines(folder / "pairs" / "train.jsonl", pairs)
    json_lines(folder / "texts" / "train.jsonl", [{"text": line} for line in lines])


def json_lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def qwen(folder: Path) -> None:
    """Write a tokenizer and a text under the names that Moonlight's script asks the hub for.

    The text fills one row of 512 tokens, which is one step: the script's model has 151,936 outputs for each token.
    """
    tokenizer(folder / "Qwen" / "Qwen2.5-0.5B", "Qwen2Tokenizer", ("<|endoftext|>",))
    rows = [{"text": line} for line in sentences(600).splitlines()]
    json_lines(folder / "Elriggs" / "openwebtext-100k" / "train.jsonl", rows)


def noise_model(folder: Path) -> None:
    """Write pictures into data, and the configuration of a small U-Net of diffusers into small."""
    images("data", size=32)(folder)
    blocks = {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"], "up_block_types": ["AttnUpBlock2D", "UpBlock2D"]}
    sizes = {"sample_size": 32, "block_out_channels": [16, 32], "layers_per_block": 1, "norm_num_groups": 8}
    (folder / "small").mkdir(exist_ok=True)
    settings = {"_class_name": "UNet2DModel", "attention_head_dim": 8, **sizes, **blocks}
    (folder / "small" / "config.json").write_text(json.dumps(settings))
