"""The report's page in a browser: on a desktop and on a phone, light and dark."""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compared_runs import made_up_run

from amp_patch.comparison import page
from amp_patch.comparison.comparison import Comparison
from amp_patch.diagnose.recording.run import Run

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
)
# The browser wants its pipes as 3 and 4. A preexec_fn is not for a process with threads, such as torch's.
_LAUNCHER = (
    "import os, sys; r, w, *command = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4); "
    "os.execvp(command[0], command)"
)


def find() -> str | None:
    """Return the path of an installed Chromium or Chrome."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name)) is not None), None)


class Chromium:
    """One browser with one page. `events` has the events since the last `open`."""

    def __init__(self, path: str, profile: Path, timeout: float = 30.0) -> None:
        self.timeout = timeout
        self.events: list[dict[str, Any]] = []
        self._buffer = b""
        self._last = 0
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Numbers above those that the launcher writes to.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        command = [path, *_FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCHER, *map(str, theirs), *command],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in theirs:
            os.close(end)
        self._session: str | None = None
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol; return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str) -> None:
        """Load a page, and wait until it has."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def view(self, width: int, height: int, *, mobile: bool = False, scheme: str = "light", media: str = "") -> None:
        """Set the width of the window in CSS pixels, and the light or dark scheme of the system."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression on the page. The page's content policy does not apply to it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", "an exception"))
        return answer["result"].get("value")

    def requested(self) -> list[str]:
        """Return the URLs that the page has requested."""
        requests = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in requests]

    def complaints(self) -> list[str]:
        """Return the messages on the page's console."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def close(self) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(self.timeout)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        finally:
            os.close(self._in)
            os.close(self._out)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + self.timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise RuntimeError(f"Chromium said nothing for {self.timeout:g} seconds")
            piece = os.read(self._in, 1 << 16)
            if not piece:
                raise RuntimeError(f"Chromium ended, with code {self._process.wait()}")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


BROWSER = find()
WANTED = bool(os.environ.get("CI") or os.environ.get("AMP_PATCH_REQUIRE_CHROMIUM"))
pytestmark = [
    pytest.mark.program,
    pytest.mark.skipif(
        BROWSER is None and not WANTED,
        reason="no Chromium here (apt-get install chromium); with CI set this is an error",
    ),
]

VIEWS = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844, "mobile": True}}
LAYOUT = (Path(__file__).parent / "layout.js").read_text()


UNFOLD = "document.querySelectorAll('details').forEach(each => { each.open = true })"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert BROWSER is not None, "no Chromium here, and it is required: apt-get install chromium"
    started = Chromium(BROWSER, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every kind of page: many levels with everything on it and long names, one level alone, and nothing but errors."""
    runs = []
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        dtype = None if level == "O0" else "bfloat16" if level in ("O4", "O5") else "float16"
        for seed in range(5):
            final = 1 + seed / 64 + (2.0 if level == "O3" else 0.0)
            runs.append(made_up_run(level, seed, dtype=dtype, final=final, ms=12345.678, state=3 * 2**40))
    runs[16].loss[30:] = [math.nan] * 10
    runs.append(Run("O2", 7, dtype="float16", error="RuntimeError: " + "x" * 120 + " CUDA out of memory. " * 8))
    machine = {"cpu": "a processor with a long name " * 8, "torch": "2.13.0"}
    comparisons = {
        "many": Comparison("a/long/path/to/" + "train_" * 12 + ".py", runs, machine=machine),
        "alone": Comparison("train.py", [made_up_run("O1", dtype="float16")]),
        "failed": Comparison("train.py", [Run(level, 0, error="E" * 200) for level in ("O0", "O2")]),
    }
    folder = tmp_path_factory.mktemp("reports")
    return {name: page.write(given, folder / name) for name, given in comparisons.items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", [*VIEWS])
@pytest.mark.parametrize(("report", "pictures"), [("many", 1), ("alone", 1), ("failed", 0)])
def test_a_page_has_no_layout_faults_on_each_screen(browser, reports, report, pictures, view, scheme):
    browser.view(**VIEWS[view], scheme=scheme)
    url = reports[report].as_uri()
    browser.open(url)
    if view == "desk":
        assert browser.evaluate("document.documentElement.scrollHeight") < 1800, (
            "a screen, and the table: six levels, five seeds"
        )
    browser.evaluate(UNFOLD)
    assert VIEWS[view]["width"] - 20 <= browser.evaluate("document.documentElement.clientWidth") <= VIEWS[view]["width"]
    assert browser.evaluate(LAYOUT + "faults()") == []
    shown = browser.evaluate(LAYOUT + "pictures()")
    assert len(shown) == pictures
    for each in shown:
        assert each["shown"] and each["complete"] and each["drawn"] > 1, each["name"]
        assert 270 <= each["width"] <= 620 and each["height"] > 120, each["name"]
    assert browser.requested() == [url]
    assert browser.complaints() == []
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]


@pytest.mark.parametrize("width", [1280, 700, 400])
def test_a_dotted_line_crosses_no_number(browser, width, tmp_path):
    shares = (0.3, 0.43, 0.5, 0.58, 0.7, 0.83, 0.96, 1.0, 1.04, 1.3)
    runs = [made_up_run("O0", final=1.0), made_up_run("O0", 1, final=1.5)]
    for index, part in enumerate(shares):
        name = ("O1", "O2", "O3", "O4", "O5")[index % 5]
        dtype = "float16" if index < 5 else "bfloat16"
        runs += [made_up_run(name, seed, dtype=dtype, ms=10 / part, peak_memory=int(part * 2**20)) for seed in (0, 1)]
    browser.view(width, 900)
    browser.open(page.write(Comparison("train.py", runs), tmp_path).as_uri())
    assert browser.evaluate("document.querySelectorAll('.row > svg line[stroke-dasharray]').length") == 22
    assert browser.evaluate(LAYOUT + "struck()") == []
    line = "document.querySelector('.row > svg line[stroke-dasharray]')"
    browser.evaluate(f"{line}.setAttribute('x1', '80%'); {line}.setAttribute('x2', '80%')")
    assert browser.evaluate(LAYOUT + "struck()") == ["1.00x"], "it can fail"


@pytest.mark.parametrize("mobile", [False, True])
def test_the_table_scrolls_at_400_pixels_and_the_page_does_not(browser, reports, mobile):
    browser.view(400, 800, mobile=mobile)
    browser.open(reports["many"].as_uri())
    browser.evaluate(UNFOLD)
    assert browser.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.scroll')].map(e => (e.scrollLeft = 9999, [e.scrollWidth, e.clientWidth,"
        " e.scrollLeft, e.querySelector('td:last-child').getBoundingClientRect().right]))"
    )
    ((whole, seen, moved, right),) = boxes
    assert whole > seen and moved >= whole - seen - 1 and right <= 400, "the last column comes into view"


WIDE = "<div style='width: 2000px; height: 9px'>"


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (f"document.body.insertAdjacentHTML('beforeend', `{WIDE}`)", "wide, the window"),
        (
            "document.querySelector('h1').style.cssText = 'white-space: nowrap; overflow: hidden; width: 40px'",
            "cut off",
        ),
        ("document.querySelector('p').style.cssText = 'height: 5px; overflow: hidden'", "cut off below"),
        ("document.querySelector('h1').style.cssText = 'position: relative; left: 1260px'", "beyond the window"),
        ("document.querySelector('figure > svg').setAttribute('viewBox', '60 0 420 250')", "cut off by its picture"),
        ("document.querySelector('figure > svg').style.width = '100px'", "pixels small"),
        ("document.querySelector('h1').style.color = 'var(--line)'", "contrast"),
        ("document.querySelector('h1').style.display = 'none'", "not shown"),
    ],
)
def test_the_checks_find_a_planted_layout_fault(browser, reports, planted, found):
    """The checks can fail: each fault is planted alone in a page without faults."""
    browser.view(**VIEWS["desk"])
    browser.open(reports["alone"].as_uri())
    browser.evaluate(UNFOLD)
    browser.evaluate(f"{{ {planted} }}")
    faults = browser.evaluate(LAYOUT + "faults()")
    assert any(found in fault for fault in faults), faults
