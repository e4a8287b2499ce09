from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, strategies as st

from cbdsl.util.serialize import Bounds, field_types, from_plain, setting, to_plain
from support.refusals import refused_as


@dataclass(frozen=True)
class Point:
    across: float
    up: float
    note: str | None = None


@dataclass(frozen=True)
class Shape:
    name: Literal["line", "ring"]
    centre: Point
    corners: tuple[Point, ...]
    span: tuple[int, float]
    weights: list[float]
    by_name: dict[str, Point]
    best: float | None
    extra: dict[str, Any] = field(default_factory=dict)


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
POINTS = st.builds(Point, NUMBERS, NUMBERS, st.none() | st.text())
SHAPES = st.builds(
    Shape,
    st.sampled_from(["line", "ring"]),
    POINTS,
    st.lists(POINTS, max_size=3).map(tuple),
    st.tuples(st.integers(), NUMBERS),
    st.lists(NUMBERS, max_size=3),
    st.dictionaries(st.text(), POINTS, max_size=2),
    st.none() | NUMBERS,
    st.just({"seen": [1, "two"]}),
)


@given(SHAPES)
def test_what_was_written_is_read_again(shape: Shape) -> None:
    text = json.dumps(to_plain(shape), allow_nan=False)
    assert from_plain(Shape, json.loads(text)) == shape


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_no_number_for_is_null_and_becomes_nan(value: float) -> None:
    assert to_plain(Point(value, 1.0)) == {"across": None, "up": 1.0, "note": None}
    again = from_plain(Point, {"across": None, "up": 1, "note": None}, nan=True)
    assert math.isnan(again.across)
    assert type(again.up) is float
    assert again.note is None


def shape() -> dict[str, Any]:
    point = {"across": 0.0, "up": 1.0, "note": None}
    return {
        "name": "line",
        "centre": dict(point),
        "corners": [dict(point), dict(point)],
        "span": [1, 2.0],
        "weights": [None, 0.5],
        "by_name": {"a": dict(point)},
        "best": None,
        "extra": {},
    }


def test_a_float_that_may_be_none_stays_none_and_one_in_a_list_does_not() -> None:
    found = from_plain(Shape, shape(), nan=True)
    assert found.best is None
    assert math.isnan(found.weights[0])
    assert found.span == (1, 2.0)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (["best"], "best"),
        (["centre", "up"], "centre.up"),
        (["corners", 1, "up"], "corners.up"),
        (["by_name", "a", "note"], "by_name.a.note"),
    ],
)
def test_a_missing_field_is_named_even_if_it_has_a_default(path: list[Any], named: str) -> None:
    tree = shape()
    branch: Any = tree
    for step in path[:-1]:
        branch = branch[step]
    del branch[path[-1]]
    with refused_as("missing-value", f"{named} is missing"):
        from_plain(Shape, tree, nan=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [("centre", None), ("centre", [1, 2]), ("corners", "ab"), ("span", [1]), ("by_name", [])],
)
def test_a_value_of_the_wrong_make_is_named(key: str, value: object) -> None:
    with refused_as("wrong-type", key, repr(value)):
        from_plain(Shape, {**shape(), key: value}, nan=True)


def test_a_key_that_nobody_knows_is_passed_over() -> None:
    assert to_plain(from_plain(Shape, {**shape(), "colour": "red"}, nan=True)) == shape()


def test_the_caller_decides_about_unknown_keys_and_defaults() -> None:
    point = from_plain(Point, {"across": 1, "up": 2}, defaults=True)
    assert point == Point(1.0, 2.0, None)
    with pytest.raises(LookupError, match=r"^here\.colour$"):
        from_plain(Point, {"across": 1, "up": 2, "colour": 3}, "here", defaults=True, unknown_key=LookupError)
    with refused_as("missing-value", "up"):
        from_plain(Point, {"across": 1}, defaults=True)
    with refused_as("wrong-type", "across", "None"):
        from_plain(Point, {"across": None, "up": 1}, defaults=True)


@dataclass(frozen=True)
class Limited:
    count: Annotated[int, Bounds(1, 9)]
    rate: Annotated[float, Bounds(0.0, above=True)]
    kind: Literal["a", "b"]
    run: Annotated[bytes, Bounds(2, 2)]
    names: tuple[Annotated[str, Bounds(0, 3, printable=True)], ...] = setting((), "who is there", key="who")


LIMITED: dict[str, Any] = {"count": 3, "rate": 0.5, "kind": "a", "run": "00ff", "who": ["ada"]}


def test_limits_choices_and_bytes_are_read_by_type() -> None:
    found = from_plain(Limited, LIMITED)
    assert found == Limited(3, 0.5, "a", b"\x00\xff", ("ada",))
    assert to_plain(found) == LIMITED


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("count", 0, "out-of-range"),
        ("count", 10, "out-of-range"),
        ("count", 10**400, "out-of-range"),
        ("rate", 0, "out-of-range"),
        ("rate", math.nan, "out-of-range"),
        ("rate", math.inf, "out-of-range"),
        ("rate", 10**400, "wrong-type"),
        ("kind", "c", "unknown-name"),
        ("kind", ["a"], "unknown-name"),
        ("run", "00", "out-of-range"),
        ("run", "zz00", "wrong-type"),
        ("run", "00f", "wrong-type"),
        ("who", ["adam"], "wrong-type"),
        ("who", ["\x1b"], "wrong-type"),
    ],
)
def test_a_value_outside_its_limits_is_refused_by_name(key: str, value: object, code: str) -> None:
    with refused_as(code, key):
        from_plain(Limited, {**LIMITED, key: value})


def test_descriptions_and_limits_can_be_read_from_the_fields() -> None:
    count, rate, kind, run, names = field_types(Limited)
    assert [each.allowed() for each in (count, rate, kind)] == ["from 1 to 9", "above 0", "a, b"]
    assert (names.key, names.description, names.has_default) == ("who", "who is there", True)
    assert run.accepts(b"ab")
    assert not run.accepts("ab")
    assert not count.accepts(True)
    assert not count.accepts(3.0)
    assert kind.accepts("b")
    assert not kind.accepts(["b"])


def test_lists_of_dataclasses_can_be_read_by_themselves() -> None:
    points = (Point(1.0, 2.0), Point(3.0, 4.0, "last"))
    assert from_plain(tuple[Point, ...], to_plain(points)) == points
    assert from_plain(list[Point], to_plain(points)) == list(points)
