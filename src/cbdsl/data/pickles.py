"""Pickles of others, read as what they say and never done as they say: nothing is imported, called or built.

A pickle is a program for a small stack machine. Here the instructions that make plain values are carried out; a name
stays a name, a call is written down as a `Call`. Whatever else a pickle asks for is an error.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from cbdsl.errors import UserError


@dataclass(frozen=True)
class Name:
    """Something that the pickle wants imported: "module name"."""

    path: str


@dataclass(eq=False)
class Call:
    """A call that was not made, and the state that what it gives was to have."""

    path: str
    arguments: tuple[Any, ...]
    state: Any = None


@dataclass
class _Machine:
    names: Collection[str]
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def step(self, code: str, argument: Any) -> None:  # noqa: ANN401, PLR0912 - one branch an instruction
        stack = self.stack
        if code in {"BININT", "BININT1", "BININT2", "INT", "BINUNICODE", "NONE"}:
            stack.append(argument)
        elif code in {"BINPUT", "LONG_BINPUT"}:
            self.memo[argument] = stack[-1]
        elif code in {"BINGET", "LONG_BINGET"}:
            stack.append(self.memo[argument])
        elif code == "MARK":
            self.marks.append(stack)
            self.stack = []
        elif code == "TUPLE":
            items = tuple(self.since_mark())
            self.stack.append(items)
        elif code == "EMPTY_LIST":
            stack.append([])
        elif code == "APPENDS":
            items = tuple(self.since_mark())
            _of(list, self.stack[-1]).extend(items)
        elif code == "EMPTY_DICT":
            stack.append({})
        elif code == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _of(dict, stack[-1])[key] = value
        elif code == "SETITEMS":
            pairs = self.since_mark()
            _of(dict, self.stack[-1]).update(zip(pairs[::2], pairs[1::2], strict=True))
        elif code == "GLOBAL":
            if argument not in self.names:
                raise UserError(f"it names {argument!r}, which has no place in this data")
            stack.append(Name(argument))
        elif code == "REDUCE":
            arguments, name = _of(tuple, stack.pop()), _of(Name, stack.pop())
            stack.append(Call(name.path, arguments))
        elif code == "BUILD":
            state = stack.pop()
            _of(Call, stack[-1]).state = state
        else:
            raise UserError(f"it has the instruction {code}, which has no place in this data")


def _of(kind: type[Any], value: Any) -> Any:  # noqa: ANN401 - whatever a pickle holds
    if type(value) is not kind:
        raise UserError(f"it takes a {type(value).__name__} for a {kind.__name__}")
    return value


def read(content: bytes, names: Collection[str]) -> Any:  # noqa: ANN401 - whatever a pickle holds
    """What a pickle says; names: all that it may name, "module name" each. UserError if it is anything else."""
    machine = _Machine(names)
    try:
        for instruction, argument, _ in pickletools.genops(content):
            if instruction.name == "STOP":
                (value,) = machine.stack
                return value
            machine.step(instruction.name, argument)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"it is damaged ({error or type(error).__name__})") from error
    raise UserError("it ends too early")
