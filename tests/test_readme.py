"""Every command and every program that the documentation shows is run here, made small where it is long."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALLER = ["--rounds", "1", "--workers", "12", "--set", "data.shared_scoring=50", "--model", "softmax"]


def blocks(language: str) -> list[str]:
    found = [re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE) for page in PAGES]
    return [block for page in found for block in page]


def commands(program: str) -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("") for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith(program)})


@pytest.mark.parametrize("program", blocks("python"))
def test_every_program_shown_runs(program: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"([\d.]+)%", done.stdout)[0]) > 80


@pytest.mark.parametrize("command", commands("cbdsl run"))
def test_every_run_shown_is_understood(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "cbdsl", *words, *SMALLER], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_the_readme_shows_its_two_commands_and_the_makefile_has_them() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("run", "test"):
        assert f"make {target}" in (ROOT / "README.md").read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_every_file_the_readme_names_exists() -> None:
    for name in re.findall(r"`(src/[\w/.]+)`|\]\((docs/[\w.]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / (name[0] or name[1])).exists(), name
