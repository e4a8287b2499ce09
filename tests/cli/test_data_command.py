from __future__ import annotations

import json
from pathlib import Path

import pytest

from cbdsl.data import download, formats
from cbdsl.data.dataset import load
from support import made_packages as made
from support.helpers import cbdsl


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cbdsl"


def test_the_list_says_what_is_here_and_touches_nothing(tmp_path: Path, home: Path) -> None:
    said = cbdsl("data", "list", cwd=tmp_path).stdout
    assert "cifar10        fetch: 138.9 MB" in said
    assert "mnist          embedded" in said
    rows = json.loads(cbdsl("data", "list", "--json", cwd=tmp_path).stdout)
    assert [(row["name"], row["here"]) for row in rows] == [
        ("hapt", False),
        ("cifar10", False),
        ("fashion-mnist", False),
        ("flights", False),
    ]
    assert not home.exists()


def test_a_run_on_data_that_is_not_here_says_the_command_and_leaves_no_folder(tmp_path: Path, home: Path) -> None:
    done = cbdsl("run", "--data", "hapt", "--out", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("Fetch it once: cbdsl data fetch hapt")
    assert not (tmp_path / "run").exists()
    assert not home.exists()


def test_info_says_licence_source_and_contents(tmp_path: Path) -> None:
    said = cbdsl("data", "info", "fashion-mnist", cwd=tmp_path).stdout
    assert "MIT, Zalando SE" in said
    assert "no: cbdsl data fetch fashion-mnist" in said
    found = json.loads(cbdsl("data", "info", "mnist", "--json", cwd=tmp_path).stdout)
    assert (found["training"], found["test"], found["classes"]) == (60_000, 10_000, 10)
    unknown = cbdsl("data", "info", "cifar", cwd=tmp_path)
    unknown.check_refused("unknown-name", "'cifar10'")


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("hapt", "--from", "missing.tar.gz"), ("missing-file", "missing.tar.gz")),
        (("hapt", "--from", "other.tar.gz"), ("damaged-file", "other.tar.gz")),
        (
            ("mnist",),
            (
                "unknown-name",
                "'mnist'",
            ),
        ),
    ],
)
def test_fetch_refuses_what_it_does_not_know(
    tmp_path: Path, home: Path, words: tuple[str, ...], refusal: tuple[str, ...]
) -> None:
    (tmp_path / "other.tar.gz").write_bytes(made.tar({"a": b"b"}))
    done = cbdsl("data", "fetch", *words, cwd=tmp_path)
    done.check_refused(*refusal)
    assert not home.exists() or not list(home.iterdir())


@pytest.mark.slow
def test_a_picture_of_any_partition(tmp_path: Path) -> None:
    small = ["--workers", "12", "--set", "data.samples_per_worker=50"]
    for number, partition in enumerate(("iid", "dirichlet", "quantity", "feature")):
        done = cbdsl(
            "data", "show", *small, "--set", f"data.partition={partition}", "--out", f"{number}.png", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert ("a worker has 50 samples, of" in done.stdout) == (partition != "quantity")
        assert (tmp_path / f"{number}.png").read_bytes()[:4] == b"\x89PNG"
    shards = cbdsl("data", "show", "paper-noniid", "--out", "some/where/p.svg", cwd=tmp_path)
    assert "a worker has 600 samples, of 1 to" in shards.stdout
    assert (tmp_path / "some" / "where" / "p.svg").exists()
    cbdsl("data", "show", "--out", "p.txt", cwd=tmp_path).check_refused("not-supported", "p.txt", ".png")


def test_a_file_of_the_cache_is_an_ordinary_npz(tmp_path: Path, home: Path) -> None:
    import numpy as np  # noqa: PLC0415

    labels = np.repeat([1, 6], 200)
    people = {person: [made.frame(np.ones((6, 400)), labels)] for person in (1, 2, 3)}
    home.mkdir(parents=True)
    download.save_dataset("made", formats.read_hapt({"HAPT.pkl.gz": made.recordings(people)}), home)
    data = load(str(home / "made.npz"))
    assert (data.shape, data.classes) == ((6, 128), 6)
    small = ["--model", "softmax", "--rounds", "1", "--workers", "2", "--set", "data.partition=by-client"]
    rest = ["--set", "data.shared_scoring=2", "--set", "data.shared_training=0", "--set", "data.holdout=0"]
    done = cbdsl("run", "--data", str(home / "made.npz"), *small, *rest, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
