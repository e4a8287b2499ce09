from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cbdsl.report.paper_page import write_reproduction
from cbdsl.studies.paper import ReproductionPlan
from cbdsl.studies.reproduce import run_reproduction
from support.refusals import refused_as

pytestmark = pytest.mark.slow


def test_a_reproduction_of_one_round_ends_with_a_page_that_says_so(tmp_path: Path) -> None:
    small = {
        "rounds": 1, "model": "softmax", "workers": 4, "data.shared_scoring": 40, "data.shared_training": 20,
        "data.samples_per_worker": 20, "data.shard_size": 20,
    }  # fmt: skip
    made = run_reproduction(ReproductionPlan(("script",), (0,), 1.0, tuple(small.items())), tmp_path / "out", jobs=2)
    rows = {row["id"]: row for row in json.loads((tmp_path / "out" / "claims.json").read_text())}
    assert rows["divergence-flattens"]["verdict"] == "not judged"
    page = write_reproduction(made, "cbdsl reproduce").read_text(encoding="utf-8")
    assert "too few rounds: 1 instead of" in page
    lead = page.partition('<p class="lead">')[2].partition("</p>")[0]
    assert lead.startswith("A quick look: 1 of 10 to 15 rounds, one seed (0).")
    assert "claims hold" not in lead
    assert not any(mark in page for mark in "✓✗")
    assert "Not the paper's experiment (rounds = 1," in page.replace("&#x27;", "'")


def test_one_figure_of_one_regime_is_reproduced_alone(tmp_path: Path) -> None:
    small = {
        "model": "softmax", "workers": 4, "data.shared_scoring": 40, "data.shared_training": 20, "data.shard_size": 20,
    }  # fmt: skip
    plan = ReproductionPlan(("paper",), (0, 1), 1.0, tuple(small.items()), figures=(4,), rounds=1)
    made = run_reproduction(plan, tmp_path / "out", jobs=2)
    assert {claim.figure for claim in made.claims} == {4}
    page = write_reproduction(made, "cbdsl reproduce --figure 4").read_text(encoding="utf-8")
    assert "Figure 4: non-i.i.d. data" in page
    assert "Theorem" not in page
    assert "Figure 1:" not in page
    run_reproduction(plan, tmp_path / "out", jobs=2)  # continues the same plan
    with refused_as("exists-already"):
        run_reproduction(replace(plan, rounds=2), tmp_path / "out", jobs=2)
