"""Parts by name: what is registered can be found, made with its settings, and described."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cbdsl import register
from cbdsl.errors import UserError
from cbdsl.register import Register


@pytest.mark.parametrize("kind", register.ALL)
def test_every_part_of_the_package_is_described_and_can_be_made(kind: str) -> None:
    parts = register.ALL[kind]
    assert len(parts.names()) == len(set(parts.names())) >= 1
    for name in parts.names():
        assert parts.summary(name)
        assert parts.make(name, {}) is not None
        defaults = {key: value for key, value in parts.settings(name).items() if isinstance(value, (int, float, str))}
        assert parts.make(name, defaults) is not None


def test_a_class_and_a_function_have_settings() -> None:
    parts = Register("thing", ())

    @parts("classy")
    @dataclass(frozen=True)
    class Classy:
        """First line
        goes on. And on.

        Not this.
        """

        size: int = 3
        rate: float = 0.5

    @parts("plain")
    def plain(value: int, *, factor: float = 2.0) -> float:
        """A function."""
        return value * factor

    assert parts.names() == ["classy", "plain"]
    assert parts.summary("classy") == "First line goes on. And on."
    assert parts.settings("classy") == {"size": 3, "rate": 0.5}
    assert parts.settings("plain") == {"factor": 2.0}
    assert parts.make("classy", {"rate": 2}) == Classy(3, 2.0)
    assert isinstance(parts.make("classy", {"rate": 2}).rate, float)
    assert parts.make("plain", {"factor": 3})(4) == 12.0
    assert parts.make("plain", {}) is plain
    assert "plain" in parts
    assert "other" not in parts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sise": 1}, "The thing 'classy' has no setting 'sise'. It has: size"),
        ({"size": "big"}, "size of the thing 'classy' takes a value like 3; given 'big'"),
        ({"size": 1.5}, "takes a value like 3; given 1.5"),
        ({"size": True}, "takes a value like 3; given True"),
    ],
)
def test_settings_that_do_not_fit(options: dict[str, object], words: str) -> None:
    parts = Register("thing", ())

    @parts("classy")
    @dataclass
    class Classy:
        """One."""

        size: int = 3

    assert parts.get("classy") is Classy
    with pytest.raises(UserError, match=words):
        parts.make("classy", options)


@pytest.mark.parametrize("name", ["", "two words", "a.b", "a,b", "nnm+x", "a=b", "tab\t", "custom"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(UserError, match="No thing can be called"):
        Register("thing", ())(name)


def test_a_name_is_given_once() -> None:
    parts = Register("thing", ())

    @parts("one")
    def first() -> None:
        """One."""

    parts("one")(first)  # the same again, as when a notebook's cell is run twice
    with pytest.raises(UserError, match=r"The thing 'one' exists already, in test_register\. Give yours another"):

        @parts("one")
        def second() -> None:
            """Two."""

    assert parts.get("one") is first
    parts.forget(__name__)
    assert parts.names() == []


def test_a_guest_cannot_take_a_name_of_the_package_whoever_comes_first() -> None:
    parts = Register("aggregator", ("cbdsl.algorithm.aggregators",))
    parts._parts = {"mean": register.aggregator.get("mean")}  # the home is imported already: as it was left
    with pytest.raises(UserError, match=r"already, in cbdsl\.algorithm\.aggregators"):

        @parts("mean")
        def mean() -> None:
            """Mine."""


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(UserError, match=r"Unknown method 'fedprx'\. Did you mean 'fedprox'\?"):
        register.method.get("fedprx")
