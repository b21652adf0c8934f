"""The prose of each part of the tree has few of the words and forms that CONTRIBUTING.md asks to avoid.

A pattern is crude: it finds what it can, and a sentence without any may still be unclear.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from paths import ROOMS, ROOT

# The most marks per 100 words. Tighten a number after a rewrite; do not raise one.
CEILINGS = {
    "amp_patch": 0.7,
    "csrc": 0.7,
    "docs": 0.5,
    "tests": 1.0,
}
BEGINNINGS = r"^(?:what|those|whose|of|such|that|one that|(?:by|from) what)\b"
SUBJECTS = (
    r"what (?:is|was|has|were|are|they|it|we|somebody|nobody|users?)",
    r"those (?:that|of|which|who)",
    r"(?:of|in|by|from|to|for|with|on) which",
    r"somebody|nobody|everybody|whoever|who asks|who looks",
)
VERBS = (
    r"is told|hears?|gives? back|stands? for|lies?|let go|that is so|had (?:been )?(?:there|so)",
    r"(?:are|is) there|go(?:es)? (?:its|their|on) (?:own )?way",
)
ADVERBS = (
    r"in the place of|anew|of now|as ever|as before|none unless|otherwise than|meanwhile|the same of|perhaps|hardly",
    r"by chance|on the mean|by (?:itself|themselves|hand)|of (?:ours|its own|their own)",
    r"save (?:that|where|in|of|for)|where (?:there|nothing|nobody|no)",
    r"as (?:torch|apex)'s (?:are|is|does|do)|so (?:are|is|does|do|many|much)",
)
MARK = re.compile(
    "|".join((BEGINNINGS, *(rf"\b(?:{words})\b" for words in SUBJECTS + VERBS + ADVERBS), r", say[,.;)]")),
    re.IGNORECASE,
)


def of_python(text: str) -> Iterator[str]:
    """Yield the docstrings and comments of a file. Comments on adjacent lines are one text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    comments = [
        token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    before, block = 0, ""
    for token in comments:
        if token.start[0] != before + 1:
            yield block
            block = ""
        before, block = token.start[0], f"{block} {token.string.lstrip('# ')}"
    yield block


def of_cpp(text: str) -> Iterator[str]:
    for block in re.findall(r"(?:^[ \t]*//.*\n?)+|//.*$", text, re.MULTILINE):
        yield re.sub(r"[ \t]*//[-/ ]*", " ", block)


def of_markdown(text: str) -> Iterator[str]:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"(?:^(?![|#]).+\n?)+", prose, re.MULTILINE)


def of_names(text: str) -> Iterator[str]:
    yield from (name.replace("_", " ") for name in re.findall(r"def test_(\w+)", text))


def parts() -> dict[str, list[str]]:
    """Return {part of the tree: its texts}. Each folder of amp_patch, and each folder of its rooms, is a part."""
    found: dict[str, list[str]] = {}
    readers = {"amp_patch": ("py", of_python), "tests": ("py", of_names), "docs": ("md", of_markdown)}
    for top, (suffix, read) in readers.items():
        for path in sorted((ROOT / top).rglob(f"*.{suffix}")):
            folders = path.relative_to(ROOT).parts[:-1]
            part = top if top != "amp_patch" else "/".join(folders[: 3 if ROOMS.intersection(folders[:2]) else 2])
            found.setdefault(part, []).extend(read(path.read_text()))
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu"):
            found.setdefault("csrc", []).extend(of_cpp(path.read_text()))
    found["docs"].extend(of_markdown((ROOT / "README.md").read_text()))
    return found


def marks(text: str) -> list[str]:
    sentences = re.split(r"(?<=[.;:!?])\s+", text.strip())
    return [mark.group() for sentence in sentences for mark in MARK.finditer(sentence)]


def test_each_part_has_few_marks():
    failed = []
    for part, texts in parts().items():
        found = {text.strip(): marked for text in texts if (marked := marks(text))}
        ceiling = CEILINGS[part.partition("/")[0]] * sum(len(text.split()) for text in texts) / 100
        worst = sorted(found.items(), key=lambda item: -len(item[1]))[:5]
        # Two more in a part that is one page long: there a single mark exceeds any ceiling.
        if sum(map(len, found.values())) > ceiling + 2:
            failed.append(f"{part}: for example {worst}")
    assert not failed
