from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbdsl import register
from cbdsl.algorithm.aggregators import TrustedReference, aggregate
from cbdsl.report.arena_page import write_arena_page
from cbdsl.runs.records import Summary
from cbdsl.spec import Spec
from cbdsl.studies.arena import Arena, ArenaPlan, judge_matches
from support.browser import widths


def ended(spec: Spec) -> Summary:
    """A run in which attackers do no harm and nobody is banned."""
    return SimpleNamespace(  # type: ignore[return-value]
        conversation="swarm", final_accuracy=0.9, uplink_bytes=1000, wasted_uplink_bytes=0, uploads=5, banned=[],
        attack_success=None, honest_banned=0, class_accuracy=[], aimed_accuracy=None,
        byzantine=list(range(spec.attack.byzantine)),
    )  # fmt: skip


def page(out: Path, **settings: Any) -> str:  # noqa: ANN401 - any setting of a plan
    plan = ArenaPlan(attacks=("liar",), **settings)
    return write_arena_page(Arena(plan, tuple(judge_matches(plan, ended))), out, "cbdsl arena").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("workers", "byzantine", "limit"), [(50, 20, "more than 11 attackers"), (23, 6, "more than 5"), (5, 1, "any")]
)
def test_the_page_names_the_number_of_attackers_that_bulyan_tolerates(
    tmp_path: Path, workers: int, byzantine: int, limit: str
) -> None:
    text = page(tmp_path, defences=("bulyan",), byzantine=(byzantine,), settings={"workers": workers})
    assert f"Bulyan does not tolerate {limit}" in text
    assert f"among {workers} workers" in text


def test_the_page_mentions_only_defences_of_the_plan(tmp_path: Path) -> None:
    text = page(tmp_path, defences=("fedavg",), byzantine=(20,))
    assert not any(name in text for name in ("Bulyan", "FLTrust also", "on D_sc"))
    (tmp_path / "other").mkdir()
    text = page(tmp_path / "other", defences=("bulyan", "zeno", "guard", "fltrust"), byzantine=(3,))
    assert "Zeno and CB-DSL score on D_sc" in text
    assert "FLTrust also trains on it" in text
    assert "Bulyan does not" not in text  # 3 of 50 it can


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


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan as large as they come."""
    out = tmp_path_factory.mktemp("full")
    patched = pytest.MonkeyPatch()
    patched.setattr(register.attack.get("label-flip"), "aims", (4, 9))
    plan = ArenaPlan()
    made = write_arena_page(Arena(plan, tuple(judge_matches(plan, hard))), out, "cbdsl arena")
    patched.undo()
    return made


def test_the_page_says_what_the_attacks_do_beyond_the_absence_of_their_workers(full: Path) -> None:
    text = full.read_text(encoding="utf-8")
    ours = "<b>CB-DSL + guard</b>"
    assert f"{ours} loses 30.0 points to label-flip with 20 attackers, strong-noniid" in text
    assert "(40.1% (40.0% to 40.2%); 70.1% with the attackers absent)" in text
    assert "loses 30.0 points to label-flip with 1 attacker," not in text
    assert "strong-iid (" not in text.partition("Where our own defences break")[2].partition("</section>")[0]
    assert f"{ours} recognises 50% of the class targeted by label-flip with 5 attackers, strong-iid; 80% with" in text
    assert f"{ours} classifies 75% of triggered images as the target under backdoor with 20 attackers" in text
    assert f"{ours} bans 1 honest workers per run under label-flip with 5 attackers, strong-iid" in text
    assert "3 seeds (0, 1 and 2) for our own defences and FedAvg, 1 seed (0) for the others" in text
    assert "median + D_tr" in text
    lead = text.partition("<nav>")[0]
    best = "Highest in the worst case on strong-noniid: <b>FedAvg + D_tr</b>, 70.1%"
    assert f"{best} and no attack costs it more than the absence of its workers." in lead


def test_a_figure_comes_before_the_tables(full: Path) -> None:
    text = full.read_text(encoding="utf-8")
    assert 0 < text.index("<h1>") < text.index("<figure") < text.index("<table")


def test_the_tables_have_a_cell_for_every_word_of_the_head(full: Path) -> None:
    text = full.read_text(encoding="utf-8")
    worst = text.partition('id="worst"')[2].partition("</section>")[0]
    row = worst.partition("<b>CB-DSL + guard</b>")[2].partition("</tr>")[0]
    cells = dict(re.findall(r'data-label="([^"]+)"[^>]*>(.*?)</td>', row))
    assert cells["Largest loss"].startswith("0.0 points")
    assert (cells["Honest banned"], cells["Backdoor"], cells["Targeted class"]) == ("2", "75%", "50%")
    assert "0 of " in cells["Lost over 2 points"]
    other = worst.rpartition("<b>CB-DSL + guard</b>")[2].partition("</tr>")[0]
    cells = dict(re.findall(r'data-label="([^"]+)"[^>]*>(.*?)</td>', other))
    assert cells["Largest loss"].startswith("30.0 points (label-flip, ")
    assert "2 of " in cells["Lost over 2 points"]


@pytest.mark.parametrize("width", [360, 721, 1280])
def test_the_page_fits_wide_and_narrow_screens(full: Path, tmp_path: Path, width: int) -> None:
    assert widths(full, tmp_path, width) == (width, width)


def test_one_seed_is_mentioned_first_and_gives_no_verdict(tmp_path: Path) -> None:
    plan = ArenaPlan(
        attacks=("label-flip",), defences=("fedavg", "guard"), byzantine=(5,), seeds=(0,), presets=("strong-noniid",),
        settings={"local.epochs": 1, "rounds": 2},
    )  # fmt: skip
    matches = judge_matches(plan, hard)
    text = write_arena_page(Arena(plan, tuple(matches)), tmp_path, "cbdsl arena").read_text(encoding="utf-8")
    assert re.search(r'<p class="lead">A quick look, not a result: 2 of \d+ rounds, one seed \(0\)\.', text)
    assert "✗" not in text
    assert not re.findall(r'<span class="(?:yes|no)">', text)
    assert "Seen on one seed: it may be chance." in text
    assert not all(match.withstands for match in matches)  # and yet there was something to cross out


def test_every_figure_has_its_numbers_beside_it(full: Path) -> None:
    names = {path.stem for path in (full.parent / "figures").glob("*.png")}
    assert names == {path.stem for path in (full.parent / "figures").glob("*.csv")}
    assert full.read_text(encoding="utf-8").count('href="data:text/csv') == len(names)
    assert "guard" in (full.parent / "figures" / "accuracy-strong-iid-20.csv").read_text(encoding="utf-8")
