"""Folders of runs that a disk or somebody spoilt: one sentence that names the file, and nothing is changed."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.errors import UserError
from cbdsl.presets import preset
from cbdsl.runs.folder import RunFolder, read_result
from cbdsl.runs.loop import resume, run
from cbdsl.spec import Spec
from cbdsl.studies.compare import compare
from cbdsl.util.npz import load_arrays
from support.refusals import refused_as

SPEC = preset("paper-iid").with_settings(
    {"workers": 3, "rounds": 2, "local.epochs": 0, "data.shared_scoring": 50, "data.holdout": 50, "model": "mlp"}
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    run(SPEC, out=folder, threads=1, callbacks=[])
    return folder


def copied(played: Path, place: Path) -> Path:
    place.mkdir()
    for file in played.iterdir():
        if file.is_file():
            (place / file.name).write_bytes(file.read_bytes())
    return place


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe", b"{", b"7", b"[" * 100_000, b'{"round": ' + b"9" * 5000 + b"}", b"{}", b"null", b"",
    ],
)  # fmt: skip
def test_a_damaged_line_of_rounds_is_named_and_nothing_is_changed(played: Path, tmp_path: Path, line: bytes) -> None:
    folder = copied(played, tmp_path / "run")
    first = (folder / "rounds.jsonl").read_bytes().splitlines()[0]
    (folder / "rounds.jsonl").write_bytes(first + b"\n" + line + b"\n")
    for read in (read_result, lambda path: compare([path]), lambda path: resume(path, callbacks=[])):
        with pytest.raises(UserError, match=r"rounds\.jsonl (is damaged in line 2|does not contain)"):
            read(folder)
    assert (folder / "rounds.jsonl").read_bytes() == first + b"\n" + line + b"\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [("test_accuracy", "high"), ("uploads", None), ("traffic", {"upload": [1]}), ("traffic", {"post": [1, 2]})],
)
def test_a_value_of_another_type_is_damage(played: Path, tmp_path: Path, key: str, value: Any) -> None:  # noqa: ANN401
    folder = copied(played, tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines[1][key] = value
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with refused_as("damaged-file", "rounds.jsonl", "line 2"):
        read_result(folder)


@pytest.mark.parametrize("content", ["", "[]", '{"rounds": 1}', "[" * 100_000])
def test_a_damaged_summary_is_named(played: Path, tmp_path: Path, content: str) -> None:
    folder = copied(played, tmp_path / "run")
    (folder / "summary.json").write_text(content)
    with refused_as("damaged-file", "summary.json"):
        read_result(folder)


def test_a_summary_that_speaks_of_endless_rounds_takes_no_memory(played: Path, tmp_path: Path) -> None:
    folder = copied(played, tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "rounds": 10**15}))
    with refused_as("damaged-file", 10**15):
        read_result(folder)


def test_a_comparison_names_every_folder_that_cannot_be_read(played: Path, tmp_path: Path) -> None:
    bad = [copied(played, tmp_path / name) for name in ("one", "two")]
    for folder in bad:
        (folder / "rounds.jsonl").write_bytes(b"\x00")
    with pytest.raises(UserError, match=r"one/rounds\.jsonl.*two/rounds\.jsonl"):
        compare([bad[0], played, bad[1]])


@given(st.data())
def test_whatever_the_bytes_of_a_checkpoint_it_is_read_or_named(played: Path, data: st.DataObject) -> None:
    content = bytearray((played / "checkpoint.npz").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + 4] = data.draw(st.binary(max_size=4))
    folder = played.parent / "fuzzed"
    folder.mkdir(exist_ok=True)
    (folder / "checkpoint.npz").write_bytes(bytes(content))
    try:
        RunFolder(folder).load_checkpoint("another key")
    except UserError as error:
        assert "checkpoint.npz" in str(error)  # damaged, or another run's


@pytest.mark.parametrize(
    "change",
    [
        {"global_best": np.zeros((2, 2), np.float32)}, {"global_best": np.zeros(3, np.int64)},
        {"meta": np.array("[" * 10_000)}, {"meta": np.array("7")}, {"meta": np.array('{"global_score": "0x1p99999"}')},
        {"surplus": np.zeros(1)},
    ],
)  # fmt: skip
def test_a_checkpoint_of_something_else_is_damaged(played: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = copied(played, tmp_path / "run")
    arrays = {**load_arrays(folder / "checkpoint.npz"), **change}
    np.savez(folder / "checkpoint.npz", **arrays)
    with refused_as("damaged-file", "checkpoint.npz"):
        resume(folder, threads=1, callbacks=[])


def test_a_private_run_is_its_owners_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "served", Spec(), private=True)
    folder.rewind([])
    folder.close()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.path / "rounds.jsonl")]
    assert modes == [0o700, 0o600]
