"""A real browser for tests of pages."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

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


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("NO BROWSER: install Chromium to run this test (apt-get install chromium)")
    return found


def browse(address: str, folder: Path, *options: str) -> str:
    """Open an address in a headless browser; what it prints."""
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", *options, address,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


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
