"""How `wire.json` writes numbers, bytes and arrays; `README.md` describes it for other languages. Imports no cbdsl."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

# value[i] = ((square * i * i + times * i + add) mod modulo - minus) ^ power / divide, exact in float32
REFERENCE = {"square": 0, "times": 31, "add": 7, "modulo": 997, "minus": 498, "power": 1, "divide": 2048}
PEAKED = {"square": 7, "times": 13, "add": 5, "modulo": 101, "minus": 50, "power": 3, "divide": 2**20}
EVEN = {"square": 3, "times": 11, "add": 2, "modulo": 211, "minus": 105, "power": 1, "divide": 4096}
STILL = {"square": 0, "times": 0, "add": 0, "modulo": 1, "minus": 0, "power": 1, "divide": 1}


def floats(form: Mapping[str, int], size: int) -> NDArray[np.float32]:
    """Compute the numbers of a formula."""
    values = [
        ((form["square"] * i * i + form["times"] * i + form["add"]) % form["modulo"] - form["minus"]) ** form["power"]
        / form["divide"]
        for i in range(size)
    ]
    return np.array(values, np.float32)


def content(length: int) -> bytes:
    """Compute a long content."""
    return bytes((i * i + 7 * i + i // 251) % 256 for i in range(length))


def scores(model: NDArray[np.float32], factor: float) -> Callable[[NDArray[np.float32]], NDArray[np.float64]]:
    """Return a score for rows: 1 + factor * the largest distance of a weight from the model's, in float64."""
    return lambda rows: 1 + factor * np.abs(rows.astype(np.float64) - model.astype(np.float64)).max(1)


def plain(value: Any, form: str) -> Any:  # noqa: ANN401 - what a message holds, and what JSON holds
    """Write a field's value: bytes as hex, a float as the hex of its eight little-endian bytes."""
    if form == "bytes":
        return value.hex()
    return struct.pack("<d", value).hex() if form == "float" else value


def value_of(written: Any, form: str) -> Any:  # noqa: ANN401 - as above
    """Read a field's value."""
    if form == "bytes":
        return bytes.fromhex(written)
    return struct.unpack("<d", bytes.fromhex(written))[0] if form == "float" else written


def hex_of(values: NDArray[np.float32]) -> str:
    """Write numbers as the hex of little-endian float32."""
    return values.astype("<f4").tobytes().hex()


def records(content: Mapping[str, Any]) -> dict[str, Any]:
    """Write the records of a Flower message."""
    found: dict[str, Any] = {}
    for name, record in content.items():
        found[name] = {}
        for key, value in record.items():
            if isinstance(value, bytes):
                written: Any = {"bytes": value.hex()}
            elif hasattr(value, "stype"):
                array = {"dtype": value.dtype, "shape": list(value.shape), "stype": value.stype}
                written = {**array, "bytes": value.data.hex()}
            else:
                written = value
            found[name][key] = written
    return found


def flower_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a Flower run's configuration what keeps it small."""
    small = "model=softmax workers=3 data.samples_per_worker=20 data.holdout=0"
    return {**config, "settings": f"{small} {config['settings']}", "join-seconds": 30.0}


def text_of(value: Any, depth: int = 0) -> str:  # noqa: ANN401 - what JSON holds
    """Write JSON so that a vector is a line or a few, and a change of one is a small difference."""
    flat = json.dumps(value, ensure_ascii=False)
    if depth == 0:
        rows = [f"{json.dumps(key)}: {text_of(item, 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + "\n}\n"
    if depth > 3 or not isinstance(value, (dict, list)) or len(flat) < 100:
        return flat
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {text_of(item, depth + 1)}" for key, item in value.items()]
        start, end = "{", "}"
    else:
        rows, start, end = [text_of(item, depth + 1) for item in value], "[", "]"
    space = " " * depth
    return f"{start}\n" + ",\n".join(space + row for row in rows) + f"\n{' ' * (depth - 1)}{end}"
