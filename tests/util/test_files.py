"""What is written is private where it should be, and what is read cannot spoil its reader."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.util import files, npz
from cbdsl.util.files import private_file, private_folder, read_json, read_text, write_atomically
from cbdsl.util.npz import load_arrays


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
def test_what_is_private_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    private_folder(folder)
    (folder / ".secret.partial").touch(0o666)  # left by a process that was killed
    write_atomically(folder / "secret", b"7", private=True)
    with private_file(folder / "journal", "ab") as file:
        file.write(b"7")
    write_atomically(folder / "page", b"7")
    assert mode_of(folder) == 0o700
    assert [mode_of(folder / name) for name in ("secret", "journal", "page")] == [0o600, 0o600, 0o666]


@pytest.mark.usefixtures("open_umask")
def test_a_folder_that_is_there_already_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(0o750)
    private_folder(tmp_path / "mine")
    assert mode_of(tmp_path / "mine") == 0o750


def test_text_that_is_far_too_long_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_TEXT", 1000)
    with pytest.raises(ValueError, match="longer than"):
        read_text(Path("/dev/zero"))


def test_json_that_is_too_deep_or_too_long_is_a_value_error() -> None:
    for text in ("[" * 100_000, "9" * 5_000, ""):
        with pytest.raises(ValueError):
            read_json(text)


def packed(**arrays: object) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def test_an_archive_that_unpacks_to_more_than_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = tmp_path / "bomb.npz"
    bomb.write_bytes(packed(features=np.zeros((1000, 1000), np.float32)))
    assert bomb.stat().st_size < 10_000
    monkeypatch.setattr(npz, "free_memory", lambda: 1_000_000)
    with pytest.raises(ValueError, match=r"more than the 1\.0 MB of memory"):
        load_arrays(bomb)


def test_an_array_that_announces_more_than_it_holds_is_refused_before_it_is_made(tmp_path: Path) -> None:
    header = str({"descr": "<f4", "fortran_order": False, "shape": (10**13,)}).encode()
    member = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(16)
    path = tmp_path / "liar.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("features.npy", member)
    with pytest.raises(ValueError, match="not what it announces"):
        load_arrays(path)


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    path.write_bytes(packed(a=np.arange(6).reshape(2, 3).T, text=np.array("word"), none=np.zeros((0, 3), np.uint8)))
    found = load_arrays(path)
    assert {name: array.shape for name, array in found.items()} == {"a": (3, 2), "text": (), "none": (0, 3)}
    assert (str(found["text"]), found["a"].tolist()) == ("word", [[0, 3], [1, 4], [2, 5]])
    assert list(load_arrays(path, ["a"], ["none", "missing"])) == ["a", "none"]
    with pytest.raises(ValueError, match="no array 'b'"):
        load_arrays(path, ["b"])


WHOLE = packed(features=np.arange(12, dtype=np.float32).reshape(3, 4), labels=np.arange(3))


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(max_size=8)), max_size=4), st.integers(0, 2000))
def test_whatever_the_bytes_of_an_archive_the_answer_is_arrays_or_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]], end: int
) -> None:
    content = bytearray(WHOLE)
    for place, new in changes:
        content[place : place + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "fuzzed.npz"
    path.write_bytes(bytes(content[: max(end, 1)]))
    try:
        load_arrays(path)
    except ValueError as error:
        assert str(error)
