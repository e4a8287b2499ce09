"""README.txt of a run's folder and of a worker's says of every file in it what it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.deployment import brokers, deployment, pictures, tiny_spec, wait_until
from support.helpers import SMALL, cbdsl

pytestmark = pytest.mark.slow

PARTIAL = re.compile(r"\..+\.partial")


def unexplained(folder: Path) -> set[str]:
    """Files that the folder's page does not begin a line with, nor name in one."""
    words = set(re.findall(r"[\w.]+[\w]/?", (folder / "README.txt").read_text()))
    names = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
    return {name for name in names if name not in words and not PARTIAL.fullmatch(name)}


def test_a_page_that_leaves_a_file_out_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text(
        "README.txt  this page\nrounds.jsonl  rounds; older ones in rounds.old.jsonl\n"
    )
    for name in ("rounds.jsonl", "rounds.old.jsonl", ".rounds.jsonl.partial", "extra.json"):
        (tmp_path / name).touch()
    (tmp_path / "plugins").mkdir()
    assert unexplained(tmp_path) == {"extra.json", "plugins/"}


def test_every_file_of_a_simulated_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    words = ["run", *SMALL, "--rounds", "2", "--plugin", "own.py", "--out", "first"]
    done = cbdsl(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = cbdsl(*words[:-1], "second", "--init", "first", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert cbdsl("theory", "second", cwd=tmp_path).returncode == 0
    files = {path.name for path in (tmp_path / "second").iterdir()}
    assert files >= {"plugins", "init.safetensors", "model.safetensors", "summary.json", "accuracy.png", "theory.json"}
    assert not unexplained(tmp_path / "second")


def test_every_file_of_a_served_run_and_of_its_workers(tmp_path: Path) -> None:
    spec = tiny_spec(pictures(tmp_path / "data"), workers=2, rounds=40)
    with deployment(tmp_path, spec, brokers()[0]) as made:
        made.start_workers()
        made.start_server()
        wait_until(lambda: made.rounds_played() >= 2)
        made.kill_server()
        assert {path.name for path in made.out.iterdir()} >= {".secret", ".lock", "deployment.json"}
        assert not unexplained(made.out)
        made.start_server()
        made.wait_for_end()
        assert not unexplained(made.out)
        for name in made.names:
            folder = tmp_path / "workers" / name
            assert {path.name for path in folder.iterdir()} >= {"state.npz", "shared.bin", "wire.json"}
            assert not unexplained(folder)


@pytest.mark.parametrize(  # the journal is there from a round's first claim to the beginning of the next
    "name", ["journal.bin", "events.old.jsonl", "claims.old.jsonl", "refused.json", "broker/", "workers/"]
)
def test_what_is_not_in_every_run_is_explained_too(name: str) -> None:
    from cbdsl.runs.folder import README  # noqa: PLC0415

    assert name in README
