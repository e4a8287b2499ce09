"""`cbdsl bench` reports what it measured; no test asserts how fast anything is."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from cbdsl.engines.native_engine import available
from cbdsl.studies.bench import BenchRow, make_table, measure

pytestmark = pytest.mark.slow


def test_every_task_has_a_row_for_every_engine() -> None:
    seen: list[tuple[int, int]] = []
    rows = measure(
        ["softmax"],
        [2, 3],
        batch=4,
        threads=1,
        repeats=1,
        scoring=20,
        progress=lambda done, total, _: seen.append((done, total)),
    )
    engines = ["native", "torch-loop", "torch-vmap"] if available() is None else ["torch-loop", "torch-vmap"]
    assert [(row.task, row.workers, row.batch, row.engine) for row in rows] == [
        (task, workers, batch, engine)
        for workers in (2, 3)
        for task, batch in (("train", 4), ("score", 20))
        for engine in engines
    ]
    assert all(row.seconds > 0 and row.ratio_to_torch_loop > 0 for row in rows)
    assert [row.ratio_to_torch_loop for row in rows if row.engine == "torch-loop"] == [1.0] * 4
    assert set(json.loads(json.dumps(rows[0].to_dict()))) == {
        "model", "task", "workers", "batch", "engine", "seconds", "ratio_to_torch_loop", "peak_share",
    }  # fmt: skip
    assert seen == sorted(seen)
    assert seen[-1] == (8, 8)


def test_torch_in_several_processes_is_measured_too() -> None:
    rows = measure(["softmax"], [3], batch=2, threads=2, repeats=1, scoring=5)
    assert "torch-2-processes" in {row.engine for row in rows if row.task == "train"}


def test_a_callback_can_end_the_measurement() -> None:
    def stop(_done: int, _total: int, _what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(["softmax"], [2], progress=stop)


@pytest.mark.parametrize(("models", "workers", "words"), [(["lenet"], [2], "known are"), (["mlp"], [0], "at least 1")])
def test_a_wrong_choice_is_refused(models: list[str], workers: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measure(models, workers)


def test_the_table_shows_ratios_and_a_missing_peak() -> None:
    rows = [
        BenchRow("cnn", "train", 50, 10, "native", 0.005, 14.2, 0.44),
        BenchRow("cnn", "score", 50, 2000, "native", 2.5, 6.5, None),
    ]
    console = Console(width=100)
    with console.capture() as capture:
        console.print(make_table(rows))
    text = capture.get()
    assert "14.2" in text
    assert "44%" in text
    assert "2.5 s" in text


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (
            ["codecs.py", "none,q4", "--workers", "2", "--json"],
            {"codec", "workers", "seconds", "share", "upload_bits", "downlink_bytes"},
        ),
        pytest.param(
            ["ray_rounds.py", "ray", "--models", "softmax", "--workers", "3", "--repeats", "1", "--json"],
            {"model", "workers", "shards", "threads", "local_seconds", "ray_seconds", "overhead_seconds", "speed"},
            marks=pytest.mark.skipif(find_spec("ray") is None, reason="no Ray: pip install 'cbdsl[ray]'"),
        ),
    ],
    ids=["codecs", "ray_rounds"],
)
def test_the_scripts_of_benchmarks_print_rows(words: list[str], keys: set[str]) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / words[0]
    done = subprocess.run([sys.executable, script, *words[1:]], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout[done.stdout.index("[") :])
    assert rows
    assert all(set(row) == keys and row["workers"] > 0 for row in rows)
