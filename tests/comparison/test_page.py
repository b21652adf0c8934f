"""The report's page as text: what stands on it, and that nothing of the user's becomes more than text."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from made_up import made_up_look, made_up_run

pytest.importorskip("matplotlib", reason="the report's pictures want matplotlib")

from amp_patch.comparison import measures, number_pictures, page, pictures, wording
from amp_patch.comparison.comparison import Comparison
from amp_patch.recording.run import PARTS, Run, dumps, loads

NASTY = "</style><script>alert('x')</script>&amp;<img src=http://a.example/x.png>\"' $x_1$ \u4e2d\udcff"
MACHINE = {"torch": "2.13.0", "cpu": "some processor"}


class Tree(HTMLParser):
    """Every tag with its attributes, and the text outside of tags."""

    VOID = ("meta", "link", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes what is not open"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag in names]


@pytest.fixture(scope="module")
def full() -> tuple[Comparison, Tree, str]:
    """Levels of every kind: one that scales, one that was looked at, one that diverged, one that failed."""
    runs = [
        made_up_run(level, seed, dtype=None if level == "O0" else "float16", final=1 + seed / 8)
        for level in ("O0", "O1", "O2", "O3")
        for seed in (0, 1)
    ]
    runs[7].loss[30:] = [math.nan] * 10
    runs[4].looks = [replace(made_up_look(), not_finite="forward of pow in last, step 1")]
    runs.append(Run("O4", 0, dtype="bfloat16", error="ValueError: this does not work"))
    given = Comparison("train.py", runs, machine=MACHINE)
    text = page.html(given)
    return given, Tree(text), text


def test_what_stands_on_the_page(full):
    given, tree, _ = full
    for words in (given.title, given.summary, given.test, *MACHINE.values(), "ValueError: this does not work"):
        assert words in tree.text
    for level in given.levels:
        assert level.verdict.text.rstrip(".")[1:] in tree.text
    assert "forward of pow in last, step 1" in tree.text and "keep_fp32=['last']" in tree.text
    for name, share in (("first.weight", "25 %"), ("last.weight", "60 %")):
        assert re.search(rf"{name}.*{share}", tree.text)
    order = ["How it was decided", "The levels", "Training loss", "Time and memory", "Loss scale", "What failed"]
    order += ["What the numbers look like", "The machine", "Every run"]
    places = [tree.text.index(title) for title in order]
    assert places == sorted(places)


def test_its_structure(full):
    _, tree, _ = full
    assert not tree.open, "tags that nobody closed"
    headings = [int(tag[1]) for tag, _ in tree.tags if tag in ("h1", "h2", "h3")]
    assert headings.count(1) == 1 and headings[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    assert tree.all("html")[0]["lang"] == "en" and len(tree.all("title")) == 1
    assert tree.all("th") and all(attrs.get("scope") in ("col", "row") for attrs in tree.all("th"))
    assert len(tree.all("table")) == sum(attrs.get("class", "").startswith("scroll") for attrs in tree.all("div"))
    assert all(attrs["role"] == "img" and len(attrs["aria-label"] or "") > 30 for attrs in tree.all("svg"))
    ids = [attrs["id"] for _, attrs in tree.tags if "id" in attrs]
    assert len(ids) == len(set(ids)), "pictures that share an id take each other's shapes"


def test_its_pictures(full):
    """Four curves, the dots, three bars, the scale of two levels, and three of the level that was looked at."""
    _, tree, text = full
    assert len(tree.all("svg")) == 4 + 1 + 3 + 2 + 3
    ids = {attrs["id"] for _, attrs in tree.tags if "id" in attrs}
    referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    assert referred and referred <= ids
    pictured = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.findall(r"#[0-9a-fA-F]{6}", pictured), "a colour that does not follow the page's"
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(re.findall(r"--(\w+): #", text))


def test_nothing_is_loaded(full):
    _, tree, text = full
    assert re.search(r"https?:|//[a-z]|@import", text) is None
    assert not tree.all("script", "iframe", "object", "embed", "img")
    assert all((attrs.get("href") or "#").startswith(("#", "data:")) for _, attrs in tree.tags)
    policy = next(a["content"] for a in tree.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "script-src" not in policy


def test_what_the_user_wrote_is_text(tmp_path):
    run, other = made_up_run("O0", policy=NASTY, notes=[NASTY]), made_up_run("O2", dtype="float16")
    run.logged = other.logged = {NASTY: [(1, 0.5)]}
    look = made_up_look()
    other.looks = [
        replace(
            look, errors={NASTY: 0.2}, flushed={NASTY: [0.5, 0.5, 0.5]}, keep_fp32=[NASTY], not_finite=f"in {NASTY}"
        )
    ]
    failed = Run("O3", 0, error=f"RuntimeError: {NASTY}")
    given = Comparison(NASTY, [run, other, failed], metric=NASTY, machine={NASTY: NASTY})
    path = page.write(given, tmp_path)
    text = path.read_text(encoding="utf-8")
    tree = Tree(text)
    assert not tree.all("script", "img") and len(tree.all("style")) == 1 and not tree.open
    # Title and heading, machine (twice), policy, notes, error, what amp.inspect found (five), and the metric.
    seen = tree.text.count(NASTY.replace("\udcff", "?"))
    assert seen >= 13, f"only {seen}"
    assert any(NASTY.replace("\udcff", "?") in (attrs["aria-label"] or "") for attrs in tree.all("svg"))
    # In its pictures names are cut to what fits; a dollar is none of mathematics'.
    assert "</style><scri…ng>\"' $x_1$ \u4e2d? at the end, a dot a seed" in tree.text
    assert tree.text.count("$x_1$") == seen + 3, "the dots' title, the module's bar, and the repr in keep_fp32"


def test_json_holds_every_figure(full, tmp_path):
    given, _, text = full
    read = Comparison.from_dict(loads(dumps(given.to_dict())))
    path = page.write(read, tmp_path / "deep" / "folder")
    assert path == tmp_path / "deep" / "folder" / "report.html"
    assert path.read_text(encoding="utf-8") == text, "the page of what was read is that of what was written"
    figures = loads((path.parent / "report.json").read_text(encoding="utf-8"))
    assert dumps(figures) == dumps(given.to_dict())
    assert math.isnan(figures["runs"][7]["loss"][-1])


def test_only_failures():
    tree = Tree(page.html(Comparison("train.py", [Run(level, 0, error=f"{level} broke") for level in ("O0", "O2")])))
    assert "O0 broke" in tree.text and "O2 broke" in tree.text and not tree.all("svg")
    assert not tree.open


def test_no_run_at_all():
    given = Comparison("train.py", [])
    assert given.summary in Tree(page.html(given)).text


def test_one_level_one_seed_one_step():
    run = made_up_run("O2", steps=1, dtype="float16")
    tree = Tree(page.html(Comparison("train.py", [run])))
    assert "O2" in tree.text and tree.all("svg")


@pytest.mark.parametrize("loss", [[math.nan] * 40, [math.inf, 1.0, -math.inf, *[0.0] * 37], [-1.0] * 40, [1e300] * 40])
def test_losses_that_no_axis_holds(loss):
    runs = [made_up_run("O0"), made_up_run("O3", dtype="float16", loss=loss, scale=[math.inf] * 40)]
    given = Comparison("train.py", runs)
    several = [pictures.losses(given), pictures.finals(given), pictures.scales(given)]
    assert [len(each) for each in several] == [2, 1, 1]


def test_a_curve_has_a_gap_where_a_loss_is_not_finite():
    """Of 50 steps two are a window; the seed that ends after 40 leaves none."""
    one, other = [4.0] * 50, [2.0] * 40
    one[19] = math.inf
    curve = pictures._curve([one, other])
    assert curve.steps[0] == 2 and curve.steps[-1] == 50 and curve.not_finite.tolist() == [20]
    assert [int(step) for step in curve.steps[np.isnan(curve.mean)]] == [20, 21]
    at = dict(zip(curve.steps.tolist(), curve.mean.tolist(), strict=True))
    assert at[19] == 3.0 and at[40] == 3.0 and at[41] == 4.0
    assert curve.low[curve.steps == 30] == 2.0 and curve.high[curve.steps == 30] == 4.0


def test_the_parts_add_up_to_the_step():
    """Half of the steps wait for data, the first tenth among them, which does not count: the median waits for none."""
    run = made_up_run("O0", ms=10.0)
    run.seconds[:20] = [1.0] * 20
    run.parts["data"][:20] = [1.0] * 20
    (level,) = Comparison("train.py", [run]).levels
    split = measures.part_ms(level.runs, level.step_ms)
    assert list(split) == list(PARTS)
    assert split == pytest.approx({"data": 0.5, "forward": 2.5, "backward": 5.0, "between": 0.5, "optimizer": 1.5})


def test_what_flushes_in_words():
    """Exponents -30 to -6, as many of each: five of 25 lie below 2**-25; at 2**16 none does."""
    run = made_up_run("O2", dtype="float16")
    run.looks = [made_up_look(0), made_up_look(1)]
    (level,) = Comparison("train.py", [run]).levels
    gradients, others, errors = number_pictures.numbers(level)
    assert "from 2^-30 to 2^-6" in gradients.alt
    assert "at scale 1 20 % of them flush" in gradients.alt and "2¹⁶ 0 % of them flush" in gradients.alt
    assert "activations from 2^-30 to 2^-6" in others.alt and "last 0.2; first 0.001" in errors.alt


def test_a_long_training_makes_no_large_page():
    steps = 20_000
    run = made_up_run("O1", steps=steps, dtype="float16")
    run.loss = [1.0 + step % 7 for step in range(steps)]
    run.scale = [2.0 ** (step % 8) for step in range(steps)]
    run.skipped = [True] * steps
    given = Comparison("train.py", [run])
    assert all(len(each.svg) < 120_000 for each in (*pictures.losses(given), *pictures.scales(given)))


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (2**41, "2.05e+03 GiB")],
)
def test_sizes(count, words):
    assert wording.size(count) == words


def test_the_figures_are_written_where_a_picture_fails(tmp_path, monkeypatch):
    def fail(comparison):
        raise RuntimeError("no picture")

    monkeypatch.setattr(page.pictures, "losses", fail)
    with pytest.raises(RuntimeError, match="no picture"):
        page.write(Comparison("train.py", [made_up_run("O0"), made_up_run("O2")]), tmp_path)
    assert len(Comparison.from_dict(loads((tmp_path / "report.json").read_text())).runs) == 2
