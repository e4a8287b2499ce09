"""Every command and every program that the documentation shows is run here, made small where it is long."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from cbdsl.cli.app import app
from cbdsl.data import download
from cbdsl.data.catalogue import ENTRIES
from cbdsl.presets import PRESETS
from support.helpers import cbdsl
from support.shared_folder import shared_folder

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SMALLER = ["--rounds", "1", "--workers", "12", "--set", "data.shared_scoring=50", "--model", "softmax"]

MADE_SMALL = {
    "run": SMALLER,
    "run population": ["--rounds", "1", "--participation", "3", "--model", "softmax", "--no-baseline"],
    "sweep": [*SMALLER, "--jobs", "1"],
    "theory": SMALLER,
    "swarm": [*SMALLER, "--workers", "3"],
    "reproduce": ["--quick", "--jobs", "1", *(f"--set={text}" for text in ("rounds=3", "workers=8", "model=softmax"))],
    "arena": [
        "--quick", "--jobs", "1", "--byzantine", "2", "--attacks", "liar", "--defences", "fedavg,cb-dsl",
        "--set", "rounds=1", "--set", "workers=8", "--set", "model=softmax",
    ],
    "study": [
        "--quick", "--jobs", "1", "--ways", "fedavg-tr,cb-dsl",
        *(f"--set={text}" for text in ("data.source=mnist", "data.partition=iid", "data.samples_per_worker=20")),
        *(f"--set={text}" for text in ("rounds=1", "workers=8", "model=softmax")),
    ],
    "study budget": ["--data", "iid", "--jobs", "1", "--set=model=softmax", "--set=workers=4"],
    "tune": [*SMALLER, "--budget", "2", "--confirm", "1", "--jobs", "1"],
    "generate": ["--passes", "1", "--workers", "40", "--samples", "600", "--scoring", "50"],
    "bench": ["--quick", "--models", "softmax", "--workers", "3", "--scoring", "20"],
}  # fmt: skip
"""What is added to a command, so that it takes seconds."""

ONLY_READ = {
    "serve": "needs a broker on another machine; tests/deploy plays whole deployments",
    "work": "needs a broker on another machine; tests/deploy plays whole deployments",
    "doctor --broker": "needs a broker on another machine; tests/cli/test_doctor.py has real ones",
    "watch": "serves a page until it is stopped; tests/watch has it in a browser",
    "data fetch": "downloads; tests/data takes made packages the whole way",
    "--on auto": "needs a cluster that is there; tests/swarms/test_ray.py makes one",
}
"""Commands that are not run, and why: that all their options exist is checked."""


def only_read(words: tuple[str, ...]) -> bool:
    pairs = {" ".join(pair) for pair in pairwise(words)}
    return words[0] in ONLY_READ or bool(pairs & ONLY_READ.keys())


def blocks(*languages: str, pages: Sequence[Path] = PAGES) -> list[str]:
    """What stands between fences in any of these languages, on any of these pages."""
    found = []
    for page in pages:
        fenced = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
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


def made_small(words: tuple[str, ...]) -> tuple[str, ...]:
    """A command that takes seconds; the model that it names stays."""
    kinds = [f"{words[0]} {word}" for word in words[1:] if f"{words[0]} {word}" in MADE_SMALL]
    smaller = MADE_SMALL.get((kinds or [words[0]])[0], [])
    return (*words, *(smaller[:-2] if "--model" in words and smaller == SMALLER else smaller))


RUN = dict.fromkeys(made_small(words) for words in commands() if not only_read(words))


# The programs of parts.md are pieces of one file: tests/doors/test_parts_page.py runs them.
PROGRAMS = {
    page: "\n".join(blocks("python", pages=[page]))
    for page in PAGES
    if page.name != "parts.md" and blocks("python", pages=[page])
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.name)
def test_every_program_shown_runs(page: Path, tmp_path: Path) -> None:
    """The programs of one page are run one after the other, in one process; the first accuracy printed is good."""
    command = [sys.executable, "-c", PROGRAMS[page]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if "%}" in PROGRAMS[page]:
        assert float(re.findall(r"([\d.]+)%", done.stdout)[0]) > 80


def expanded(word: str, folder: Path) -> list[str]:
    """A word as a shell would pass it on."""
    return [str(path) for path in sorted(folder.glob(word))] if "*" in word else [word]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `runs/mine`."""

    def run(folder: Path) -> None:
        assert cbdsl("run", *SMALLER, "--out", "runs/mine", cwd=folder).returncode == 0

    return shared_folder(tmp_path_factory, "finished-run", run)


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the programs of data.md write."""

    def write(folder: Path) -> None:
        subprocess.run([sys.executable, "-c", PROGRAMS[ROOT / "docs" / "data.md"]], cwd=folder, check=True)

    return shared_folder(tmp_path_factory, "own-data", write)


def write_tables(folder: Path) -> None:
    """Write the tables that pages name: one of numbers, and one with a column of text."""
    rows = np.random.default_rng(0).uniform(size=(900, 3))
    np.savetxt(folder / "sensors.csv", rows, delimiter=",", header="heat,wind,load", comments="")
    lines = [f"{heat},{'hot' if heat > 0.5 else 'cold'}\n" for heat in rows[:, 0]]
    (folder / "states.csv").write_text("heat,state\n" + "".join(lines))


@pytest.mark.slow
@pytest.mark.parametrize("words", RUN, ids=" ".join)
def test_every_command_shown_runs(words: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if words[0] == "provision" and {"--add", "--revoke", "--renew", "--largest-model"} & set(words):
        assert cbdsl("provision", "keys", "--workers", "3", cwd=tmp_path).returncode == 0
    if words[0] == "compare":
        made = [*MADE_SMALL["sweep"], "--over", "seed=0,1", "--out", "sweep"]
        assert cbdsl("sweep", *made, cwd=tmp_path).returncode == 0
    if words[0] in {"audit", "predict", "export"}:
        shutil.copytree(request.getfixturevalue("finished_run"), tmp_path, dirs_exist_ok=True)
        np.savez(tmp_path / "x.npz", features=np.zeros((3, 28, 28), np.uint8), labels=np.arange(3))
    if "--init" in words and "runs/alone" in words:
        shutil.copytree(request.getfixturevalue("finished_run") / "runs" / "mine", tmp_path / "runs" / "alone")
    for file in (word.partition("=")[2] for word in words if word.startswith("data.shared_source=")):
        out = str(Path(file).parent)
        assert cbdsl("generate", "paper-iid", *MADE_SMALL["generate"], "--out", out, cwd=tmp_path).returncode == 0
    if {"sensors.csv", "states.csv"} & set(words):
        write_tables(tmp_path)
    if "own.npz" in words:
        shutil.copy(request.getfixturevalue("own_data") / "own.npz", tmp_path)
    if "my_parts.py" in words:
        shutil.copy(ROOT / "examples" / "my_parts.py", tmp_path)
    if "my_net.py:Net" in words:
        (tmp_path / "my_net.py").write_text(
            "from torch import nn\n\n\ndef Net(shape, classes):\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[-1] ** 2, classes))\n"
        )
    if words[0] == "run" and words[1] in PRESETS:
        source = PRESETS[words[1]].data.source.removesuffix("-anomaly")
        if source in ENTRIES and not download.cached_file(source).is_file():
            pytest.skip(f"fetch it first: cbdsl data fetch {source}")
    done = cbdsl(*(each for word in words for each in expanded(word, tmp_path)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if words[0] in {"run", "swarm"}:
        assert "on the test set" in done.stdout


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
    for name in re.findall(r"`(src/[\w/.]+)`", (ROOT / "README.md").read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_every_link_of_the_repositorys_own_pages_leads_to_a_file(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    local = [link for link in links if not link.startswith("https://")]
    assert local
    assert [link for link in local if not (ROOT / link.partition("#")[0]).is_file()] == []


def test_the_readmes_first_picture_and_both_commands_are_on_its_first_screen() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:24])
    assert "![" in screen
    assert "make run" in screen
    assert "make test" in screen
