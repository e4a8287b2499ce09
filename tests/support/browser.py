"""A real browser for tests of pages."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import pytest

FRAME = """\
<title></title>
<body style="margin:0">
<iframe style="border:0;width:{width}px;height:2000px" srcdoc="{page}"></iframe>
<script>
onload = () => {{ document.title = frames[0].document.documentElement.scrollWidth + " of " + frames[0].innerWidth }}
</script>
</body>
"""


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


def browse(address: str, folder: Path, *options: str) -> str:
    """Open an address in a headless browser; what it prints."""
    command = browser_command(folder, *options, address)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


class Tab:
    """A page in a browser that stays open: scripts can be run in it, and pictures taken. Spoken to over a pipe."""

    def __init__(self, ask: int, answers: int) -> None:
        self._ask, self._answers, self._number, self._rest = ask, answers, 0, b""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    _session = ""

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
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
def tab(folder: Path, width: int = 1300, height: int = 1700, dark: bool = False) -> Iterator[Tab]:
    """A browser with one page, closed at the end."""
    command = browser_command(folder, "--remote-debugging-pipe")
    (theirs_in, ask), (answers, theirs_out) = os.pipe(), os.pipe()
    ends = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs_in, theirs_out)]

    process = subprocess.Popen(
        [sys.executable, "-c", PLACED, *map(str, ends), *command],
        stderr=subprocess.DEVNULL, pass_fds=ends,
    )  # fmt: skip
    for one in (theirs_in, theirs_out, *ends):
        os.close(one)
    try:
        opened = Tab(ask, answers)
        opened.look(width, height, dark)
        yield opened
    finally:
        process.kill()
        process.wait()
        os.close(ask)
        os.close(answers)


def widths(page: Path, folder: Path, width: int) -> tuple[int, int]:
    """How wide a page is laid out on a screen of some width, and how wide that screen is.

    The page is shown in a frame, because a browser's window has a least width, and measured from outside, because the
    page itself allows no script.
    """
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width, page=escape(page.read_text(encoding="utf-8"))), encoding="utf-8")
    shown = browse(frame.as_uri(), folder, "--dump-dom", "--window-size=1400,2000")
    found = re.search(r"<title>(\d+) of (\d+)</title>", shown)
    assert found is not None, shown[:200]
    return int(found[1]), int(found[2])
