from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdsl.util.serialize import from_plain, to_plain


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
    again = from_plain(Point, {"across": None, "up": 1, "note": None})
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
    found = from_plain(Shape, shape())
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
    with pytest.raises(KeyError) as raised:
        from_plain(Shape, tree)
    assert raised.value.args == (named,)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("centre", None, "centre must be an object with keys; found None"),
        ("centre", [1, 2], "centre must be an object"),
        ("corners", "ab", "corners must be a list; found 'ab'"),
        ("span", [1], "span has 1 items instead of 2"),
        ("by_name", [], "by_name must be an object"),
    ],
)
def test_a_value_of_the_wrong_make_is_named(key: str, value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_plain(Shape, {**shape(), key: value})


def test_a_key_that_nobody_knows_is_passed_over() -> None:
    assert to_plain(from_plain(Shape, {**shape(), "colour": "red"})) == shape()


def test_lists_of_dataclasses_can_be_read_by_themselves() -> None:
    points = (Point(1.0, 2.0), Point(3.0, 4.0, "last"))
    assert from_plain(tuple[Point, ...], to_plain(points)) == points
    assert from_plain(list[Point], to_plain(points)) == list(points)
