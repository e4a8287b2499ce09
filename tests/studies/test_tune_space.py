"""Settings as points of a cube: every range is reached from end to end, and nonsense is refused with a reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cbdsl.presets import preset
from cbdsl.spec import Spec
from cbdsl.studies.tune import Axis, Space, parse_range
from support.refusals import refused_as


def test_a_range_is_read_with_its_scale() -> None:
    assert parse_range("swarm.cognitive=0.1..1", Spec()) == Axis("swarm.cognitive", 0.1, 1.0)
    assert parse_range("local.learning_rate=1e-3..1e-1:log", Spec()) == Axis("local.learning_rate", 1e-3, 1e-1, True)
    assert parse_range("local.epochs=1..5", Spec()) == Axis("local.epochs", 1, 5, whole=True)
    assert parse_range("local.batch_size=5,10,20", Spec()).choices == (5, 10, 20)
    assert parse_range("model=cnn,mlp", Spec()).choices == ("cnn", "mlp")
    assert parse_range("local.batch_size=5,ten", Spec()).choices == (5, "ten")  # and 'ten' is what is refused


def test_values_go_from_one_end_to_the_other() -> None:
    assert [Axis("x", 1, 3, whole=True).value(place) for place in (0, 0.34, 0.67, 1)] == [1, 2, 3, 3]
    assert Axis("x", 1e-3, 1e-1, True).value(0.5) == pytest.approx(1e-2)
    assert [Axis("x", choices=("a", "b")).value(place) for place in (0, 0.49, 0.5, 1)] == ["a", "a", "b", "b"]
    assert Axis("x", 0.1, 1.0).value(7) == 1.0


@given(st.floats(0.0, 1.0), st.booleans(), st.booleans())
def test_a_place_leads_to_a_value_and_the_value_back_to_the_place(place: float, log: bool, whole: bool) -> None:
    axis = Axis("x", 1.0, 200.0, log, whole)
    value = axis.value(place)
    assert axis.low <= value <= axis.high
    back = axis.place(value)
    assert back is not None
    assert axis.value(back) == value


def test_the_spec_itself_is_a_point_where_the_ranges_have_it() -> None:
    start = preset("strong-iid")
    space = Space(start, (Axis("swarm.inertia", 0.1, 0.3), Axis("local.epochs", 1, 5, whole=True)))
    point = space.start_point()
    assert point is not None
    assert space.spec(space.values(point), start.seed) == start
    assert Space(start, (Axis("swarm.inertia", 0.5, 1.0),)).start_point() is None
    assert Space(preset("paper-iid"), (Axis("swarm.inertia", 0.1, 1.0),)).start_point() is None  # it falls from 1 to 0


def test_points_outside_the_cube_are_taken_for_its_walls() -> None:
    space = Space(Spec(), (Axis("swarm.social", 0.0, 2.0),))
    assert space.values(np.array([-3.0], np.float32)) == {"swarm.social": 0.0}


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("options.q4.block=64..512", True),
        ("options.fedprox.mu=0..1", False),  # its default is no whole number
        ("options.guest.size=1..8", True),  # nothing is known of it but how it is written
        ("options.guest.size=1.0..8", False),
        ("local.epochs=1..5", True),
        ("swarm.social=0..2", False),
    ],
)
def test_whole_numbers_stay_whole_also_where_nothing_is_set_yet(text: str, whole: bool) -> None:
    axis = parse_range(text, Spec())
    assert axis.whole is whole
    assert isinstance(axis.value(0.3), int if whole else float)


def test_the_default_of_a_part_is_no_value_of_the_spec() -> None:
    start = Spec().with_settings({"codec.up": "q4", "codec.down": "q4"})
    assert Space(start, (parse_range("options.q4.block=64..512", start),)).start_point() is None


def test_paths_that_go_up_are_choices_and_no_range() -> None:
    assert parse_range("init=../a,../b", Spec()).choices == ("../a", "../b")


def test_a_space_is_checked_at_every_choice_and_both_ends_alone_and_together() -> None:
    axes = (Axis("method", choices=("a", "b", "c")), Axis("workers", 2, 9, whole=True))
    checked = [tuple(values.values()) for values in Space(Spec(), axes).settings_to_check()]
    assert {(method, size) for method in "abc" for size in (2, 9)} <= set(checked)
    assert ("a", 5) in checked
    many = tuple(Axis(f"options.guest.{number}", choices=tuple(range(10))) for number in range(8))
    assert len(list(Space(Spec(), many).settings_to_check())) <= 1100


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("swarm.social=..", "wrong-type"),
        ("swarm.social=0..1..2", "wrong-type"),
        ("swarm.social=0..inf", "out-of-range"),
        ("swarm.social=", "out-of-range"),
        ("local.batch_size=5,5", "out-of-range"),
        ("local.learning_rate=-1..1:log", "out-of-range"),
        ("model=1..5", "wrong-type"),
        ("shared=a..b", "wrong-type"),
        ("defence.guard=0..1", "wrong-type"),
        ("options.q4=1..5", "unknown-setting"),
        ("data.holdout=100..200", "not-supported"),
        ("data.source=mnist,hapt", "not-supported"),
        ("swarm.inertai=0.1..1", "unknown-setting"),
        ("nothing=0..1", "unknown-setting"),
        ("swarm.social=1..1", "out-of-range"),
        ("swarm.social=2..1", "out-of-range"),
        ("swarm.social=0..1:log", "out-of-range"),
        ("swarm.social=0..1:cubic", "unknown-name"),
        ("swarm.social=a..b", "wrong-type"),
        ("swarm.social=0..nan", "out-of-range"),
        ("swarm.social=-1..1", "out-of-range"),
        ("local.epochs=0.5..3", "wrong-type"),
        ("local.batch_size=5", "out-of-range"),
        ("seed=0..4", "not-supported"),
        ("rounds=1..4", "not-supported"),
        ("swarm.social", "unknown-setting"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(text: str, code: str) -> None:
    with refused_as(code):
        parse_range(text, Spec())


def test_a_setting_is_searched_once() -> None:
    with refused_as("conflict", "swarm.social"):
        Space(Spec(), (Axis("swarm.social"), Axis("swarm.social")))
    with refused_as("out-of-range", "--over"):
        Space(Spec(), ())


def test_numbers_that_are_tried_are_short() -> None:
    assert Axis("x", 0.0, 1.0).value(1 / math.pi) == 0.3183
