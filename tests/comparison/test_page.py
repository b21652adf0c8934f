"""The report's page as text: its content, and user text that stays text."""

from __future__ import annotations

import math
import re
import runpy
import sys
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from compared_runs import made_up_run
from paths import BENCHMARKS, ROOT

from amp_patch.comparison import drawing, losses, page
from amp_patch.comparison.comparison import Comparison
from amp_patch.diagnose import wording
from amp_patch.diagnose.recording.run import Run, dumps, loads

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
    """Return a comparison whose levels scale, diverged and failed, with its page."""
    runs = [
        made_up_run(level, seed, dtype=None if level == "O0" else "float16", final=1 + seed / 8)
        for level in ("O0", "O1", "O2", "O3")
        for seed in (0, 1)
    ]
    runs[7].loss[30:] = [math.nan] * 10
    runs.append(Run("O4", 0, dtype="bfloat16", error="ValueError: this does not work"))
    given = Comparison("train.py", runs, machine=MACHINE)
    text = page.html(given)
    return given, Tree(text), text


def test_a_page_is_the_card_a_table_and_the_losses(full):
    given, tree, text = full
    for words in (given.title, MACHINE["torch"], "ValueError: this does not work"):
        assert words in tree.text
    for level in given.levels:
        assert level.verdict.reason.removeprefix("failed with ") in tree.text
    at = 0
    for title in ("Stay with O0 (FP32)", "gap to O0, same seeds", "Training loss", "What failed"):
        at = tree.text.index(title, at)
    heads = re.findall(r'<th scope="col"[^>]*>([^<]*)', text)
    assert heads == [
        "level",
        "finding",
        "final loss",
        "gap to O0, same seeds",
        "step, ms",
        "memory, MiB",
        "skipped steps",
    ]
    assert len(tree.all("table")) == len(tree.all("figure")) == 1
    rows = re.findall(r'<tr><th scope="row">(.*?)</tr>', text)
    assert [row.split("<")[0] for row in rows] == [level.name for level in given.levels]
    assert {row.count("<td") for row in rows} == {len(heads) - 1}


def test_a_page_is_valid_and_accessible_html(full):
    _, tree, _ = full
    assert not tree.open, "unclosed tags"
    headings = [int(tag[1]) for tag, _ in tree.tags if tag in ("h1", "h2", "h3")]
    assert headings.count(1) == 1 and headings[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    assert tree.all("html")[0]["lang"] == "en" and len(tree.all("title")) == 1
    assert tree.all("th") and all(attrs.get("scope") in ("col", "row") for attrs in tree.all("th"))
    assert len(tree.all("table")) == sum(attrs.get("class", "").startswith("scroll") for attrs in tree.all("div"))
    pictured = [attrs for _, attrs in tree.tags if attrs.get("role") == "img"]
    assert len(pictured) == 1 + len(tree.all("figure"))
    assert all(len(attrs["aria-label"] or "") > 30 for attrs in pictured)
    ids = [attrs["id"] for _, attrs in tree.tags if "id" in attrs]
    assert len(ids) == len(set(ids)), "pictures that share an id take each other's shapes"


def test_a_picture_has_a_line_per_level_in_page_colours(full):
    given, tree, text = full
    drawn, key = losses.picture(given)
    assert [*key] == ["O0", "O1 FP16", "O2 FP16", "O3 FP16"], "O4 has no loss"
    assert len(set(key.values())) == 4 and all(name in tree.text.partition("Training loss")[2] for name in key)
    assert drawn.count("<path") == 1 + len(key) and "fill: var(--band)" in drawn
    pictured = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.findall(r"#[0-9a-fA-F]{6}", pictured), "a colour that does not follow the page's"
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(re.findall(r"--(\w+): #", text))


def test_a_card_names_the_level_its_gains_the_reason_and_the_certainty():
    runs = [
        *(made_up_run("O0", seed, final=1 + seed / 4, peak_memory=2**20) for seed in range(3)),
        *(made_up_run("O4", seed, dtype="bfloat16", final=1.25, ms=5, peak_memory=7 * 2**17) for seed in range(3)),
        *(made_up_run("O3", seed, final=5 + seed / 4, ms=2) for seed in range(3)),
    ]
    text = page.html(Comparison("train.py", runs, command="--device cpu 'my train.py' --lr 1"))
    tree = Tree(text)
    for words in (
        "\nUse O4 (BF16)\n",
        "2.0x faster, 12 % less memory, same loss over 3 seeds",
        "The fastest level that is as good as O0.",
        "Gap to O0 0 (0 %, 95 %: -50 to +50 %): the runs have decorrelated, it tells no more than the spread. ",
        "O0's own seeds lie 50 % apart in loss. Faster with each of 3 seeds: 2.00x.",
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O4")',
        "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()",
        "AMP_PATCH_OPT_LEVEL=O4 python -m amp_patch run --device cpu 'my train.py' --lr 1",
    ):
        assert tree.text.count(words) == 1, words
    assert re.findall(r'<div class="row (\w+)"><div><b>(\w+)</b>', text) == [
        ("base", "O0"),
        ("best", "O4"),
        ("bad", "O3"),
    ]
    assert "do not use: worse" in tree.text
    assert '<div class="title best"><h1>Use O4 (BF16)</h1>' in text
    undecided = page.html(Comparison("train.py", [made_up_run("O0"), made_up_run("O2", final=1.5)]))
    assert "<h1>Stay with O0 (FP32) for now</h1>" in undecided and 'class="best"' not in undecided


def test_a_page_loads_nothing(full):
    _, tree, text = full
    assert re.search(r"https?:|//[a-z]|@import", text) is None
    assert not tree.all("script", "iframe", "object", "embed", "img")
    assert all((attrs.get("href") or "#").startswith(("#", "data:")) for _, attrs in tree.tags)
    policy = next(a["content"] for a in tree.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "script-src" not in policy


def test_user_text_is_escaped(tmp_path):
    run, other = made_up_run("O0", notes=[NASTY]), made_up_run("O2", dtype="float16")
    run.logged = other.logged = {NASTY: [(1, 0.5)]}
    failed = Run("O3", 0, error=f"RuntimeError: {NASTY}")
    given = Comparison(NASTY, [run, other, failed], metric=NASTY, machine={"cpu": NASTY, "torch": NASTY})
    path = page.write(given, tmp_path)
    text = path.read_text(encoding="utf-8")
    tree = Tree(text)
    assert not tree.all("script", "img") and len(tree.all("style")) == 1 and not tree.open
    # Title (twice), machine, note, error (three times), metric (four times).
    seen = tree.text.count(NASTY.replace("\udcff", "?"))
    assert seen >= 9, f"only {seen}"


def test_a_report_in_json_restores_the_page(full, tmp_path):
    given, _, text = full
    read = Comparison.from_dict(loads(dumps(given.to_dict())))
    path = page.write(read, tmp_path / "deep" / "folder")
    assert path == tmp_path / "deep" / "folder" / "report.html"
    assert path.read_text(encoding="utf-8") == text, "the page of what was read is that of what was written"
    figures = loads((path.parent / "report.json").read_text(encoding="utf-8"))
    assert dumps(figures) == dumps(given.to_dict())
    assert math.isnan(figures["runs"][7]["loss"][-1])


def test_a_page_of_failed_runs_shows_their_errors():
    tree = Tree(page.html(Comparison("train.py", [Run(level, 0, error=f"{level} broke") for level in ("O0", "O2")])))
    assert "O0 broke" in tree.text and "O2 broke" in tree.text and not tree.all("svg")
    assert not tree.open


def test_a_long_error_is_short_in_the_table_and_whole_below_it():
    error = "RuntimeError: " + "no " * 100 + "more"
    runs = [made_up_run("O0"), made_up_run("O2"), Run("O2", 1, error=error), Run("O3", 0, error=error)]
    text = page.html(Comparison("train.py", runs))
    assert text.count(error) == 2 and text.index("What failed") < text.index(error), "of O2 and of O3"
    assert text.count("no no ...") >= 2, "the rows of O2 and of O3"


@pytest.mark.parametrize("loss", [[math.nan] * 40, [math.inf, 1.0, -math.inf, *[0.0] * 37], [-1.0] * 40, [1e300] * 40])
def test_losses_beyond_any_axis_still_give_a_picture(loss):
    runs = [made_up_run("O0"), made_up_run("O3", dtype="float16", loss=loss, scale=[math.inf] * 40)]
    given = Comparison("train.py", runs)
    drawn, key = losses.picture(given)
    assert [*key] == ["O0", "O3 FP16"] and not re.search(r"nan|inf|e\+", "".join(re.findall(r' d="[^"]*"', drawn)))
    assert drawn in page.html(given)


def test_a_curve_is_the_mean_of_its_seeds_and_has_a_gap_at_a_loss_that_is_not_finite():
    """With 50 steps, the window is two. After step 40, where one seed ends, the mean is the other seed's."""
    one, other = [4.0] * 50, [2.0] * 40
    one[19] = math.inf
    at = dict(losses.smooth([one, other], 50))
    assert [*at] == [*range(2, 51)]
    assert [step for step, found in at.items() if not found] == [20, 21]
    assert at[19] == at[40] == [4.0, 2.0] and at[41] == [4.0]
    drawn, _ = losses.picture(Comparison("train.py", [made_up_run("O2", loss=one), made_up_run("O2", 1, loss=other)]))
    assert re.findall(r' d="([^"]*)"', drawn)[-1].count("M") == 2, "two pieces"


@pytest.mark.parametrize(
    ("loss", "labels"),
    [([4.0, 3.0, 2.0, 1.0], ["1", "2", "3", "4"]), ([1000.0, 100.0, 10.0, 1.0], ["1", "10", "1e+02", "1e+03"])],
)
def test_losses_that_are_far_apart_have_a_logarithmic_axis(loss, labels):
    """The curve of equal steps, or of equal factors, is a straight line."""
    drawn, _ = losses.picture(Comparison("train.py", [made_up_run("O2", steps=4, loss=loss)]))
    assert re.findall(r'text-anchor="end">([^<]*)<', drawn) == labels
    *_, path = re.findall(r' d="([^"]*)"', drawn)
    heights = [float(point.split()[1]) for point in re.split("[ML]", path) if point]
    assert [b - a for a, b in pairwise(heights)] == pytest.approx([(heights[-1] - heights[0]) / 3] * 3, abs=0.2)
    assert heights == sorted(heights), "a lower loss is lower in the picture"


def test_a_long_training_has_a_small_picture():
    run = made_up_run("O1", steps=20_000, dtype="float16", loss=[1.0 + step % 7 for step in range(20_000)])
    drawn, _ = losses.picture(Comparison("train.py", [run]))
    assert re.findall(r' d="([^"]*)"', drawn)[-1].count("L") == 199


@pytest.mark.parametrize(
    ("counts", "unit", "words"),
    [
        ([], "bytes", []),
        ([0, 1023], "bytes", ["0", "1,023"]),
        ([512, 1536], "KiB", ["0.5", "1.5"]),
        ([2**20, 3 * 2**30], "GiB", ["under 0.001", "3"]),
        ([2**41], "GiB", ["2,048"]),
    ],
)
def test_all_sizes_of_a_column_have_one_unit(counts, unit, words):
    assert wording.sizes(counts) == (unit, words)


def test_a_report_writes_its_figures_even_if_a_picture_fails(tmp_path, monkeypatch):
    def fail(comparison):
        raise RuntimeError("no picture")

    monkeypatch.setattr(losses, "picture", fail)
    with pytest.raises(RuntimeError, match="no picture"):
        page.write(Comparison("train.py", [made_up_run("O0"), made_up_run("O2")]), tmp_path)
    assert len(Comparison.from_dict(loads((tmp_path / "report.json").read_text())).runs) == 2


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0, 1, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0, 100, ["0", "25", "50", "75", "100"]),
        (-0.3, 0.3, ["-0.2", "0.0", "0.2"]),
        (2.813, 3.004, ["2.85", "2.90", "2.95", "3.00"]),
        (1e-7, 3e-7, ["1e-07", "1.5e-07", "2e-07", "2.5e-07", "3e-07"]),
        (2, 2, ["2"]),
    ],
)
def test_axis_labels_are_round_and_distinct(low, high, labels):
    assert [*drawing.ticks(low, high).values()] == labels


@pytest.mark.parametrize(
    ("kind", "told", "said"),
    [
        ("bf16", {"lacks": "float16"}, "With BF16 arithmetic: A <Processor>, one thread, torch 2.13.0"),
        (
            "no-bf16",
            {"lacks": "bfloat16 float16", "limited": "ONEDNN_MAX_CPU_ISA=AVX2"},
            "Without BF16 arithmetic: A <Processor>, played by ONEDNN_MAX_CPU_ISA=AVX2, one thread, torch 2.13.0",
        ),
    ],
)
def test_the_readme_shows_the_cards_of_reports(kind, told, said, tmp_path, monkeypatch):
    runs = [made_up_run("O0", seed, final=1 + seed / 4, activations=8000, device="cpu") for seed in range(3)]
    runs += [made_up_run("O4", seed, final=1.25, ms=5, activations=0, device="cpu") for seed in range(3)]
    machine = {"cpu": "A <Processor>", "torch": "2.13.0+cpu", "threads": "1", **told}
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(readme)
    page.write(Comparison("train.py", runs, machine=machine), tmp_path)
    argv = ["demo_picture.py", "--from", str(tmp_path / "report.json"), "--docs", str(tmp_path)]
    argv += ["--readme", str(tmp_path / "README.md")]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.syspath_prepend(BENCHMARKS)
    ran = runpy.run_path(str(BENCHMARKS / "demo_picture.py"), run_name="__main__")
    assert ran["with_pictures"](readme, ROOT / "docs") == readme, "README.md shows the pictures that are in docs/"
    shown = re.findall(r'"docs/(demo-[\w-]+\.svg)"', (tmp_path / "README.md").read_text())
    assert shown == [f"demo-{kind}-dark.svg", f"demo-{kind}-light.svg"]
    for name, background in zip(shown, ("#1b2026", "#f6f7f9"), strict=True):
        text = (tmp_path / name).read_text()
        words = "".join(ElementTree.fromstring(text).itertext())
        assert "Use O4 (FP16): 2.0x faster, 33 % less memory, same loss over 3 seeds" in words
        assert said in words
        assert "var(" not in text and background in text
        for head, width in (("lower is better; grey: margin 0.2 %", 250), ("weights", 400)):
            assert words.count(head) == 1 and len(head) * 6.5 < width, "it does not reach beyond the card"
