"""A hostile user at the command line: bad files and odd names end in one sentence, never in a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.helpers import SMALL, cbdsl


def refused(*words: str, cwd: Path) -> str:
    done = cbdsl(*words, cwd=cwd)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 4
    return done.stderr


def test_a_presets_name_is_neither_a_path_nor_markup(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text('preset = "../../x[/red]"\n')
    assert "Unknown preset '../../x[/red]'" in refused("run", "spec.toml", cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["spec.toml"]


def test_a_files_name_is_neither_a_path_nor_markup(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    home.mkdir(parents=True)
    arrays: dict[str, Any] = {
        f"{part}_features": np.random.default_rng(0).normal(size=(400, 5)) for part in ("train", "test")
    }
    data = "[/red] :smile:.npz"
    (home / "[").mkdir()
    np.savez(home / data, train_labels=np.arange(400) % 3, test_labels=np.arange(400) % 3, **arrays)
    (home / "spec.toml").write_text(
        f'workers = 3\nrounds = 1\nmodel = "softmax"\n[data]\nsource = {json.dumps(data)}\n'
        "samples_per_worker = 20\nshared_scoring = 50\nshared_training = 20\nholdout = 50\n"
    )
    before = {path for path in tmp_path.rglob("*") if home not in path.parents}
    done = cbdsl("run", "spec.toml", cwd=home)
    assert done.returncode == 0, done.stderr
    assert data in done.stderr
    assert {path for path in tmp_path.rglob("*") if home not in path.parents} == before
    assert len(list((home / "runs").iterdir())) == 1
    again = cbdsl("run", "spec.toml", "--out", "[/bold] out", cwd=home)
    assert again.returncode == 0, again.stderr
    assert "[/bold] out" in again.stdout
    compared = cbdsl("compare", "[/bold] out", cwd=home)
    assert compared.returncode == 0, compared.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "local.epochs=100000", "--set", "local.batch_size=10000000"), "of memory"),
        (("--set", "local.epochs=1000000000"), "at most 100,000"),
        (("--workers", "1000000000"), "at most 1,000,000"),
        (("--data", "\udce9.npz"), "in UTF-8"),
        (("--spec", "/dev/zero"), "longer than"),
        (("--spec", "/"), "cannot be read"),
        (("--init", "/"), "cannot be read"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_sentence(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert said in refused("run", *(() if "--spec" in words or "--workers" in words else SMALL), *words, cwd=tmp_path)


def test_a_file_that_may_not_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in refused("run", *SMALL, "--out", "file/run", cwd=tmp_path)
    assert "file" in refused("resume", "file", cwd=tmp_path)
