"""Studies on a Ray cluster: the results of local processes, in one folder, whatever fails."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cbdsl.errors import UserError
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies import pool
from cbdsl.studies.arena import ArenaPlan, run_arena
from cbdsl.studies.sweep import Task, grid, run_all
from cbdsl.swarms.shard import code_digest
from support.ray_nodes import Nodes, plain
from support.refusals import refused_as


def small(**settings: object) -> Spec:
    usual = {"workers": 3, "rounds": 3, "model": "softmax", "data.samples_per_worker": 20, "data.shared_scoring": 50}
    return Spec().with_settings({**usual, **{key.replace("__", "."): value for key, value in settings.items()}})


def counter(rounds: list[float]) -> SimpleNamespace:
    return SimpleNamespace(add=SimpleNamespace(remote=rounds.append))


def test_a_machine_without_the_folder_sends_its_files_back(tmp_path: Path) -> None:
    task, rounds = Task(resolve(small())), list[float]()
    error, files = pool.run_on_node(code_digest(), task, tmp_path / "elsewhere" / ".mark", {}, 1, counter(rounds))
    assert not error
    assert len(rounds) == 3
    assert {Path(name).parent for name in files} == {Path("runs") / task.spec.key(), Path("server_alone")}
    assert {"summary.json", "rounds.jsonl", "model.safetensors"} <= {Path(name).name for name in files}


def test_a_machine_without_the_data_names_itself_and_the_file(tmp_path: Path) -> None:
    task = Task(resolve(small(data__source=str(tmp_path / "gone.npz"))))
    error, files = pool.run_on_node(code_digest(), task, tmp_path / "elsewhere" / ".mark", {}, 1, counter([]))
    assert "gone.npz" in error
    assert error.startswith("on ")
    assert not files


def test_a_machine_without_the_shared_samples_names_their_file(tmp_path: Path) -> None:
    made = tmp_path / "made.npz"
    made.write_bytes(b"samples")
    task = Task(small(data__shared_source=str(made)))
    folder = task.folder(tmp_path / "elsewhere")
    made.unlink()
    with refused_as("conflict", "made.npz is not on"):
        pool.run_task(task, folder, 1, lambda _: None)
    made.write_bytes(b"others")
    with refused_as("conflict", "shared samples were edited"):
        pool.run_task(task, folder, 1, lambda _: None)


def test_a_machine_with_other_code_does_nothing(tmp_path: Path) -> None:
    error, _ = pool.run_on_node("0" * 12, Task(resolve(small())), tmp_path / ".mark", {}, 1, counter([]))
    assert "another cbdsl" in error


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'cbdsl[ray]'")
    with Nodes(2) as made:
        yield made


@pytest.mark.cluster
def test_a_machine_that_cannot_import_what_a_study_needs_is_one_message(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here_alone = ModuleType("here_alone")
    exec("def do(*_):\n    return '', {}", here_alone.__dict__)  # as if the other machines had no cbdsl
    monkeypatch.setitem(sys.modules, "here_alone", here_alone)
    monkeypatch.setattr(pool, "run_on_node", here_alone.__dict__["do"])
    with pytest.raises(UserError, match=r"cannot import what this study needs .*here_alone"):
        run_all([resolve(small())], tmp_path, on=nodes.address)


# The paper's selection, which waits for a file after three rounds: no machine is so fast that nothing is left to kill.
WAITING = """
import time
from pathlib import Path
import cbdsl
from cbdsl.algorithm.selection import Best

@cbdsl.register.selection("waiting")
class Waiting(Best):
    def invite(self, waiting, believed, view):
        for _ in range(1200):
            if view.round <= 3 or Path({go!r}).exists():
                break
            time.sleep(0.05)
        return super().invite(waiting, believed, view)
"""


@pytest.mark.cluster
def test_a_sweep_on_a_cluster_is_the_sweep_in_processes_though_a_task_is_killed(nodes: Nodes, tmp_path: Path) -> None:
    plugin, go = tmp_path / "waiting.py", tmp_path / "go"
    plugin.write_text(WAITING.format(go=str(go)))
    start = small(rounds=10, plugins=(str(plugin),), selection__name="waiting")
    points = grid(start, [("seed", [0, 1, 2])])
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / ".mark-of-another").touch()  # a study that was killed left it
    killed: list[int] = []

    def progress(played: int, total: int, share: float) -> None:
        assert played <= total
        assert share <= 1
        if played >= 3 and not killed:
            for process in itertools.islice(nodes.processes("ray::run_on_node"), 1):
                os.kill(process, signal.SIGKILL)
                killed.append(process)
                go.touch()

    there = run_all(points, tmp_path / "there", None, progress, nodes.address)
    here = run_all(points, tmp_path / "here", 1)
    assert killed
    assert [[*map(plain, one.rounds)] for one in there] == [[*map(plain, one.rounds)] for one in here]
    assert not [file for file in (tmp_path / "there").iterdir() if file.name.startswith(".")]
    again = run_all(points, tmp_path / "there", None, None, "127.0.0.1:1")  # nothing is left to do, so nobody is asked
    assert [one.summary for one in again] == [one.summary for one in there]


@pytest.mark.cluster
def test_an_arena_on_a_cluster_is_the_arena_in_processes(nodes: Nodes, tmp_path: Path) -> None:
    settings = {"workers": 5, "rounds": 2, "model": "softmax", "data.samples_per_worker": 20, "data.shared_scoring": 50}
    plan = ArenaPlan(("ipm",), ("fedavg", "guard"), (2,), (0,), (0,), ("strong-iid",), settings)
    there = run_arena(plan, tmp_path / "there", on=nodes.address)
    assert there == run_arena(plan, tmp_path / "here", 1)
    tables = [(tmp_path / name / "results.csv").read_bytes() for name in ("there", "here")]
    assert tables[0] == tables[1]
