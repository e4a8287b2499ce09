"""Every attack against every defence, on the sweep machinery.

Says what to run and what came out; how it looks is `report.arena_page`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cbdsl import plugins, register
from cbdsl.errors import UserError, unknown
from cbdsl.files import write_json
from cbdsl.presets import preset
from cbdsl.runs.records import Summary
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.study.sweep import OnProgress, Task, finished, perform, write_rows

TOLERATED = 0.02  # a defence stands if it loses no more accuracy than this against its clean run


@dataclass(frozen=True)
class Defence:
    """One way of learning together among attackers. All train on D_tr beside their own data."""

    label: str
    settings: Mapping[str, Any]
    ours: bool = False


def _fedavg(aggregator: str, label: str) -> Defence:
    return Defence(label, {"method": "fedavg", "shared": "train", "defence.aggregator": aggregator})


_CB_DSL: dict[str, Any] = {"method": "cb-dsl", "shared": "both"}
_GUARD: dict[str, Any] = {**_CB_DSL, "defence.guard": True, "defence.commitment": True}

DEFENCES: dict[str, Defence] = {
    "fedavg": _fedavg("mean", "FedAvg"),
    "median": _fedavg("median", "median"),
    "trimmed-mean": _fedavg("trimmed-mean", "trimmed mean"),
    "krum": _fedavg("krum", "Krum"),
    "multi-krum": _fedavg("multi-krum", "multi-Krum"),
    "geometric-median": _fedavg("geometric-median", "geometric median"),
    "centred-clipping": _fedavg("centred-clipping", "centred clipping"),
    "bulyan": _fedavg("bulyan", "Bulyan"),
    "nnm": _fedavg("nnm+trimmed-mean", "mixing + trimmed mean"),
    "fltrust": _fedavg("fltrust", "FLTrust"),
    "zeno": _fedavg("zeno", "Zeno"),
    "cb-dsl": Defence("CB-DSL + D_G", _CB_DSL, ours=True),
    "guard": Defence("CB-DSL + guard", _GUARD, ours=True),
    "soup": Defence("CB-DSL + guard + soup", {**_GUARD, "selection.name": "soup", "selection.k": 3}, ours=True),
}


def defence_named(name: str) -> Defence:
    """A defence of the arena, or a registered aggregator, selection or method as one."""
    if name in DEFENCES:
        return DEFENCES[name]
    if name in register.aggregator:
        return _fedavg(name, name)
    if name in register.selection:
        return Defence(f"CB-DSL + guard + {name}", {**_GUARD, "selection.name": name}, ours=True)
    if name in register.method:
        ours = register.method.get(name).conversation == "swarm"
        return Defence(name, {"method": name, "shared": "both" if ours else "train"}, ours)
    known = [*register.aggregator.names(), *register.selection.names(), *register.method.names()]
    raise unknown("defence", name, dict.fromkeys([*DEFENCES, *known]))


@dataclass(frozen=True)
class Contest:
    """What meets what."""

    attacks: tuple[str, ...] = field(default_factory=lambda: tuple(register.attack.names()))
    defences: tuple[str, ...] = tuple(DEFENCES)
    byzantine: tuple[int, ...] = (1, 5, 10, 20)
    seeds: tuple[int, ...] = (0,)
    preset: str = "strong-iid"
    settings: Mapping[str, Any] = field(default_factory=lambda: {"local.epochs": 1})
    plugins: tuple[str, ...] = ()  # files or modules that register attacks of your own

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugins", plugins.load(self.plugins))
        for name in self.attacks:
            register.attack.get(name)
        for name in self.defences:
            defence_named(name)
        if not (self.attacks and self.defences and self.byzantine and self.seeds):
            raise UserError("An arena needs at least one attack, one defence, one number of attackers and one seed.")
        if min(self.byzantine) < 1:
            raise UserError(f"Numbers of attackers start at 1; given {min(self.byzantine)}. Clean runs come anyway.")

    def spec(self, defence: str, attack: str, byzantine: int, seed: int) -> Spec:
        """One run; without an attack it is the clean one."""
        attacked = {"attack.name": attack, "attack.byzantine": byzantine} if attack else {}
        settings = {**self.settings, **defence_named(defence).settings, **attacked, "seed": seed}
        settings["plugins"] = list(self.plugins)
        return resolve(preset(self.preset).with_settings(settings))


QUICK = Contest(
    attacks=("liar", "alie", "memoriser", "staller"),
    defences=("fedavg", "median", "krum", "cb-dsl", "guard", "soup"),
    byzantine=(20,),
    settings={"local.epochs": 1, "rounds": 5},
)


@dataclass(frozen=True)
class Bout:
    """One defence against one attack with so many attackers, over all seeds; a clean one has no attack."""

    defence: str
    attack: str
    byzantine: int
    seeds: int
    accuracy: float  # mean over seeds, at the end
    lowest: float
    highest: float
    lost: float  # accuracy of the clean runs minus this one's
    uplink_bytes: float
    wasted_bytes: float  # uploads that were not used
    uploads: float
    banned: float  # attackers that were banned
    false_bans: float  # honest workers that were banned
    precision: float | None  # of all that were banned, how many were attackers
    recall: float | None  # of all attackers, how many were banned; none where nobody can be
    attack_success: float | None  # of a backdoor

    @property
    def stands(self) -> bool:
        """Whether the attack costs no more than is tolerated."""
        return self.lost <= TOLERATED


@dataclass(frozen=True)
class Arena:
    """What an arena leaves."""

    contest: Contest
    bouts: tuple[Bout, ...]


def hold(contest: Contest, out: Path, jobs: int | None = None, on_progress: OnProgress | None = None) -> Arena:
    """Run what is missing in a folder, then judge every bout anew."""
    perform(tasks_of(contest), out, jobs, on_progress)
    bouts = judge(contest, lambda spec: finished(Task(spec).folder(out)).summary)
    write_rows([asdict(bout) for bout in bouts], out)
    write_json(out / "contest.json", asdict(contest))
    return Arena(contest, tuple(bouts))


def tasks_of(contest: Contest) -> list[Task]:
    """Every run once: the clean ones first, so that an arena that was stopped can be compared."""
    return list(dict.fromkeys(Task(spec) for cell in cells(contest) for spec in _specs(contest, *cell)))


def cells(contest: Contest) -> list[tuple[str, str, int]]:
    """Defence, attack and number of attackers of every bout, clean ones first."""
    clean = [(defence, "", 0) for defence in contest.defences]
    return clean + [
        (defence, attack, count)
        for count in sorted(contest.byzantine, reverse=True)
        for attack in contest.attacks
        for defence in contest.defences
    ]


def judge(contest: Contest, result: Callable[[Spec], Summary]) -> list[Bout]:
    """Put the runs of every bout together."""
    clean: dict[str, float] = {}
    bouts = []
    for defence, attack, count in cells(contest):
        summaries = [result(spec) for spec in _specs(contest, defence, attack, count)]
        accuracies = [summary.final_accuracy for summary in summaries]
        clean.setdefault(defence, _mean(accuracies))
        caught = sum(len(set(one.banned) & set(one.byzantine)) for one in summaries)
        banned = sum(len(one.banned) for one in summaries)
        success = [one.attack_success for one in summaries if one.attack_success is not None]
        screens = summaries[0].conversation == "swarm"
        bouts.append(
            Bout(
                defence=defence,
                attack=attack,
                byzantine=count,
                seeds=len(summaries),
                accuracy=_mean(accuracies),
                lowest=min(accuracies),
                highest=max(accuracies),
                lost=clean[defence] - _mean(accuracies),
                uplink_bytes=_mean([one.uplink_bytes for one in summaries]),
                wasted_bytes=_mean([one.wasted_uplink_bytes for one in summaries]),
                uploads=_mean([one.uploads for one in summaries]),
                banned=caught / len(summaries),
                false_bans=(banned - caught) / len(summaries),
                precision=caught / banned if banned else None,
                recall=caught / (count * len(summaries)) if screens and count else None,
                attack_success=_mean(success) if success else None,
            )
        )
    return bouts


def _specs(contest: Contest, defence: str, attack: str, count: int) -> list[Spec]:
    return [contest.spec(defence, attack, count, seed) for seed in contest.seeds]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
