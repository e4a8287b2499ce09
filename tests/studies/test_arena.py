from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cbdsl import register
from cbdsl.attacks.attack import make_attack
from cbdsl.cli.main import main
from cbdsl.report.arena_page import write_arena_page
from cbdsl.runs.build import byzantine_workers
from cbdsl.runs.records import Summary
from cbdsl.spec import Spec
from cbdsl.studies.arena import (
    ABSENT,
    DEFENCES,
    QUICK,
    ArenaCell,
    ArenaPlan,
    Match,
    judge_matches,
    list_cells,
    list_tasks,
    run_arena,
)
from support.refusals import refused_as

SMALL = ArenaPlan(
    attacks=("liar", "backdoor"),
    defences=("fedavg", "median", "guard"),
    byzantine=(1, 2),
    seeds=(0, 1),
    presets=("strong-iid",),
)


def results(accuracy: Callable[[Spec], float]) -> Callable[[Spec], Summary]:
    """Runs that end as a function says; CB-DSL bans worker 0, who is an attacker, and worker 9, who is not."""

    def of(spec: Spec) -> Summary:
        count, name = spec.attack.byzantine, spec.attack.name
        bans = count and name != ABSENT and spec.method == "cb-dsl"
        return SimpleNamespace(  # type: ignore[return-value]
            conversation="average" if spec.method == "fedavg" else "swarm", final_accuracy=accuracy(spec),
            uplink_bytes=1000, wasted_uplink_bytes=100, uploads=5,
            byzantine=list(range(count)), banned=[0, 9] if bans else [], honest_banned=1 if bans else 0,
            attack_success=0.25 * spec.seed if name == "backdoor" else None,
            class_accuracy=[0.95 - 0.1 * spec.seed, 0.5, None],
            aimed_accuracy=0.25 + 0.5 * spec.seed if count and make_attack(spec).aims else None,
        )  # fmt: skip

    return of


def judged(plan: ArenaPlan, accuracy: Callable[[Spec], float]) -> dict[ArenaCell, Match]:
    matches = judge_matches(plan, results(accuracy))
    return {ArenaCell(one.preset, one.defence, one.attack, one.byzantine): one for one in matches}


def test_a_plan_is_every_attack_on_every_defence_with_clean_runs_and_remainders_first() -> None:
    found = list_cells(SMALL)
    assert len(found) == 3 + 3 * 2 + 3 * 2 * 2
    assert [cell.attack for cell in found[:9]] == [""] * 3 + [ABSENT] * 6
    tasks = list_tasks(SMALL)
    assert len(tasks) == len(found) // 3 * (2 + 2 + 1)  # one seed for the median
    assert len({task.spec.key() for task in tasks}) == len(tasks)
    spec = SMALL.spec(ArenaCell("strong-iid", "guard", "liar", 2), 1)
    assert (spec.attack.name, spec.attack.byzantine, spec.seed, spec.defence.guard) == ("liar", 2, 1, True)
    assert spec.defence.declared == 2
    assert SMALL.spec(ArenaCell("strong-iid", "guard"), 1).attack.byzantine == 0


@pytest.mark.parametrize("defence", DEFENCES)
def test_the_remainder_is_a_run_of_the_same_spec_with_the_same_attackers_absent(defence: str) -> None:
    cell = ArenaCell("strong-iid", defence, "alie", 20)
    attacked, without = SMALL.spec(cell, 1), SMALL.spec(cell._replace(attack=ABSENT), 1)
    assert without == replace(attacked, attack=replace(attacked.attack, name=ABSENT))
    assert without.defence.declared == 20
    assert byzantine_workers(without) == byzantine_workers(attacked)


@pytest.mark.parametrize("key", ["attack.scale", "options.copycat.scale"])
def test_a_setting_of_an_attack_is_for_its_own_matches(key: str) -> None:
    plan = replace(SMALL, attacks=("copycat", "liar")[: 1 + key.startswith("options")], settings={key: 0.5})
    for cell in list_cells(plan):
        made = make_attack(plan.spec(cell, 0))
        assert (getattr(made, "scale", None) == 0.5) is (cell.attack == "copycat")


def test_seeds_are_spent_where_they_matter() -> None:
    plan = ArenaPlan()
    repeated = {name for name in DEFENCES if plan.seeds_of(name) == (0, 1, 2)}
    assert repeated == {"fedavg", *(name for name, defence in DEFENCES.items() if defence.ours)}
    assert {plan.seeds_of(name) for name in DEFENCES if name not in repeated} == {(0,)}
    assert (plan.presets, plan.byzantine) == (("strong-iid", "strong-noniid"), (1, 5, 20))
    assert ABSENT not in plan.attacks
    assert {(task.spec.preset, task.spec.seed) for task in list_tasks(QUICK)} == {("strong-iid", 0)}


def test_a_match_combines_its_seeds_and_is_compared_with_the_remainder() -> None:
    def accuracy(spec: Spec) -> float:
        if not spec.attack.byzantine:
            return 0.99  # must not matter
        absent = 0.9 - 0.05 * spec.attack.byzantine + 0.02 * spec.seed
        return absent if spec.attack.name == ABSENT else absent - (0.1 if spec.method == "cb-dsl" else 0.01)

    by_key = judged(SMALL, accuracy)
    match = by_key[ArenaCell("strong-iid", "guard", "liar", 2)]
    assert (match.accuracy, match.lowest, match.highest) == pytest.approx((0.71, 0.7, 0.72))
    assert (match.remainder, match.lost) == pytest.approx((0.81, 0.1))
    assert not match.withstands
    assert (match.precision, match.recall, match.banned, match.false_bans) == (0.5, 0.5, 1.0, 1.0)
    assert by_key[ArenaCell("strong-iid", "guard", "backdoor", 1)].attack_success == 0.125
    for cell in (ArenaCell("strong-iid", "guard"), ArenaCell("strong-iid", "guard", ABSENT, 2)):
        assert (by_key[cell].lost, by_key[cell].withstands, by_key[cell].attacked) == (0.0, True, False)
    plain = by_key[ArenaCell("strong-iid", "fedavg", "liar", 1)]
    assert plain.withstands  # one point below the remainder, though fourteen below the clean run
    assert plain.lost == pytest.approx(0.01)
    assert (plain.precision, plain.recall) == (None, None)  # FedAvg bans nobody
    assert by_key[ArenaCell("strong-iid", "median", "liar", 1)].seeds == 1


def test_presets_are_judged_apart() -> None:
    plan = replace(SMALL, presets=("strong-iid", "strong-noniid"))

    def accuracy(spec: Spec) -> float:
        start = 0.9 if spec.preset == "strong-iid" else 0.6
        return start - 0.3 * (spec.attack.name == "liar" and spec.preset == "strong-noniid" and spec.attack.byzantine)

    by_key = judged(plan, accuracy)
    assert len(by_key) == 2 * len(list_cells(SMALL))
    assert by_key[ArenaCell("strong-iid", "guard", "liar", 1)].lost == pytest.approx(0)
    assert by_key[ArenaCell("strong-noniid", "guard", "liar", 1)].lost == pytest.approx(0.3)


def test_a_match_reports_the_classes_that_are_targeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register.attack.get("backdoor"), "aims", (0, 2))
    by_key = judged(SMALL, lambda _: 0.9)
    match = by_key[ArenaCell("strong-iid", "guard", "backdoor", 2)]
    assert match.withstands
    assert match.aimed_accuracy == pytest.approx((0.25 + 0.75) / 2)
    assert match.aimed_remainder == pytest.approx((0.95 + 0.85) / 2)  # the test set has no samples of class 2
    assert not match.protects_targets
    for attack in ("", "liar", ABSENT):
        other = by_key[ArenaCell("strong-iid", "guard", attack, 2 if attack else 0)]
        assert (other.aimed_accuracy, other.aimed_remainder, other.protects_targets) == (None, None, True)


@pytest.mark.parametrize(
    ("settings", "code", "fact"),
    [
        ({"attacks": ("lair",)}, "unknown-name", "lair"),
        ({"defences": ("gard",)}, "unknown-name", "gard"),
        ({"defences": ("buckets+krum",)}, "unknown-name", "buckets"),
        ({"byzantine": (0,)}, "out-of-range", "0"),
        ({"seeds": ()}, "out-of-range", "seed"),
        ({"presets": ()}, "out-of-range", "preset"),
        ({"presets": ("strong-idd",)}, "unknown-name", "strong-idd"),
        ({"attacks": ("liar", "absent")}, "no-effect", "absent"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(settings: dict[str, tuple[object, ...]], code: str, fact: str) -> None:
    with refused_as(code, fact):
        ArenaPlan(**settings)  # type: ignore[arg-type]


def test_attacks_and_defences_are_chosen_by_family() -> None:
    plan = replace(
        SMALL, attacks=("liar", "family:free-rider", "family:claims"), defences=("fedavg", "family:verified")
    )
    assert plan.attacks == ("liar", "copycat", "fifth", "staller", "flooder")  # each once; `absent` is run anyway
    assert plan.defences == ("fedavg", "cb-dsl", "guard", "rotation", "soup")
    plan = replace(SMALL, defences=("bucketing+krum", "family:coordinates", "family:filtering"))
    assert plan.defences[:4] == ("bucketing+krum", "median", "trimmed-mean", "nnm")
    assert {"dnc", "flame"} <= set(plan.defences)
    with refused_as("unknown-name", "'backdor'", "'backdoor'"):
        replace(SMALL, attacks=("family:backdor",))
    with refused_as("unknown-name", "family"):
        replace(SMALL, defences=("family:",))


def test_a_failed_run_leaves_out_what_depends_on_it() -> None:
    def but(lost: ArenaCell) -> set[ArenaCell]:
        missing = SMALL.spec(lost, 0)
        found = judge_matches(SMALL, lambda spec: None if spec == missing else results(lambda _: 0.9)(spec))
        there = {ArenaCell(one.preset, one.defence, one.attack, one.byzantine) for one in found}
        return set(list_cells(SMALL)) - there

    match = ArenaCell("strong-iid", "guard", "liar", 2)
    assert but(match) == {match}
    absent = match._replace(attack=ABSENT)
    assert but(absent) == {absent, match, match._replace(attack="backdoor")}
    assert {cell.defence for cell in but(ArenaCell("strong-iid", "guard"))} == {"guard"}
    assert len(but(ArenaCell("strong-iid", "guard"))) == 1 + 2 * 3


FAULTY = """
import cbdsl

@cbdsl.register.attack("faulty", family="broken")
class Faulty(cbdsl.Attack):
    '''Fails.'''
    def upload(self, seen):
        return [][1]
"""
TINY = {"model": "softmax", "workers": 5, "rounds": 2, "data.samples_per_worker": 20, "data.shared_scoring": 50}


@pytest.mark.slow
def test_a_match_that_fails_does_not_end_the_arena_and_nothing_is_run_twice(tmp_path: Path) -> None:
    plugin = tmp_path / "faulty.py"
    plugin.write_text(FAULTY)
    plan = ArenaPlan(
        ("family:broken", "sign-flip", "ipm"), ("fedavg", "krum"), (2,), (0,), (0,), ("strong-iid",), TINY,
        (str(plugin),),
    )  # fmt: skip
    made = run_arena(plan, tmp_path / "out", jobs=1)
    assert len(made.failed) == 2
    assert "IndexError" in made.failed[0]
    assert (made.plan.defences, made.plan.attacks) == (("fedavg", "krum"), ("sign-flip", "ipm"))
    error = next((tmp_path / "out" / "runs").glob("*/error.txt"))
    assert "faulty.py" in error.read_text()
    table = (tmp_path / "out" / "results.csv").read_text()
    assert len(table.splitlines()) == 1 + 2 * (1 + 1 + 2)
    write_arena_page(made, tmp_path / "out", "cbdsl arena")
    assert "2 runs failed" in (tmp_path / "out" / "arena.html").read_text()

    def stamps() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").glob("*/summary.json")}

    # a kill in the middle leaves finished runs, and others with some of their rounds or none
    before = stamps()
    lost = sorted(before)[:3]
    for path in lost:
        path.unlink()
    shutil.rmtree(lost[0].parent)
    again = run_arena(replace(plan, attacks=("sign-flip", "ipm")), tmp_path / "out", jobs=1)
    assert not again.failed
    after = stamps()
    assert {path for path in before if after[path] != before[path]} == set(lost)
    assert (tmp_path / "out" / "results.csv").read_text() == table


def test_every_defence_makes_a_spec() -> None:
    for name in DEFENCES:
        ArenaPlan().spec(ArenaCell("strong-noniid", name, "alie", 20), 0)
        if DEFENCES[name].settings["method"] == "fedavg":
            assert DEFENCES[name].label.endswith(" + D_tr")
    assert set(QUICK.defences) <= set(DEFENCES)


@pytest.mark.slow
def test_the_command_leaves_a_page_tables_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "arena"
    options = ["--attacks", "staller,backdoor", "--defences", "fedavg,krum,guard", "--byzantine", "2", "--seeds", "1"]
    options += ["--preset", "strong-iid,strong-noniid", "--out", str(out)]
    small = ["model=softmax", "workers=5", "rounds=2", "data.samples_per_worker=20", "data.shared_scoring=50"]
    words = ["cbdsl", "arena", *options, *(word for text in small for word in ("--set", text))]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr()
    assert "CB-DSL + guard" in printed.out
    assert "24 runs: about a minute with" in printed.err  # 3 defences, 2 presets, and clean, absent, two attacks
    assert "2 rounds of fedavg and cb-dsl" in printed.err
    names = {path.name for path in out.iterdir()}
    assert names >= {"arena.html", "results.csv", "results.jsonl", "contest.json", "figures", "runs"}
    drawn = {"accuracy-strong-iid-2.png", "accuracy-strong-noniid-2.svg", "cost.pdf"}
    assert {path.name for path in (out / "figures").iterdir()} >= drawn
    page = (out / "arena.html").read_text(encoding="utf-8")
    alarms = "refuted in clean runs: CB-DSL + guard, strong-iid: 0 of"
    for word in ("The Byzantine arena", "Worst case", "Backdoors", "Where our own", "Krum + D_tr", alarms):
        assert word in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(rows) == len((out / "results.csv").read_text().splitlines()) - 1 == 24
    assert {"remainder", "lost", "false_bans", "attack_success", "aimed_accuracy"} <= set(rows[0])
    found = {tuple(row[key] for key in ("preset", "defence", "attack")): row for row in rows}
    for preset in ("strong-iid", "strong-noniid"):
        for defence in ("fedavg", "krum"):  # where nobody claims anything, whoever stalls is absent
            assert found[preset, defence, "staller"]["lost"] == 0
            assert found[preset, defence, "staller"]["accuracy"] == found[preset, defence, "absent"]["accuracy"]
        assert found[preset, "fedavg", "absent"]["accuracy"] != found[preset, "fedavg", ""]["accuracy"]
        assert found[preset, "guard", "backdoor"]["attack_success"] is not None


def test_only_classes_are_judged(tmp_path: Path) -> None:
    with refused_as("not-supported", "friedman", "regression"):
        run_arena(replace(SMALL, presets=("regression",)), tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()
