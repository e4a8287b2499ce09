"""What a worker gives to a run: whatever is announced is understood within the limits, or refused in a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import tomli_w
from hypothesis import given, strategies as st

from cbdsl.arrays import Samples
from cbdsl.engines.native_engine import available, info
from cbdsl.errors import UserError
from cbdsl.models.architecture import Architecture
from cbdsl.models.layers import ArchitectureError, Conv2d, Flatten, Linear, MaxPool2d
from cbdsl.network.budget import _MOST_REASONS, _RUNS_AT_ONCE, _SLACK, ResourceLimits, needs_of, process_memory
from cbdsl.network.device_worker import DeviceWorker, parse_announcement
from cbdsl.network.wire import Announcement, OrderMessage, WireError
from cbdsl.util.formatting import parse_bytes, single_line
from support.refusals import refused_as

OWN = Samples(np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32), (np.arange(12) % 3).astype(np.int32))
NETWORK = Architecture((8,), (Linear(8, 3),))


def announced(**changes: Any) -> Announcement:  # noqa: ANN401
    fair = Announcement(
        b"run-0001", "", json.dumps(NETWORK.to_dict()), NETWORK.size, 1, "[8]", 3, 0, 0, bytes(16), 0
    )  # fmt: skip
    return replace(fair, **changes)


def small_budget() -> ResourceLimits:
    return ResourceLimits(OWN, 1, process_memory() + _SLACK + 50 * 10**6, 60.0)


def tree_of(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        *path, leaf = dotted.split(".")
        branch = tree
        for step in path:
            branch = branch.setdefault(step, {})
        branch[leaf] = value
    return tree


ABSURD: list[Any] = [
    0, 1, 3, -1, 10**3, 10**9, 2**31, 2**63, 10**30, 0.0, 0.5, 1e-300, 1e300, float("inf"), float("nan"), True, "",
    "x", "\x1b[2J", "../../etc/passwd", "os.system", [], [1, 2], [[]], {}, {"a": 1},
]  # fmt: skip
KEYS = [
    "workers", "rounds", "participation", "seed", "engine", "device", "preset", "model", "data.source",
    "data.partition", "data.samples_per_worker", "data.shared_training", "data.holdout", "local.epochs", "local.steps",
    "local.batch_size", "local.learning_rate", "local.momentum", "local.weight_decay", "swarm.inertia",
    "swarm.cognitive", "swarm.social", "defence.declared", "defence.aggregator", "defence.commitment",
    "attack.byzantine", "options.q8.block", "options.topk.share", "options.fedprox.mu", "options.adaptive.slack",
]  # fmt: skip
NAMES: dict[str, list[str]] = {
    "method": ["cb-dsl", "restart", "fedavg", "fedpso", "pso", "fedprox", "scaffold", "fedavgm", "fedadam", "x"],
    "codec.up": ["none", "q8", "q4", "q2", "topk", "adaptive", "x"],
    "codec.down": ["none", "q8", "topk", "adaptive"],
    "shared": ["none", "score", "train", "both", "default"],
    "swarm.draw": ["worker", "parameter"],
    "device": ["auto", "cpu", "cuda", "mps"],
    "swarm.start": ["together", "apart"],
    "swarm.sgd_from": ["current", "moved"],
}
SPECS = st.builds(
    lambda named, odd: tomli_w.dumps(tree_of({**named, **odd})),
    st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in NAMES.items()}),
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(ABSURD), max_size=2),
)
SIZES = st.sampled_from([1, 2, 3, 8, 50, 1000, 10**6, 2**31 - 1, 0, -1, 10**30, True, None, "8", [1], 1.5])
LAYERS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"kind": st.sampled_from(["relu", "flatten", "tanh", "x", None])}),
        st.fixed_dictionaries({"kind": st.just("linear"), "inputs": SIZES, "outputs": SIZES}),
        st.fixed_dictionaries(
            {"kind": st.just("conv2d"), "inputs": SIZES, "outputs": SIZES, "kernel": st.tuples(SIZES, SIZES)},
            optional={"padding": st.tuples(SIZES, SIZES), "bias": st.sampled_from([True, False, 3])},
        ),
        st.fixed_dictionaries(
            {"kind": st.just("max_pool2d"), "kernel": st.tuples(SIZES, SIZES), "stride": st.tuples(SIZES, SIZES)}
        ),
    ),
    max_size=4,
)
NETWORKS = st.one_of(
    st.just(json.dumps(NETWORK.to_dict())),
    st.just(""),
    st.builds(
        lambda shape, layers: json.dumps({"format": 1, "shape": shape, "layers": layers}),
        st.sampled_from([[8], [1, 8, 8], [2**31 - 1], [], 8, [0], ["8"]]),
        LAYERS,
    ),
)
COUNTS = st.sampled_from([0, 1, 5, 1000, 2**20, 2**31 - 1])


SHAPES = ["[8]", "[8]", "[1, 8, 8]", "[2, 4]", "[1048575, 1048575]", "[0]", "[]", "8", "{}", "[true]"]


@given(
    what=st.builds(
        announced, spec=SPECS, architecture=NETWORKS, size=st.sampled_from([27, 1, 2**28, 10**6]),
        vectors=st.sampled_from([1, 1, 2, 8]), shape=st.sampled_from(SHAPES),
        classes=st.sampled_from([3, 3, 1, 2**31 - 1]), shared_training=COUNTS, shared_scoring=COUNTS,
        shared_size=st.sampled_from([0, 5, 2**20, 2**30]),
    )
)  # fmt: skip
def test_any_announcement_is_played_within_the_limits_or_refused(what: Announcement) -> None:
    budget = small_budget()
    try:
        assignment = budget.parse_announcement(what)
    except WireError as refusal:
        assert single_line(str(refusal)) == str(refusal)
        return
    needs = needs_of(assignment, OWN, 1, 1e9)
    assert needs.memory < 60 * 10**6
    assert needs.seconds < 10**4
    try:
        particle = DeviceWorker(assignment, 0, OWN, b"", 1)
    except (UserError, WireError):
        return
    received = np.zeros(assignment.size * assignment.vectors, np.float32)
    order = OrderMessage(what.run, 1, "swarm", b"\1", 0.5, 0.01, 1, bytes(16))
    memory = particle.carry_out(order, received)
    assert memory.particles.positions.shape == (1, assignment.size)
    particle.upload()


@given(
    spec=SPECS,
    rate=st.sampled_from([0.01, 0.0, -1.0, 1e38, 1e300, 5e-324]), inertia=st.sampled_from([0.5, -3e38, 1e39]),
    number=st.sampled_from([0.1, 0.0, 3e38, -1e20, float("nan"), float("inf")]),
    version=st.sampled_from([0, 1, 5, 2**31 - 1]), task=st.sampled_from(["swarm", "average"]),
)  # fmt: skip
def test_any_order_is_carried_out_or_refused(
    spec: str, rate: float, inertia: float, number: float, version: int, task: Literal["swarm", "average"]
) -> None:
    try:
        named = tomllib.loads(spec).get("method", "cb-dsl")
        assignment = small_budget().parse_announcement(announced(spec=spec, vectors=2 if named == "scaffold" else 1))
        particle = DeviceWorker(assignment, 0, OWN, b"", 1)
    except (UserError, WireError):
        return
    received = np.full(assignment.size * assignment.vectors, number, np.float32)
    order = OrderMessage(b"run-0001", 1, task, b"\1", inertia, rate, version, bytes(16))
    for round_number in (1, 2, 2**31 - 1):
        try:
            particle.carry_out(replace(order, round=round_number), received)
        except WireError:
            assert max(abs(rate), abs(inertia)) > 3.5e38
        particle.upload()


def test_a_server_cannot_fill_the_log_with_reasons() -> None:
    budget, reasons = small_budget(), set()
    for number in range(3 * _MOST_REASONS):
        with pytest.raises(WireError) as refusal:
            budget.parse_announcement(
                announced(spec=f'"\x1b[31m-{number}" = 1' if number % 2 else f"nothing-{number} = 1")
            )
        reasons.add(str(refusal.value))
    assert len(reasons) == _MOST_REASONS + 1
    assert all(len(reason) < 320 and reason.isprintable() for reason in reasons)


def test_a_server_that_announces_run_after_run_is_not_followed_at_once() -> None:
    budget = small_budget()
    assert [budget.may_begin() for _ in range(_RUNS_AT_ONCE + 2)] == [True] * _RUNS_AT_ONCE + [False] * 2


def test_what_is_asked_what_is_allowed_and_what_to_do_are_said() -> None:
    budget = small_budget()
    with pytest.raises(WireError, match=r"needs about [\d.]+ [MG]B here, 100\.0 MB of it for batches; .*--memory"):
        budget.parse_announcement(announced(spec="[local]\nbatch_size = 10_000_000"))
    with pytest.raises(WireError, match="batch_size must be at most"):
        budget.parse_announcement(announced(spec="[local]\nbatch_size = 10_000_000_000"))
    hasty = ResourceLimits(OWN, longest_round=1.0)
    with pytest.raises(WireError, match=r"rounds take about \d+:\d\d here; the longest allowed is 0:01.*--longest"):
        hasty.parse_announcement(announced(spec="[local]\nepochs = 100_000\nbatch_size = 1"))


def test_more_threads_and_more_of_everything_need_more() -> None:
    def needs(what: Announcement, threads: int = 1) -> int:
        return needs_of(parse_announcement(what), OWN, threads, 1e9).memory

    least = needs(announced())
    wide = Architecture((8,), (Linear(8, 100), Linear(100, 3)))
    larger = announced(architecture=json.dumps(wide.to_dict()), size=wide.size)
    assert least < needs(larger) < needs(larger, 8)
    assert least < needs(announced(shared_training=1000)) < needs(announced(shared_training=1000, shared_size=10**5))
    assert least < needs(announced(spec="[local]\nepochs = 20")) < needs(announced(spec="[local]\nepochs = 40"))


def test_a_border_larger_than_any_image_is_no_network() -> None:
    with pytest.raises(ArchitectureError, match="pad less"):
        Architecture((1, 8, 8), (Conv2d(1, 1, (9, 9), (2**31 - 1, 1)), Flatten(), Linear(1, 3)))


def test_what_borders_and_layers_take_is_counted() -> None:
    plain = Architecture((1, 8, 8), (Conv2d(1, 1, (1, 1)), MaxPool2d((8, 8), (8, 8)), Flatten(), Linear(1, 3)))
    bordered = Architecture(
        (1, 8, 8), (Conv2d(1, 1, (1, 1), (50, 50)), MaxPool2d((108, 108), (8, 8)), Flatten(), Linear(1, 3))
    )
    assert plain.size == bordered.size
    assert bordered.numbers() > 108 * 108 > plain.numbers()
    assert bordered.entrance() >= 108 * 108

    def engine(network: Architecture) -> int:
        announcement = announced(architecture=json.dumps(network.to_dict()), size=network.size, shape="[1, 8, 8]")
        own = Samples(np.zeros((5, 1, 8, 8), np.float32), np.zeros(5, np.int32))
        return needs_of(parse_announcement(announcement), own, 1, 1e9).parts["the engine"]

    if available() is None:
        assert engine(bordered) - engine(plain) > 4 * 108 * 108 * info().lanes


def test_the_system_gives_no_more_than_was_allowed() -> None:
    code = (
        "import numpy as np\n"
        "from cbdsl.arrays import Samples\n"
        "from cbdsl.network.budget import ResourceLimits, process_memory\n"
        "own = Samples(np.zeros((2, 8), np.float32), np.zeros(2, np.int32))\n"
        "ResourceLimits(own, 1, process_memory() + 100_000_000).enforce()\n"
        "np.ones(5_000_000)\n"
        "try:\n"
        "    np.ones(50_000_000)\n"
        "except MemoryError:\n"
        "    print('no more')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ("no more\n" if sys.platform == "linux" else "")


def test_sizes_as_people_write_them() -> None:
    assert [parse_bytes(text, "it") for text in ("256M", "2G", "1.5 gb", "1000", "3KiB")] == [
        256 * 10**6, 2 * 10**9, 1_500_000_000, 1000, 3000,
    ]  # fmt: skip
    for text in ("", "M", "-1M", "1e9", "0", "12X", "١M"):
        with refused_as("wrong-type", "--memory", text):
            parse_bytes(text, "--memory")
