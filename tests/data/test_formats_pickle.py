from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from cbdsl.data import formats
from cbdsl.data.formats import PickledCall, PickledName
from support.made_packages import call, name, text
from support.refusals import refused_as

words = st.text(max_size=5)
plain: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | words,
    lambda inner: (
        st.lists(inner, min_size=2, max_size=4)
        | st.dictionaries(words, inner, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_values_are_read_as_pickle_reads_them(value: object) -> None:
    assert formats.read_pickle(pickle.dumps(value, protocol=1), ()) == value


def test_a_call_is_written_down_and_not_made() -> None:
    found = formats.read_pickle(call("somewhere something", text("a"), state=text("b")) + b".", {"somewhere something"})
    assert isinstance(found, PickledCall)
    assert (found.path, found.arguments, found.state) == ("somewhere something", ("a",), "b")
    assert formats.read_pickle(name("somewhere something") + b".", {"somewhere something"}) == PickledName(
        "somewhere something"
    )


class Foreign:
    """Would make a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    content = pickle.dumps(Foreign(tmp_path / "made"), protocol)
    with refused_as("not-allowed"):
        formats.read_pickle(content, {"numpy ndarray"})
    assert list(tmp_path.iterdir()) == []


def test_even_an_allowed_name_is_never_called(tmp_path: Path) -> None:
    content = pickle.dumps(Foreign(tmp_path / "made"), 1)
    found = formats.read_pickle(content, {"posix mkdir", "nt mkdir"})
    assert isinstance(found, PickledCall)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"J\x01\x00",
        b"K\x01",
        b"t.",
        b"h\x07.",
        b"K\x01K\x02R.",
        b"K\x01(K\x02e.",
        b"}(K\x01u.",
        b"}(]K\x01u.",
        b"P0\n.",
    ],
)
def test_a_damaged_pickle_is_refused(content: bytes) -> None:
    with refused_as("damaged-file"):
        formats.read_pickle(content, ())
