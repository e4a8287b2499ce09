"""Every attack against every defence, on the sweep machinery.

A bout is judged against the same defence with the same attackers absent: what the attack costs beyond the workers that
it is made by. Says what to run and what came out; how it looks is `report.arena_page`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cbdsl import register
from cbdsl.attacks.base import make_attack
from cbdsl.errors import UserError, unknown
from cbdsl.presets import preset
from cbdsl.runs.records import Summary, lowest_of
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies.sweep import OnProgress, Task, finished, perform, write_rows
from cbdsl.util.files import write_json

TOLERATED = 0.02  # a defence stands if it loses no more accuracy than this against the honest remainder
TOLERATED_AIMED = 0.1  # and it keeps a class that is aimed at if that one loses no more than this
ABSENT = "absent"  # the attack that leaves the honest remainder


@dataclass(frozen=True)
class Defence:
    """One way of learning together among attackers. All train on D_tr beside their own data."""

    label: str
    settings: Mapping[str, Any]
    ours: bool = False


def _fedavg(aggregator: str, label: str) -> Defence:
    return Defence(f"{label} + D_tr", {"method": "fedavg", "shared": "train", "defence.aggregator": aggregator})


_CB_DSL: dict[str, Any] = {"method": "cb-dsl", "shared": "both"}
_GUARD: dict[str, Any] = {**_CB_DSL, "defence.guard": True, "defence.commitment": True}

_ROTATION: dict[str, Any] = {
    **_GUARD, "method": "restart", "selection.name": "rotation", "codec.up": "q4", "codec.down": "q4",
}  # fmt: skip

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
    "rotation": Defence("verified rotation + guard", _ROTATION, ours=True),
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
        label, shared = (name, "both") if ours else (f"{name} + D_tr", "train")
        return Defence(label, {"method": name, "shared": shared}, ours)
    known = [*register.aggregator.names(), *register.selection.names(), *register.method.names()]
    raise unknown("defence", name, dict.fromkeys([*DEFENCES, *known]), register.OWN)


@dataclass(frozen=True)
class ArenaPlan:
    """What meets what."""

    attacks: tuple[str, ...] = field(
        default_factory=lambda: tuple(name for name in register.attack.names() if name != ABSENT)
    )
    defences: tuple[str, ...] = tuple(DEFENCES)
    byzantine: tuple[int, ...] = (1, 5, 20)
    seeds: tuple[int, ...] = (0, 1, 2)  # of our own defences and of FedAvg
    other_seeds: tuple[int, ...] = (0,)  # of all other defences
    presets: tuple[str, ...] = ("strong-iid", "strong-noniid")
    settings: Mapping[str, Any] = field(default_factory=lambda: {"local.epochs": 1})
    plugins: tuple[str, ...] = ()  # files or modules that register attacks of your own

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugins", register.load(self.plugins))
        for name in self.attacks:
            register.attack.get(name)
        for name in self.defences:
            defence_named(name)
        for name in self.presets:
            preset(name)
        if not all((self.attacks, self.defences, self.byzantine, self.seeds, self.other_seeds, self.presets)):
            raise UserError(
                "An arena needs at least one attack, one defence, one number of attackers, one seed and one preset."
            )
        if ABSENT in self.attacks:
            raise UserError(f"'{ABSENT}' is what every attack is compared with, and is run anyway. Leave it out.")
        if min(self.byzantine) < 1:
            raise UserError(f"Numbers of attackers start at 1; given {min(self.byzantine)}. Clean runs come anyway.")

    def seeds_of(self, defence: str) -> tuple[int, ...]:
        """More where it matters: of our own defences, and of FedAvg, which they are compared with."""
        return self.seeds if defence_named(defence).ours or defence == "fedavg" else self.other_seeds

    def spec(self, cell: ArenaCell, seed: int) -> Spec:
        """One run."""
        attacked = {"attack.name": cell.attack, "attack.byzantine": cell.byzantine} if cell.attack else {}
        common = {key: value for key, value in self.settings.items() if cell.heeds(key)}
        settings = {**common, **defence_named(cell.defence).settings, **attacked, "seed": seed}
        settings["plugins"] = list(self.plugins)
        return resolve(preset(cell.preset).with_settings(settings))

    def specs(self, cell: ArenaCell) -> list[Spec]:
        """All runs of a bout, a seed each."""
        return [self.spec(cell, seed) for seed in self.seeds_of(cell.defence)]


class ArenaCell(NamedTuple):
    """Who meets whom where; without an attack it is the clean run, with `ABSENT` the honest remainder."""

    preset: str
    defence: str
    attack: str = ""
    byzantine: int = 0

    def heeds(self, key: str) -> bool:
        """Whether a setting of the contest is for this bout: not if it sets something of another attack."""
        group, _, rest = key.partition(".")
        if group == "attack":
            return self.attack not in {"", ABSENT}
        part = rest.partition(".")[0]
        return group != "options" or part not in register.attack or part == self.attack


QUICK = ArenaPlan(
    attacks=("liar", "alie", "memoriser", "staller"),
    defences=("fedavg", "median", "krum", "cb-dsl", "guard", "soup"),
    byzantine=(20,),
    seeds=(0,),
    presets=("strong-iid",),
    settings={"local.epochs": 1, "rounds": 5},
)


@dataclass(frozen=True)
class Match:
    """One defence against one attack with so many attackers, over all seeds; a clean one has no attack."""

    preset: str
    defence: str
    attack: str
    byzantine: int
    seeds: int
    accuracy: float  # mean over seeds, at the end
    lowest: float
    highest: float
    remainder: float  # accuracy of the same defence with the attackers absent; its own, where nobody attacks
    lost: float  # what is missing to that
    uplink_bytes: float
    wasted_bytes: float  # uploads that were not used
    uploads: float
    banned: float  # attackers that were banned
    false_bans: float  # honest workers that were banned
    precision: float | None  # of all that were banned, how many were attackers
    recall: float | None  # of all attackers, how many were banned; none where nobody can be
    attack_success: float | None  # of a backdoor
    aimed_accuracy: float | None  # of the worst of the classes that the attack aims at
    aimed_remainder: float | None  # the same with the attackers absent

    @property
    def attacked(self) -> bool:
        """Whether somebody attacks: not in clean runs, not among the honest remainder."""
        return self.attack not in {"", ABSENT}

    @property
    def stands(self) -> bool:
        """Whether the attack costs no more than is tolerated."""
        return self.lost <= TOLERATED

    @property
    def keeps_aimed(self) -> bool:
        """Whether the classes that the attack aims at lose no more than is tolerated."""
        if self.aimed_accuracy is None or self.aimed_remainder is None:
            return True
        return self.aimed_remainder - self.aimed_accuracy <= TOLERATED_AIMED


@dataclass(frozen=True)
class Arena:
    """What an arena leaves."""

    contest: ArenaPlan
    bouts: tuple[Match, ...]


def run_arena(
    contest: ArenaPlan, out: Path, jobs: int | None = None, on_progress: OnProgress | None = None, on: str | None = None
) -> Arena:
    """Run what is missing in a folder, then judge every bout anew."""
    perform(tasks_of(contest), out, jobs, on_progress, on)
    bouts = judge_match(contest, lambda spec: finished(Task(spec).folder(out)).summary)
    write_rows([asdict(bout) for bout in bouts], out)
    write_json(out / "contest.json", asdict(contest))
    return Arena(contest, tuple(bouts))


def tasks_of(contest: ArenaPlan) -> list[Task]:
    """Every run once: what bouts are compared with first, so that an arena that was stopped can be judged."""
    return list(dict.fromkeys(Task(spec) for cell in cells(contest) for spec in contest.specs(cell)))


def cells(contest: ArenaPlan) -> list[ArenaCell]:
    """Every bout: clean ones first, then those without the attackers, then the attacks."""
    counts = sorted(contest.byzantine, reverse=True)
    clean = [ArenaCell(where, defence) for where in contest.presets for defence in contest.defences]
    return clean + [
        ArenaCell(where, defence, attack, count)
        for attacks in ((ABSENT,), contest.attacks)
        for where in contest.presets
        for count in counts
        for attack in attacks
        for defence in contest.defences
    ]


def judge_match(contest: ArenaPlan, result: Callable[[Spec], Summary]) -> list[Match]:
    """Put the runs of every bout together."""
    remainders: dict[ArenaCell, list[Summary]] = {}
    bouts = []
    for cell in cells(contest):
        specs = contest.specs(cell)
        summaries = [result(spec) for spec in specs]
        if cell.attack == ABSENT:
            remainders[cell] = summaries
        aims = make_attack(specs[0]).aims if cell.attack else ()
        bouts.append(_match(cell, summaries, remainders.get(cell._replace(attack=ABSENT), summaries), aims))
    return bouts


def _match(cell: ArenaCell, summaries: Sequence[Summary], without: Sequence[Summary], aims: tuple[int, ...]) -> Match:
    """Put the runs of one bout together. without: the same runs with the attackers absent."""
    accuracies = [one.final_accuracy for one in summaries]
    accuracy, remainder = _mean(accuracies), _mean([one.final_accuracy for one in without])
    caught = sum(len(set(one.banned) & set(one.byzantine)) for one in summaries)
    wronged = sum(one.honest_banned for one in summaries)
    screens = summaries[0].conversation == "swarm"
    return Match(
        **cell._asdict(),
        seeds=len(summaries),
        accuracy=accuracy,
        lowest=min(accuracies),
        highest=max(accuracies),
        remainder=remainder,
        lost=remainder - accuracy,
        uplink_bytes=_mean([one.uplink_bytes for one in summaries]),
        wasted_bytes=_mean([one.wasted_uplink_bytes for one in summaries]),
        uploads=_mean([one.uploads for one in summaries]),
        banned=caught / len(summaries),
        false_bans=wronged / len(summaries),
        precision=caught / (caught + wronged) if caught + wronged else None,
        recall=caught / (cell.byzantine * len(summaries)) if screens and cell.byzantine else None,
        attack_success=_mean_known(one.attack_success for one in summaries),
        aimed_accuracy=_mean_known(one.aimed_accuracy for one in summaries),
        aimed_remainder=_mean_known(lowest_of(one.class_accuracy, aims) for one in without),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None
