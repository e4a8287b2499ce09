"""A sequence whose items are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class Computed(Sequence[T]):
    """A sequence of any length whose items take no memory: each is computed at every access.

    >>> squares = Computed(lambda place: place**2, 10**6)
    >>> squares[3], squares[2:5][0], len(squares[:10])
    (9, 4, 10)
    """

    def __init__(self, item: Callable[[int], T], places: int | range) -> None:
        """item: returns the item at a place. places: how many there are, or which."""
        self._item, self._places = item, range(places) if isinstance(places, int) else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Computed[T]: ...
    def __getitem__(self, index: int | slice) -> T | Computed[T]:
        chosen = self._places[index]
        return Computed(self._item, chosen) if isinstance(chosen, range) else self._item(chosen)
