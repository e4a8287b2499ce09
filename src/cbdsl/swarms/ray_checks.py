"""What `cbdsl doctor --on` says of a Ray cluster: versions, instruction sets, and how many workers have room on it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cbdsl.swarms.ray_cluster import Machine, connected, machines
from cbdsl.swarms.shard import code_digest
from cbdsl.text import size

_WAIT = 60.0  # seconds for a machine to answer


def findings(on: str, numbers: int, model: str) -> list[tuple[str, str]]:
    """Pairs of a name and a sentence: of the cluster, of each machine, and of room for workers of so many numbers."""
    with connected(on) as ray:
        have = machines(ray)
        cpus = sum(int(one.cpus) for one in have)
        lines = [("ray", f"{ray.__version__}, {len(have)} machines, {cpus} processors")]
        builds: Counter[str] = Counter()
        for one, told in zip(have, _asked(ray, have), strict=True):
            lines.append((f"  {one.name}"[:12], _machine(one, told)))
            builds[str(told.get("build", ""))] += 1
        if len(set(builds) - {""}) > 1:
            lines.append(("numbers", "machines compute with different instructions: the last digits may differ"))
        each = 12 * numbers
        room = sum(int(one.memory // each) for one in have)
        lines.append(
            ("room", f"{room:,} workers of {model} ({numbers:,} numbers, {size(each)} each), less their samples")
        )
        return lines


def _asked(ray: Any, have: list[Machine]) -> list[dict[str, Any]]:  # noqa: ANN401
    """What each machine says of itself; empty where it did not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    def look() -> dict[str, Any]:  # travels as it is: the machine may not have this package
        try:
            from cbdsl.machine import free_memory  # noqa: PLC0415
            from cbdsl.swarms import shard  # noqa: PLC0415

            return {"code": shard.code_digest(), "build": shard.build_of("native"), "free": free_memory()}
        except Exception as error:
            return {"fault": f"{type(error).__name__}: {error}"}

    there = [NodeAffinitySchedulingStrategy(one.node, soft=False) for one in have]
    calls = [ray.remote(num_cpus=0, max_retries=0)(look).options(scheduling_strategy=one).remote() for one in there]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=_WAIT)
    return [_answer(ray, call) if call in done else {"fault": f"no answer in {_WAIT:.0f} s"} for call in calls]


def _answer(ray: Any, call: Any) -> dict[str, Any]:  # noqa: ANN401
    try:
        return dict(ray.get(call))
    except ray.exceptions.RayError as error:  # such as a machine that ended since
        return {"fault": (str(error).strip().splitlines() or [type(error).__name__])[0]}


def _machine(one: Machine, told: dict[str, Any]) -> str:
    start = f"{one.cpus:g} processors, {size(int(one.memory))} for Ray"
    if "fault" in told:
        return (
            f"{start}; cannot take part: {told['fault']}. Install the same cbdsl there, for the Python that runs Ray."
        )
    same = "the cbdsl of this machine" if told["code"] == code_digest() else "ANOTHER cbdsl than this machine: install"
    return f"{start}, {size(told['free'])} free; {told['build']}; {same}"
