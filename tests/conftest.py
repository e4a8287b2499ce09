from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cbdsl.data.sources import Dataset, load

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def mnist() -> Dataset:
    return load("mnist")
