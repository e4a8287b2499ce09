"""The functions behind the wire vectors, under names that do not change.

This file and `test_folders.py` are the only files here that import internal modules of cbdsl. If a module or a function
is renamed, change the imports here. `wire.json` must stay as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cbdsl
from cbdsl import Claim, CodecError, UserError
from cbdsl.algorithm.messages import commitment_of
from cbdsl.algorithm.worker_round import draw_batches as batches_of
from cbdsl.codecs.codec import deflate as squeezed, inflate as expanded
from cbdsl.codecs.envelope import (
    KEPT_VERSIONS,
    Codecs,
    apply_update as updated,
    unwrap_version as unwrapped,
    wrap_version as wrapped,
)
from cbdsl.engines.native_engine import available
from cbdsl.network import topics, wire
from cbdsl.network.journal import Journal
from cbdsl.network.samples import SharedLayout, pack_shared, unpack_shared
from cbdsl.network.wire import WireError
from cbdsl.network.worker_state import WorkerStateFolder
from cbdsl.presets import PRESETS
from cbdsl.rng import seed_of, stream
from cbdsl.spec import LocalSpec, from_toml

FLOWER = "cbdsl.flower"
HAS_NATIVE = available() is None
"""Whether the native engine is built here."""

KINDS: dict[int, type[Any]] = {
    1: wire.Status,
    2: wire.Hello,
    3: wire.Announcement,
    4: wire.Welcome,
    5: wire.OrderMessage,
    6: wire.ClaimMessage,
    7: wire.Invitation,
    8: wire.Piece,
}
"""The class of each kind of message, by the number that stands for the kind on the wire."""

LIMITS: dict[str, int] = {
    "message_bytes": wire.MAX_MESSAGE,
    "piece_bytes": wire.CHUNK,
    "whole_bytes": wire.MAX_WHOLE,
    "round": wire.MAX_ROUND,
    "workers": wire.MAX_WORKERS,
    "run_bytes": wire.RUN_BYTES,
    "digest_bytes": wire.DIGEST_BYTES,
    "session_bytes": wire.SESSION_BYTES,
    "kept_versions": KEPT_VERSIONS,
}

TOPICS: dict[str, Callable[..., str]] = {
    "root": topics.root,
    "spec": topics.spec,
    "order": topics.order,
    "model": topics.model,
    "update": topics.update,
    "shared": topics.shared,
    "down": topics.down,
    "to_worker": topics.to_worker,
    "from_worker": topics.from_worker,
    "from_all": topics.from_all,
}
"""The functions that build a topic."""

_CODECS = cbdsl.register.codec
CODECS = tuple(name for name in _CODECS.names() if _CODECS.get(name).__module__.startswith("cbdsl."))
"""The names of the built-in codecs."""

__all__ = [
    "CODECS",
    "HAS_NATIVE",
    "KINDS",
    "LIMITS",
    "PRESETS",
    "TOPICS",
    "Claim",
    "CodecError",
    "UserError",
    "WireError",
    "batches_of",
    "commitment_of",
    "expanded",
    "flower_conversation",
    "flower_modules",
    "from_toml",
    "read_journal",
    "read_state",
    "seed_of",
    "squeezed",
    "stream",
    "topics",
    "unwrapped",
    "wire",
    "wrapped",
]


def build_message(code: int, values: Sequence[Any]) -> Any:  # noqa: ANN401 - one of the kinds above
    """Build a message from the values of its fields, in their order on the wire."""
    return KINDS[code](*values)


def message_values(message: Any) -> list[Any]:  # noqa: ANN401 - as above
    """Return the values of a message's fields, in their order on the wire."""
    return [getattr(message, field.name) for field in fields(message)]


def field_names(code: int) -> list[str]:
    """Return the names of a kind's fields in Python."""
    return [field.name for field in fields(KINDS[code])]


def build_codec(name: str, options: Mapping[str, Any]) -> cbdsl.Codec:
    """Build a registered codec with its settings."""
    codec = cbdsl.register.codec.make(name, options)
    assert isinstance(codec, cbdsl.Codec)
    return codec


def apply_update(update: bytes, before: NDArray[np.float32], up: cbdsl.Codec, down: cbdsl.Codec) -> NDArray[np.float32]:
    """Return the next global model that an update leads to."""
    return updated(update, before, Codecs(up, down))


def pack_samples(features: NDArray[np.float32], labels: NDArray[np.int32]) -> bytes:
    """Pack shared samples as the server sends them."""
    return pack_shared(cbdsl.Samples(features, labels))


def unpack_samples(
    content: bytes, training: int, scoring: int, shape: tuple[int, ...], classes: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Unpack shared samples as a worker does; the layout is that of the announcement."""
    samples = unpack_shared(content, SharedLayout(training, scoring, shape), classes)
    return samples.features, samples.labels


def draw_batches(seed: int, round_number: int, worker: int, samples: int, settings: Mapping[str, Any]) -> list[Any]:
    """Return the batches of a worker in one round: rows of sample numbers, -1 where a row is not full."""
    rng = stream(seed, "batches", round_number, worker)
    rows = batches_of(np.arange(samples, dtype=np.int32), LocalSpec(**settings), rng)
    found: list[Any] = rows.tolist()
    return found


def describe_network(name: str, shape: tuple[int, ...], classes: int) -> tuple[Mapping[str, Any], int]:
    """Return the description of a built-in network as workers receive it, and the number of its weights."""
    network = cbdsl.register.model.get(name)(shape, classes)
    return network.to_dict(), network.size


def read_network(description: Mapping[str, Any]) -> cbdsl.Architecture:
    """Read the description of a network."""
    return cbdsl.Architecture.from_dict(description)


def read_journal(path: Path) -> tuple[dict[int, str], dict[int, str | None]]:
    """Read a server's journal: the claims' scores and the uploads, numbers and bytes as hex."""
    journal = Journal(path)
    claims = {worker: claim.score.hex() for worker, claim in (journal.claims or {}).items()}
    uploads = {worker: None if one is None else bytes(one).hex() for worker, one in journal.uploads.items()}
    return claims, uploads


def read_state(folder: Path, run: bytes, worker: int, size: int, pack: int) -> Mapping[str, Any]:
    """Read a worker's state: what was claimed, in which round, and its best model."""
    memory = WorkerStateFolder(folder).load(run, worker, size, pack)
    assert memory is not None
    return {
        "round": memory.round,
        "version": memory.version,
        "model": memory.model_digest.hex(),
        "score": memory.claim.score.hex() if memory.claim else None,
        "best": memory.particles.personal_best.astype("<f4").tobytes().hex(),
    }


@contextmanager
def flower_modules() -> Iterator[dict[str, Any]]:
    """Give the modules of the Flower app, on stand-ins for Flower's own classes where Flower is not installed.

    Afterwards nothing of the stand-ins is left, because other tests check what happens without Flower.
    """
    fake = importlib.util.find_spec("flwr") is None
    if fake:
        app = types.ModuleType("flwr.app")
        for stand_in in (Array, ArrayRecord, ConfigRecord, Message, RecordDict):
            setattr(app, stand_in.__name__, stand_in)
        sys.modules |= {"flwr": types.ModuleType("flwr"), "flwr.app": app}
    try:
        yield {name: importlib.import_module(f"{FLOWER}.{name}") for name in ("flower_messages", "client", "server")}
    finally:
        if fake:
            for name in [one for one in sys.modules if one.split(".")[0] == "flwr" or one.startswith(f"{FLOWER}.")]:
                del sys.modules[name]
                if name.startswith(f"{FLOWER}."):
                    vars(sys.modules[FLOWER]).pop(name.removeprefix(f"{FLOWER}."), None)


def flower_conversation(
    folder: Path,
    workers: int,
    config: Mapping[str, Any],
    stop_after: int = 0,
    hellos: list[Any] | None = None,
) -> dict[str, dict[str, list[str]]]:
    """Run a Flower app on nodes in this process; return what the messages of each type contain.

    For each type of message and "to node" or "from node": the names of its records, plain values and large things.
    stop_after: raise KeyboardInterrupt after this number of orders to train; 0 means never.
    hellos: a list that receives the Hello of every node that joins.
    """
    with flower_modules() as modules:
        client = modules["client"]
        grid = _Grid(
            {"query.join": client.join, "train": client.train, "query": client.upload, "query.finish": client.finish},
            [
                {"partition-id": number, "num-partitions": workers, "state-path": str(folder / "state")}
                for number in range(workers)
            ],
            stop_after,
        )
        grid.hellos = [] if hellos is None else hellos
        run_config = {"runs": str(folder), "out": "run", **config}
        modules["server"].play(grid, types.SimpleNamespace(node_config={}, run_config=run_config))
    return {
        kind: {way: sorted(found) for way, found in sorted(ways.items())}
        for kind, ways in sorted(grid.contents.items())
    }


class _Grid:
    """A Flower Grid whose nodes are the app's own handlers, called when their replies are pulled."""

    def __init__(self, handlers: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], stop_after: int) -> None:
        self._handlers, self._nodes, self._left = handlers, nodes, stop_after
        self._sent: dict[str, Any] = {}
        self._count = 0
        self.contents: dict[str, dict[str, set[str]]] = {}
        self.hellos: list[Any] = []

    def get_node_ids(self) -> list[int]:
        return list(range(len(self._nodes)))

    def push_messages(self, messages: Sequence[Any]) -> list[str]:
        for message in messages:
            self._count += 1
            message.metadata.__dict__["_message_id"] = message.metadata.message_id = str(self._count)
            self._sent[str(self._count)] = message
        return []

    def pull_messages(self, message_ids: Sequence[str]) -> list[Any]:
        replies = []
        for key in [key for key in message_ids if key in self._sent]:
            message = self._sent.pop(key)
            kind, node = message.metadata.message_type, message.metadata.dst_node_id
            context = types.SimpleNamespace(node_config=self._nodes[node], run_config={})
            reply = self._handlers[kind](message, context)
            if kind == "query.join":
                self.hellos.append(wire.decode(reply.content["cbdsl"]["Hello"], KINDS[2]))
            self._left -= kind == "train"
            if self._left == 0 and kind == "train":
                raise KeyboardInterrupt
            reply.metadata.src_node_id = node
            replies.append(reply)
            for way, one in (("to node", message), ("from node", reply)):
                found = self.contents.setdefault(kind, {}).setdefault(way, set())
                for record, entries in one.content.items():
                    found.add(record)
                    found |= {f"{record}: {name} ({type(value).__name__})" for name, value in entries.items()}
        return replies


class Array:
    """Stands in for Flower's Array: bytes with a type and a shape."""

    def __init__(self, dtype: str, shape: tuple[int, ...], stype: str, data: bytes) -> None:
        self.dtype, self.shape, self.stype, self.data = dtype, shape, stype, data


class ArrayRecord(dict[str, Array]):
    """Stands in for Flower's ArrayRecord."""


class ConfigRecord(dict[str, Any]):
    """Stands in for Flower's ConfigRecord."""


class RecordDict(dict[str, Any]):
    """Stands in for Flower's RecordDict."""


class Message:
    """Stands in for Flower's Message."""

    def __init__(
        self,
        content: RecordDict,
        dst_node_id: int = 0,
        message_type: str = "",
        *,
        ttl: float = 0.0,
        group_id: str = "",
        reply_to: Message | None = None,
    ) -> None:
        self.content = content
        replied = "" if reply_to is None else reply_to.metadata.message_id
        self.metadata: Any = types.SimpleNamespace(
            message_id="", dst_node_id=dst_node_id, src_node_id=0, message_type=message_type, ttl=ttl,
            group_id=group_id, reply_to_message_id=replied,
        )  # fmt: skip

    def has_error(self) -> bool:
        return False
