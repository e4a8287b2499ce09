"""A Ray cluster of several nodes on this machine, for tests; nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cbdsl.runs.records import RoundRecord
from cbdsl.swarms import ray_swarm

STORE = 100_000_000
HOME = "127.0.0.2"  # of the loopback; 127.0.0.1 is what Ray takes for this machine's address


def plain(record: RoundRecord) -> dict[str, Any]:
    """A round without the time it took."""
    return {name: value for name, value in record.to_json().items() if name != "seconds"}


class Nodes:
    """Nodes of one processor each, and a first one for the driver alone; this process is connected to them."""

    def __init__(self, count: int, memory: int = 4 * 2**30) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - an extra

        self._memory, self._place = memory, tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False, "temp_dir": self._place.name,
                "node_ip_address": HOME}  # fmt: skip
        home = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        Path(home, "ray").mkdir(exist_ok=True)  # Cluster notes its address there, and does not make the folder
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: list[Any] = []
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def __enter__(self) -> Nodes:
        import ray  # noqa: PLC0415

        ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        return self

    def __exit__(self, *_: object) -> None:
        import ray  # noqa: PLC0415

        ray.shutdown()
        self._cluster.shutdown()
        self._place.cleanup()

    def add(self) -> None:
        node = self._cluster.add_node(num_cpus=1, memory=self._memory, object_store_memory=STORE, node_ip_address=HOME)
        self._nodes.append(node)
        self._cluster.wait_for_nodes(60)

    def remove(self, place: int = 0) -> None:
        self._cluster.remove_node(self._nodes.pop(place), allow_graceful=False)

    @contextmanager
    def spare(self) -> Iterator[None]:
        """A node more than is needed."""
        self.add()
        try:
            yield
        finally:
            self.remove(-1)

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """As if a shard were larger than any machine."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray_swarm, "_PROCESS_BYTES", 2 * self._memory)
            yield

    @staticmethod
    def processes(title: str) -> Iterator[int]:
        """Those of this cluster's processes that are called so."""
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                if (place / "cmdline").read_bytes().startswith(title.encode()) and _is_child(int(place.name)):
                    yield int(place.name)

    @staticmethod
    def _told(handle: Any, ask: Any) -> Any:  # noqa: ANN401
        """What a function says in an actor's process."""
        import ray  # noqa: PLC0415

        for _ in range(100):
            try:
                return ray.get(handle.__ray_call__.remote(ask), timeout=60)
            except ray.exceptions.RayActorError:
                time.sleep(0.1)
        raise TimeoutError

    def process_of(self, handle: Any) -> int:  # noqa: ANN401
        def number(_: object) -> int:
            return os.getpid()

        return int(self._told(handle, number))

    def home_of(self, handle: Any) -> str:  # noqa: ANN401
        def place(_: object) -> str:
            import ray  # noqa: PLC0415

            return str(ray.get_runtime_context().get_node_id())

        return str(self._told(handle, place))


def _is_child(process: int) -> bool:
    """Whether this process started another one, or started who did."""
    while process > 1:
        if process == os.getpid():
            return True
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return False
