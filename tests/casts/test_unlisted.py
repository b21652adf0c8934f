"""Each function of torch is on an op list, or has a reason not to be. A new function of torch fails a test here."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from op_calls import resolve, result_types

from amp_patch.casts.oplists import OPLISTS

AS_IT_CAME = "elementwise, sorting and choosing: gives the type that came, and its range is that of what came"
PROMOTES = "promotes by itself"

# Reasons, each with the names of the lines behind it.
_TABLE = (Path(__file__).parent / "unlisted.txt").read_text()
UNLISTED = {reason: names.split() for reason, names in re.findall(r"^(\S.*)\n((?: .*\n)+)", _TABLE, re.MULTILINE)}

# A name with one of these endings is its name without it, and follows what is said of that.
ENDINGS = {
    "_": "in place: the result has the type of the first argument, and torch says which others it takes",
    "_copy": "a view, copied",
}


# Those of torch.nn.attention by what they say is public: they import from each other.
OWNERS = (
    "torch",
    "torch.Tensor",
    "torch.nn.functional",
    "torch.functional",
    "torch.linalg",
    "torch.special",
    "torch.fft",
)
ATTENTION = (
    "torch.nn.attention",
    "torch.nn.attention.flex_attention",
    "torch.nn.attention.varlen",
    "torch.nn.attention.bias",
)
REASONS = {name: reason for reason, names in UNLISTED.items() for name in names}
# The torch of the table. What an older one has beside, it has lost since.
TABLE_OF = (2, 13)
THIS = tuple(int(part) for part in torch.__version__.split(".")[:2])


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # varlen is younger than torch 2.6
        return None


def functions() -> Iterator[tuple[str, str]]:
    """(owner, name) of torch's public functions."""
    for owner in OWNERS:
        for name in dir(resolve(owner)):
            found = getattr(resolve(owner), name)
            of_torch = (getattr(found, "__module__", None) or "torch").partition(".")[0] in ("torch", "builtins")
            if not name.startswith("_") and callable(found) and not isinstance(found, type) and of_torch:
                yield owner, name
    for owner in ATTENTION:
        for name in getattr(module(owner), "__all__", ()):
            if callable(found := getattr(module(owner), name)) and not isinstance(found, type):
                yield owner, name


def known(owner: str, name: str) -> bool:
    listed = any(name in names for names in OPLISTS.get(owner, {}).values())
    return listed or name in REASONS or any(known(owner, bare) for bare in without_ending(name))


def without_ending(name: str) -> list[str]:
    return [bare for ending in ENDINGS if (bare := name.removesuffix(ending)) != name]


@pytest.mark.skipif(THIS < TABLE_OF, reason="names that torch had before the table's")
def test_every_function_is_listed_or_left_out_for_a_reason() -> None:
    new = [f"{owner}.{name}" for owner, name in functions() if not known(owner, name)]
    assert not new, "add each to OPLISTS in amp_patch/casts/oplists.py, or to unlisted.txt here under a reason"


def test_a_function_that_torch_gets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "attention_of_tomorrow", torch.exp, raising=False)
    new = [(owner, name) for owner, name in functions() if not known(owner, name)]
    assert ("torch.nn.functional", "attention_of_tomorrow") in new


def test_a_name_has_one_reason_and_is_not_listed_everywhere() -> None:
    assert not [
        name for name, times in Counter(name for names in UNLISTED.values() for name in names).items() if times > 1
    ]
    here = {name for owner, name in functions() if not any(name in names for names in OPLISTS.get(owner, {}).values())}
    everywhere = {name for _, name in functions()}
    assert not [name for name in REASONS if name in everywhere and name not in here]


def here(reason: str) -> list[str]:
    """Return the names under a reason that this torch has."""
    return [name for name in UNLISTED[reason] if any(hasattr(resolve(owner), name) for owner in OWNERS)]


def of_matrices(name: str, *dtypes: torch.dtype) -> set[torch.dtype]:
    owner = next(found for found in OWNERS if hasattr(resolve(found), name))
    values = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) / 2 + 1
    return result_types(getattr(resolve(owner), name)(*(values.to(dtype) for dtype in dtypes)))


@pytest.mark.parametrize("name", [name for name in here(AS_IT_CAME) if name != "norm_except_dim"])
def test_unlisted_functions_return_the_incoming_type(name: str) -> None:
    assert of_matrices(name, torch.bfloat16) == {torch.bfloat16}
    assert of_matrices(name, torch.float32) == {torch.float32}


@pytest.mark.parametrize("name", here(PROMOTES))
def test_unlisted_functions_promote_to_fp32(name: str) -> None:
    assert of_matrices(name, torch.bfloat16, torch.float32) == {torch.float32}
    assert of_matrices(name, torch.float32, torch.bfloat16) == {torch.float32}
