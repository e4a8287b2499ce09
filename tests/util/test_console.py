from __future__ import annotations

import time

import pytest

from cbdsl.util.console import ProgressLine


def test_a_log_gets_fewer_and_fewer_lines_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with ProgressLine("rounds", log_seconds=30.0) as line:
        for second in range(4000):
            now = float(second)
            line.show(second, 4000)
        for _ in range(5):
            line.show(4000, 4000)
    lines = [text.split()[1] for text in capsys.readouterr().err.splitlines()]
    assert lines == ["31/4000", "92/4000", "213/4000", "454/4000", *(f"{454 + 481 + 601 * n}/4000" for n in range(6)),
                     "4000/4000"]  # fmt: skip
