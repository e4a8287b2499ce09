from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbdsl import register
from cbdsl.algorithm.aggregators import TrustedReference, aggregate
from cbdsl.report.arena_page import find_best, find_weaknesses, tabulate_worst, write_arena_page
from cbdsl.runs.records import Summary
from cbdsl.spec import Spec
from cbdsl.studies.arena import Arena, ArenaPlan, Match, judge_matches
from support.browser import widths

pytestmark = pytest.mark.slow


def ended(spec: Spec) -> Summary:
    """A run in which attackers do no harm and nobody is banned."""
    return SimpleNamespace(  # type: ignore[return-value]
        conversation="swarm", final_accuracy=0.9, uplink_bytes=1000, wasted_uplink_bytes=0, uploads=5, banned=[],
        attack_success=None, honest_banned=0, class_accuracy=[], aimed_accuracy=None,
        byzantine=list(range(spec.attack.byzantine)),
    )  # fmt: skip


def method_of(out: Path, **settings: Any) -> str:  # noqa: ANN401 - any setting of a plan
    """The last section of the page of a plan."""
    plan = ArenaPlan(attacks=("liar",), presets=("strong-iid",), **settings)
    made = write_arena_page(Arena(plan, tuple(judge_matches(plan, ended))), out, "cbdsl arena")
    return made.read_text(encoding="utf-8").partition('id="method"')[2]


@pytest.mark.parametrize(
    ("workers", "byzantine", "limit"), [(50, 20, "more than 11 attackers"), (23, 6, "more than 5"), (5, 1, "any")]
)
def test_the_page_names_the_number_of_attackers_that_bulyan_tolerates(
    tmp_path: Path, workers: int, byzantine: int, limit: str
) -> None:
    text = method_of(tmp_path, defences=("bulyan",), byzantine=(byzantine,), settings={"workers": workers})
    assert f"Bulyan does not tolerate {limit}" in text
    assert f"among {workers} workers" in text


def test_the_page_mentions_only_defences_of_the_plan(tmp_path: Path) -> None:
    text = method_of(tmp_path, defences=("fedavg",), byzantine=(20,))
    assert not any(name in text for name in ("Bulyan", "FLTrust", "on D_sc"))
    text = method_of(tmp_path, defences=("bulyan", "zeno", "guard", "fltrust"), byzantine=(3,))
    assert "Zeno and CB-DSL score on D_sc" in text
    assert "FLTrust" in text
    assert "Bulyan" not in text  # 3 of 50 it can


def test_bulyans_limit_on_the_page_is_that_of_the_rule() -> None:
    workers, limit = 23, 5
    models = list(np.random.default_rng(0).normal(size=(workers, 3)).astype(np.float32))
    nothing = np.zeros(3, np.float32)
    trust = TrustedReference(nothing, lambda: nothing, lambda rows: rows.sum(1, dtype=np.float64))
    below, at, above = (aggregate("bulyan", models, limit + step, trust) for step in (-1, 0, 1))
    assert (at == above).all()
    assert (at != below).any()


def hard(spec: Spec) -> Summary:
    """A run in which the attacks of the first page do all that attacks can do to CB-DSL, and nothing to the rest."""
    count, ours = spec.attack.byzantine, spec.method == "cb-dsl"
    harm = count > 1 and spec.attack.name == "label-flip" and ours
    lost = 0.3 * harm * (spec.preset == "strong-noniid")
    return SimpleNamespace(  # type: ignore[return-value]
        conversation="swarm" if ours else "average", final_accuracy=0.9 - 0.01 * count - lost + 0.001 * spec.seed,
        uplink_bytes=2_000_000 if ours else 90_000_000, wasted_uplink_bytes=12_345 * count, uploads=5,
        banned=[49] if harm else [], honest_banned=int(harm), byzantine=list(range(count)),
        attack_success=0.75 if spec.attack.name == "backdoor" and count else None,
        class_accuracy=[0.8] * 10, aimed_accuracy=(0.5 if ours else 0.78) if spec.attack.name == "label-flip" else None,
    )  # fmt: skip


PLAN = ArenaPlan(
    attacks=("label-flip", "backdoor"), defences=("fedavg", "median", "guard"), byzantine=(1, 5, 20),
)  # fmt: skip


@pytest.fixture(scope="module")
def matches() -> tuple[Match, ...]:
    patched = pytest.MonkeyPatch()
    patched.setattr(register.attack.get("label-flip"), "aims", (4, 9))
    found = tuple(judge_matches(PLAN, hard))
    patched.undo()
    return found


@pytest.fixture(scope="module")
def made(matches: tuple[Match, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_arena_page(Arena(PLAN, matches), tmp_path_factory.mktemp("arena"), "cbdsl arena")


def cells_of(matches: tuple[Match, ...], preset: str, label: str) -> dict[str, str]:
    """The row of a defence in the table of worst cases."""
    table = tabulate_worst(PLAN, matches, preset)
    texts = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]
    return next(dict(zip(table.head, row, strict=True)) for row in texts if row[0] == label)


def cases(found: Sequence[Match]) -> set[tuple[str, str, int]]:
    return {(match.preset, match.attack, match.byzantine) for match in found}


def test_weaknesses_are_what_attacks_do_beyond_the_absence_of_their_workers(matches: tuple[Match, ...]) -> None:
    found = find_weaknesses(matches)
    assert found is not None
    assert cases(found.lost) == {("strong-noniid", "label-flip", 5), ("strong-noniid", "label-flip", 20)}
    assert [round(match.lost, 6) for match in found.lost] == [0.3, 0.3]
    flips = {(preset, "label-flip", count) for preset in PLAN.presets for count in PLAN.byzantine}
    assert cases(found.targets) == flips
    assert cases(found.backdoors) == {(preset, "backdoor", count) for preset, _, count in flips}
    assert cases(found.false_bans) == {(preset, "label-flip", count) for preset, _, count in flips if count > 1}
    assert {match.defence for match in (*found.lost, *found.targets, *found.false_bans)} == {"guard"}
    assert find_weaknesses([match for match in matches if match.defence != "guard"]) is None


def test_the_best_defence_is_the_one_whose_worst_match_is_best(matches: tuple[Match, ...]) -> None:
    best = find_best(PLAN, matches, "strong-noniid")
    assert (best.defence, best.attacked, round(best.accuracy, 3)) == ("fedavg", False, 0.701)


def test_the_table_of_worst_cases(matches: tuple[Match, ...]) -> None:
    cells = cells_of(matches, "strong-iid", "CB-DSL + guard")
    assert cells["Largest loss"].startswith("0.0 points")
    assert (cells["Honest banned"], cells["Backdoor"], cells["Targeted class"]) == ("2", "75%", "50%")
    assert cells["Lost over 2 points"] == "0 of 6"
    cells = cells_of(matches, "strong-noniid", "CB-DSL + guard")
    assert cells["Largest loss"].startswith("30.0 points (label-flip, ")
    assert cells["Lost over 2 points"] == "2 of 6"
    assert cells["Worst case"] == "40.1% (40.0%\u00a0to\u00a040.2%)"


def test_the_page_lists_the_weaknesses_and_a_figure_comes_before_the_tables(
    made: Path, matches: tuple[Match, ...]
) -> None:
    text = made.read_text(encoding="utf-8")
    found = find_weaknesses(matches)
    assert found is not None
    breaks = text.partition('id="breaks"')[2].partition("</section>")[0]
    assert breaks.count("<li>") == found.count
    facts = ("CB-DSL + guard", "30.0 points", "label-flip with 20 attackers, strong-noniid", "40.1% (40.0% to 40.2%)")
    assert all(fact in breaks for fact in facts)
    lead = text.partition("<nav>")[0]
    assert "3 seeds (0, 1 and 2) for our own defences and FedAvg, 1 seed (0) for the others" in lead
    assert "<b>FedAvg + D_tr</b>, 70.1%" in lead
    assert 0 < text.index("<h1>") < text.index("<figure") < text.index("<table")
    links = re.findall(r'<a href="#([^"]+)">', text.partition("<nav>")[2].partition("</nav>")[0])
    assert links == re.findall(r'<section id="([^"]+)">', text)
    assert {"worst", "breaks", "map-strong-iid-20", "detection", "backdoor", "aimed", "attacks", "method"} <= set(links)


def test_the_page_fits_wide_and_narrow_screens(made: Path) -> None:
    for width in (360, 721, 1280):
        assert widths(made, width) == (width, width)


def test_one_seed_is_mentioned_first_and_gives_no_verdict(tmp_path: Path) -> None:
    plan = ArenaPlan(
        attacks=("label-flip",), defences=("fedavg", "guard"), byzantine=(5,), seeds=(0,), presets=("strong-noniid",),
        settings={"local.epochs": 1, "rounds": 2},
    )  # fmt: skip
    matches = judge_matches(plan, hard)
    text = write_arena_page(Arena(plan, tuple(matches)), tmp_path, "cbdsl arena").read_text(encoding="utf-8")
    assert re.search(r'<p class="lead">A quick look, not a result: 2 of \d+ rounds, one seed \(0\)\.', text)
    assert "✗" not in text
    assert not re.findall(r'class="(?:yes|no)"', text)
    assert "Seen on one seed" in text
    assert not all(match.withstands for match in matches)  # and yet there was something to cross out


def test_every_figure_has_its_numbers_beside_it(made: Path) -> None:
    names = {path.stem for path in (made.parent / "figures").glob("*.png")}
    assert names == {path.stem for path in (made.parent / "figures").glob("*.csv")}
    assert made.read_text(encoding="utf-8").count('href="data:text/csv') == len(names)
    assert "guard" in (made.parent / "figures" / "accuracy-strong-iid-20.csv").read_text(encoding="utf-8")
