"""Every command and every program that the documentation shows is run here, made small where it is long."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from cbdsl.cli.app import app
from cbdsl.data import cache
from cbdsl.data.catalogue import ENTRIES
from cbdsl.presets import PRESETS
from helpers import cbdsl

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALLER = ["--rounds", "1", "--workers", "12", "--set", "data.shared_scoring=50", "--model", "softmax"]

MADE_SMALL = {
    "run": SMALLER,
    "sweep": [*SMALLER, "--jobs", "1"],
    "theory": SMALLER,
    "swarm": [*SMALLER, "--workers", "3"],
    "reproduce": ["--quick", "--jobs", "2", *(f"--set={text}" for text in ("rounds=3", "workers=8", "model=softmax"))],
    "arena": [
        "--quick", "--jobs", "2", "--byzantine", "2", "--attacks", "liar", "--defences", "fedavg,cb-dsl",
        "--set", "rounds=1", "--set", "workers=8", "--set", "model=softmax",
    ],
    "study": [
        "--quick", "--jobs", "2", "--ways", "fedavg-tr,cb-dsl",
        *(f"--set={text}" for text in ("data.source=mnist", "data.partition=iid", "data.samples_per_worker=20")),
        *(f"--set={text}" for text in ("rounds=1", "workers=8", "model=softmax")),
    ],
    "bench": ["--quick", "--models", "softmax", "--workers", "3", "--scoring", "20"],
}  # fmt: skip
"""What is added to a command, so that it takes seconds."""

ONLY_READ = {
    "serve": "needs a broker on another machine; tests/deploy plays whole deployments",
    "work": "needs a broker on another machine; tests/deploy plays whole deployments",
    "watch": "serves a page until it is stopped; tests/watch has it in a browser",
    "data fetch": "downloads; tests/data takes made packages the whole way",
}
"""Commands that are not run, and why: that all their options exist is checked."""


def only_read(words: tuple[str, ...]) -> bool:
    return words[0] in ONLY_READ or " ".join(words[:2]) in ONLY_READ


def blocks(*languages: str, pages: Sequence[Path] = PAGES) -> list[str]:
    """What stands between fences in any of these languages, on any of these pages."""
    found = []
    for page in pages:
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        found += [text for language, text in fenced if language in languages]
    return found


def commands() -> list[tuple[str, ...]]:
    """The words behind `cbdsl` in every command that any page shows, also behind `cd somewhere &&`, each once."""
    lines = [line for block in blocks("", "sh", "bash", "ini") for line in block.replace("\\\n", " ").splitlines()]
    found: dict[tuple[str, ...], None] = {}
    for line in lines:
        for part in line.partition(" #")[0].split("&&"):
            words = [word.removeprefix("ExecStart=") for word in part.split()]
            if words and Path(words[0]).name == "cbdsl" and words[0] != "/etc/cbdsl":
                found[tuple(word for word in shlex.split(" ".join(words[1:])) if word != "...")] = None
    return list(found)


RUN = dict.fromkeys((*words, *MADE_SMALL.get(words[0], [])) for words in commands() if not only_read(words))


# The programs of parts.md are pieces of one file: tests/doors/test_parts_page.py runs them.
WHOLE_PROGRAMS = [page for page in PAGES if page.name != "parts.md"]


@pytest.mark.parametrize("program", blocks("python", pages=WHOLE_PROGRAMS))
def test_every_program_shown_runs(program: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"([\d.]+)%", done.stdout)[0]) > 80


def expanded(word: str, folder: Path) -> list[str]:
    """A word as a shell would pass it on."""
    return [str(path) for path in sorted(folder.glob(word))] if "*" in word else [word]


@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_every_command_shown_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    if words[0] == "provision" and {"--add", "--revoke", "--renew", "--largest-model"} & set(words):
        assert cbdsl("provision", "keys", "--workers", "3", cwd=tmp_path).returncode == 0
    if words[0] == "compare":
        made = [*MADE_SMALL["sweep"], "--over", "seed=0,1", "--out", "sweep"]
        assert cbdsl("sweep", *made, cwd=tmp_path).returncode == 0
    if words[0] in {"predict", "export"}:
        assert cbdsl("run", *SMALLER, "--out", "runs/mine", cwd=tmp_path).returncode == 0
        np.savez(tmp_path / "x.npz", features=np.zeros((3, 28, 28), np.uint8), labels=np.arange(3))
    if words[0] == "run" and words[1] in PRESETS:
        source = PRESETS[words[1]].data.source
        if source in ENTRIES and not cache.place(source).is_file():
            pytest.skip(f"fetch it first: cbdsl data fetch {source}")
    done = cbdsl(*(each for word in words for each in expanded(word, tmp_path)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if words[0] in {"run", "swarm"}:
        assert "accuracy" in done.stdout


@pytest.mark.parametrize("words", [words for words in commands() if only_read(words)], ids=" ".join)
def test_every_option_shown_exists(words: tuple[str, ...]) -> None:
    command, rest = get_command(app), list(words)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    command.make_context(words[0], rest)  # reads the words, and fails on one that it does not know


def test_the_pages_show_every_command_there_is() -> None:
    shown = {words[0] for words in commands()} | set(re.findall(r"`cbdsl (\w+)", "".join(map(Path.read_text, PAGES))))
    assert set(get_command(app).commands) <= shown  # type: ignore[attr-defined]


def test_the_readme_shows_its_two_commands_and_the_makefile_has_them() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("run", "test"):
        assert f"make {target}" in (ROOT / "README.md").read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_every_file_the_readme_names_exists() -> None:
    for name in re.findall(r"`(src/[\w/.]+)`|\]\((docs/[\w.]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / (name[0] or name[1])).exists(), name
