"""Expect an error by its stable code and by the facts in its message, not by its wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cbdsl.errors import UserError


@contextmanager
def refused_as(code: str, *facts: object) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect a UserError with this code whose message contains each fact, for example a given value."""
    with pytest.raises(UserError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    missing = [fact for fact in facts if str(fact) not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
