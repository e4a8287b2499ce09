"""A real browser for tests of pages."""

from __future__ import annotations

import atexit
import base64
import fcntl
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PLACED = """\
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts a browser with our ends of the pipes where it expects them."""


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("NO BROWSER: install Chromium to run this test (apt-get install chromium)")
    return found


def browser_command(folder: Path, *words: str) -> list[str]:
    return [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", *words,
    ]  # fmt: skip


class Browser:
    """A headless browser, controlled over a pipe."""

    def __init__(self, folder: Path) -> None:
        command = browser_command(folder, "--remote-debugging-pipe")
        (theirs_in, self._ask), (self._answers, theirs_out) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PLACED, *map(str, ends), *command], stderr=subprocess.DEVNULL, pass_fds=ends
        )
        for one in (theirs_in, theirs_out, *ends):
            os.close(one)
        self._number, self._rest = 0, b""

    def command(self, session: str, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._answers, 2**16)
            assert read, "the browser is gone"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@functools.cache
def browser() -> Browser:
    """The browser of this process, which all tests share."""
    chromium()  # skips the test if there is none
    folder = Path(tempfile.mkdtemp(prefix="browser-"))
    started = Browser(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(started.close)  # called first
    return started


class Tab:
    """A page in the browser: scripts can be run in it, and pictures taken."""

    def __init__(self) -> None:
        self.target: str = browser().command("", "Target.createTarget", url="about:blank")["targetId"]
        attached = browser().command("", "Target.attachToTarget", targetId=self.target, flatten=True)
        self._session: str = attached["sessionId"]

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401
        return browser().command(self._session, method, **parameters)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window, and whether its user likes dark pages."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.command("Page.enable")
        self.command("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && document.body !== null")

    def value(self, script: str) -> Any:  # noqa: ANN401
        """What a script comes to in the page."""
        done = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60) -> Any:  # noqa: ANN401
        """The value of a script, once it is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(script)):
            assert time.monotonic() < deadline, (
                f"{script} did not come to pass: {self.value('document.body.innerText')}"
            )
            time.sleep(0.05)
        return found

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def tab(width: int = 1300, height: int = 1700, dark: bool = False) -> Iterator[Tab]:
    """An empty page, closed at the end."""
    opened = Tab()
    opened.look(width, height, dark)
    try:
        yield opened
    finally:
        browser().command("", "Target.closeTarget", targetId=opened.target)


def widths(page: Path, width: int) -> tuple[int, int]:
    """How wide a page is laid out on a screen of some width, and how wide that screen is."""
    with tab(width, 900) as shown:
        shown.open(page.as_uri())
        return shown.value("document.documentElement.scrollWidth"), shown.value("innerWidth")
