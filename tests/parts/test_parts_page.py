"""docs/parts.md says what is in the example file, and what it tells people to write works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.outside_parts import EXAMPLE, forget_guests, outside_file

PAGE = Path(__file__).parents[2] / "docs" / "parts.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_has_the_whole_file_in_its_order() -> None:
    text = EXAMPLE.read_text()
    shown = [block.rstrip("\n") for block in blocks() if block in text + "\n"]
    assert "\n\n\n".join(shown) + "\n" == text


def test_everything_else_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outside_file(tmp_path)
    text, names = EXAMPLE.read_text(), {"__name__": "page"}
    rest = [block for block in blocks() if block not in text + "\n"]
    assert len(rest) == 6
    try:
        for block in rest:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        forget_guests()
    assert (tmp_path / "board").is_dir()
