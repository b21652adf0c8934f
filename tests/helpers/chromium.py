"""A headless Chromium, controlled through the DevTools protocol with the standard library alone.

Messages are JSON, each ended by a NUL byte, over two pipes that the browser finds as file descriptors 3 and 4:
https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
