"""The arena: every attack against every defence.

A match is judged against the same defence with the same attackers absent, so a loss is the effect of the attack and not
of the workers that it lacks. `report.arena_page` draws the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cbdsl import register
from cbdsl.algorithm.aggregators import parse_aggregator
from cbdsl.attacks.attack import make_attack
from cbdsl.data.dataset import load_data
from cbdsl.errors import UserError, unknown
from cbdsl.presets import preset
from cbdsl.runs.records import Summary, lowest_of
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies.sweep import OnProgress, Task, explain_failures, read_run, try_tasks, write_rows
from cbdsl.util.files import write_json

TOLERATED = 0.02  # a defence withstands an attack if it loses at most this accuracy against the honest remainder
TOLERATED_TARGETED = 0.1  # and it protects a targeted class if that class loses at most this
ABSENT = "absent"  # the attack in which attackers do nothing, which leaves the honest remainder


@dataclass(frozen=True)
class Defence:
    """A method with its defence. All defences train on D_tr beside the workers' own data."""

    label: str
    settings: Mapping[str, Any]
    ours: bool = False

    @property
    def family(self) -> str:
        """The family of its aggregator or selection."""
        if rule := self.settings.get("defence.aggregator"):
            return register.aggregator.family(parse_aggregator(rule)[1])
        return register.selection.family(self.settings.get("selection.name", "best")) if self.ours else ""


def _fedavg(aggregator: str, label: str) -> Defence:
    return Defence(f"{label} + D_tr", {"method": "fedavg", "shared": "train", "defence.aggregator": aggregator})


_CB_DSL: dict[str, Any] = {"method": "cb-dsl", "shared": "both"}
_GUARD: dict[str, Any] = {**_CB_DSL, "defence.guard": True, "defence.commitment": True}

_ROTATION: dict[str, Any] = {
    **_GUARD,
    "method": "restart",
    "selection.name": "rotation",
    "codec.up": "q4",
    "codec.down": "q4",
}

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
    "dnc": _fedavg("dnc", "DnC"),
    "sign-guard": _fedavg("sign-guard", "SignGuard"),
    "flame": _fedavg("flame", "FLAME"),
    "align-ins": _fedavg("align-ins", "AlignIns"),
    "rlr": _fedavg("rlr", "robust learning rate"),
    "bant": _fedavg("bant", "BANT"),
    "cb-dsl": Defence("CB-DSL + D_G", _CB_DSL, ours=True),
    "guard": Defence("CB-DSL + guard", _GUARD, ours=True),
    "rotation": Defence("verified rotation + guard", _ROTATION, ours=True),
    "soup": Defence("CB-DSL + guard + soup", {**_GUARD, "selection.name": "soup", "selection.k": 3}, ours=True),
}
_CLUSTERING = ("sign-guard", "flame")  # need scikit-learn, so an arena has them on request


def get_defence(name: str) -> Defence:
    """Return a defence by name; an aggregator such as `bucketing+krum`, a selection or a method is one, too."""
    if name in DEFENCES:
        return DEFENCES[name]
    if name in register.aggregator or "+" in name:
        parse_aggregator(name)
        return _fedavg(name, name)
    if name in register.selection:
        return Defence(f"CB-DSL + guard + {name}", {**_GUARD, "selection.name": name}, ours=True)
    if name in register.method:
        ours = register.method.get(name).conversation == "swarm"
        label, shared = (name, "both") if ours else (f"{name} + D_tr", "train")
        return Defence(label, {"method": name, "shared": shared}, ours)
    known = [*register.aggregator.names(), *register.selection.names(), *register.method.names()]
    raise unknown("defence", name, dict.fromkeys([*DEFENCES, *known]), register.OWN)


FAMILY = "family:"  # prefix of a name that stands for all attacks or defences of a family


def find_attacks(names: Iterable[str]) -> tuple[str, ...]:
    """Return attacks by name or by family, as `family:backdoor`; each once."""
    families = {name: register.attack.family(name) for name in register.attack.names() if name != ABSENT}
    return _find(names, families, "attack")


def find_defences(names: Iterable[str]) -> tuple[str, ...]:
    """Return defences by name or by family, as `family:distances`, including a user's aggregators; each once."""
    usual = [defence.settings for defence in DEFENCES.values()]
    others = [name for name in register.aggregator.names() if get_defence(name).settings not in usual]
    return _find(names, {name: get_defence(name).family for name in [*DEFENCES, *others]}, "defence")


def _find(names: Iterable[str], families: Mapping[str, str], kind: str) -> tuple[str, ...]:
    """Return names with families replaced by their members. families: the family of each known name."""
    found: list[str] = []
    for name in names:
        wanted = name.removeprefix(FAMILY)
        if wanted == name:
            found.append(name)
            continue
        if not wanted or wanted not in families.values():
            raise unknown(f"family of {kind}s", wanted, dict.fromkeys(filter(None, families.values())))
        found += [one for one, family in families.items() if family == wanted]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class ArenaPlan:
    """The attacks, defences and settings of an arena."""

    attacks: tuple[str, ...] = field(
        default_factory=lambda: tuple(name for name in register.attack.names() if name != ABSENT)
    )
    defences: tuple[str, ...] = tuple(name for name in DEFENCES if name not in _CLUSTERING)
    byzantine: tuple[int, ...] = (1, 5, 20)
    seeds: tuple[int, ...] = (0, 1, 2)  # of our own defences and of FedAvg
    other_seeds: tuple[int, ...] = (0,)  # of all other defences
    presets: tuple[str, ...] = ("strong-iid", "strong-noniid")
    settings: Mapping[str, Any] = field(default_factory=lambda: {"local.epochs": 1})
    plugins: tuple[str, ...] = ()  # files or modules that register attacks of your own

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugins", register.load(self.plugins))
        object.__setattr__(self, "attacks", find_attacks(self.attacks))
        object.__setattr__(self, "defences", find_defences(self.defences))
        for name in self.attacks:
            register.attack.get(name)
        for name in self.defences:
            get_defence(name)
        for name in self.presets:
            preset(name)
        if not all((self.attacks, self.defences, self.byzantine, self.seeds, self.other_seeds, self.presets)):
            raise UserError(
                "An arena needs at least one attack, one defence, one number of attackers, one seed and one preset.",
                code="out-of-range",
            )
        if ABSENT in self.attacks:
            raise UserError(
                f"Every attack is compared with '{ABSENT}', which is run anyway. Leave it out.", code="no-effect"
            )
        if min(self.byzantine) < 1:
            raise UserError(
                f"Numbers of attackers start at 1; given {min(self.byzantine)}. Clean runs are made anyway.",
                code="out-of-range",
            )

    def seeds_of(self, defence: str) -> tuple[int, ...]:
        """Return the seeds of a defence: more for our own, and for FedAvg, which they are compared with."""
        return self.seeds if get_defence(defence).ours or defence == "fedavg" else self.other_seeds

    def spec(self, cell: ArenaCell, seed: int) -> Spec:
        """Return the spec of one run."""
        attacked = {"attack.name": cell.attack, "attack.byzantine": cell.byzantine} if cell.attack else {}
        common = {key: value for key, value in self.settings.items() if cell.uses(key)}
        settings = {**common, **get_defence(cell.defence).settings, **attacked, "seed": seed}
        settings["plugins"] = list(self.plugins)
        return resolve(preset(cell.preset).with_settings(settings))

    def specs(self, cell: ArenaCell) -> list[Spec]:
        """Return the specs of a match, one per seed."""
        return [self.spec(cell, seed) for seed in self.seeds_of(cell.defence)]


class ArenaCell(NamedTuple):
    """A match to run; without an attack it is the clean run, with `ABSENT` the honest remainder."""

    preset: str
    defence: str
    attack: str = ""
    byzantine: int = 0

    def uses(self, key: str) -> bool:
        """Return whether a setting of the plan is for this match and not for another attack."""
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
    """The result of one defence against one attack over all seeds; a clean match has no attack."""

    preset: str
    defence: str
    attack: str
    byzantine: int
    seeds: int
    accuracy: float  # mean over seeds, at the end
    lowest: float
    highest: float
    remainder: float  # accuracy of the same defence with the attackers absent; its own in a clean match
    lost: float  # remainder - accuracy
    uplink_bytes: float
    wasted_bytes: float  # uploads that were not used
    uploads: float
    banned: float  # attackers that were banned
    false_bans: float  # honest workers that were banned
    precision: float | None  # share of the banned workers that were attackers
    recall: float | None  # share of the attackers that were banned; None where the method cannot ban
    attack_success: float | None  # of a backdoor
    aimed_accuracy: float | None  # of the worst of the classes that the attack targets
    aimed_remainder: float | None  # the same with the attackers absent

    @property
    def attacked(self) -> bool:
        """Return whether there is an attack: not in clean runs, not in the honest remainder."""
        return self.attack not in {"", ABSENT}

    @property
    def withstands(self) -> bool:
        """Return whether the attack costs no more than is tolerated."""
        return self.lost <= TOLERATED

    @property
    def protects_targets(self) -> bool:
        """Return whether the targeted classes lose no more than is tolerated."""
        if self.aimed_accuracy is None or self.aimed_remainder is None:
            return True
        return self.aimed_remainder - self.aimed_accuracy <= TOLERATED_TARGETED


@dataclass(frozen=True)
class Arena:
    """The results of an arena."""

    plan: ArenaPlan  # the defences and attacks that have results
    matches: tuple[Match, ...]
    failed: tuple[str, ...] = ()  # messages of runs that failed; their matches are missing


def run_arena(
    plan: ArenaPlan, out: Path, jobs: int | None = None, on_progress: OnProgress | None = None, on: str | None = None
) -> Arena:
    """Run what is missing in a folder and judge every match; if a run fails, only its matches are missing."""
    tasks = list_tasks(plan)
    require_classes(task.spec for task in tasks)
    failed = try_tasks(tasks, out, jobs, on_progress, on)

    def read(spec: Spec) -> Summary | None:
        task = Task(spec)
        return read_run(task.folder(out)).summary if task.is_done(out) else None

    matches = judge_matches(plan, read)
    if matches:
        write_rows([asdict(match) for match in matches], out)
        write_json(out / "contest.json", asdict(plan))
    if not failed:
        return Arena(plan, tuple(matches))
    defences, attacks = _find_complete(plan, matches)
    if not defences:
        raise explain_failures(failed, len(tasks), out)
    there = tuple(match for match in matches if match.defence in defences)
    return Arena(replace(plan, defences=defences, attacks=attacks), there, tuple(failed))


def _find_complete(plan: ArenaPlan, matches: Sequence[Match]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the defences with a match in every setting, and the attacks with any match against these."""
    there = {(match.defence, match.preset, match.byzantine) for match in matches if match.attacked}
    places = list(itertools.product(plan.presets, plan.byzantine))
    defences = tuple(name for name in plan.defences if all((name, *place) in there for place in places))
    fought = {match.attack for match in matches if match.defence in defences}
    return defences, tuple(name for name in plan.attacks if name in fought)


def list_tasks(plan: ArenaPlan) -> list[Task]:
    """Return every run once; those that the others are compared with come first."""
    return list(dict.fromkeys(Task(spec) for cell in list_cells(plan) for spec in plan.specs(cell)))


def require_classes(specs: Iterable[Spec]) -> None:
    """Refuse data of another task than classification: a match is judged by accuracy."""
    sources = {(spec.data.source, spec.data.task, spec.data.target): spec for spec in specs}
    for spec in sources.values():
        task = load_data(spec.data, spec.options).task
        if task != "classification":
            raise UserError(
                f"The arena judges by accuracy, and the task of '{spec.data.source}' is {task}. Compare attacks and "
                "defences with cbdsl sweep --over attack.name=... instead.",
                code="not-supported",
            )


def list_cells(plan: ArenaPlan) -> list[ArenaCell]:
    """Return every match to run: clean ones, then those with absent attackers, then the attacks."""
    counts = sorted(plan.byzantine, reverse=True)
    clean = [ArenaCell(where, defence) for where in plan.presets for defence in plan.defences]
    return clean + [
        ArenaCell(where, defence, attack, count)
        for attacks in ((ABSENT,), plan.attacks)
        for where in plan.presets
        for count in counts
        for attack in attacks
        for defence in plan.defences
    ]


def judge_matches(plan: ArenaPlan, result: Callable[[Spec], Summary | None]) -> list[Match]:
    """Return the results of every match. result: returns the summary of a run, or None if it failed.

    Matches of a defence whose clean run or honest remainder is missing cannot be judged, and are left out.
    """
    found: dict[ArenaCell, list[Summary]] = {}
    matches = []
    for cell in list_cells(plan):
        specs = plan.specs(cell)
        summaries = [summary for summary in map(result, specs) if summary is not None]
        clean, without = ArenaCell(cell.preset, cell.defence), cell._replace(attack=ABSENT)
        if len(summaries) < len(specs) or (cell.attack and not {clean, without} - {cell} <= set(found)):
            continue
        found[cell] = summaries
        aims = make_attack(specs[0]).aims if cell.attack else ()
        matches.append(_judge_match(cell, summaries, found[without] if cell.attack else summaries, aims))
    return matches


def _judge_match(
    cell: ArenaCell, summaries: Sequence[Summary], without: Sequence[Summary], aims: tuple[int, ...]
) -> Match:
    """Return the result of one match; without: the same runs with the attackers absent."""
    accuracies = [run.final_accuracy for run in summaries]
    accuracy, remainder = _mean(accuracies), _mean([run.final_accuracy for run in without])
    banned = sum(len(set(run.banned) & set(run.byzantine)) for run in summaries)
    false_bans = sum(run.honest_banned for run in summaries)
    screens = summaries[0].conversation == "swarm"
    return Match(
        **cell._asdict(),
        seeds=len(summaries),
        accuracy=accuracy,
        lowest=min(accuracies),
        highest=max(accuracies),
        remainder=remainder,
        lost=remainder - accuracy,
        uplink_bytes=_mean([run.uplink_bytes for run in summaries]),
        wasted_bytes=_mean([run.wasted_uplink_bytes for run in summaries]),
        uploads=_mean([run.uploads for run in summaries]),
        banned=banned / len(summaries),
        false_bans=false_bans / len(summaries),
        precision=banned / (banned + false_bans) if banned + false_bans else None,
        recall=banned / (cell.byzantine * len(summaries)) if screens and cell.byzantine else None,
        attack_success=_mean_known(run.attack_success for run in summaries),
        aimed_accuracy=_mean_known(run.aimed_accuracy for run in summaries),
        aimed_remainder=_mean_known(lowest_of(run.class_accuracy, aims) for run in without),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _mean(known) if known else None
