from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbdsl.protocol.aggregators import Trust, aggregate
from cbdsl.report import arena_page
from cbdsl.runs.records import Summary
from cbdsl.spec import Spec
from cbdsl.study.arena import Contest, judge


def ended(spec: Spec) -> Summary:
    """A run in which attackers do no harm and nobody is banned."""
    return SimpleNamespace(  # type: ignore[return-value]
        conversation="swarm", final_accuracy=0.9, uplink_bytes=1000, wasted_uplink_bytes=0, uploads=5, banned=[],
        attack_success=None, honest_banned=0, class_accuracy=[], aimed_accuracy=None,
        byzantine=list(range(spec.attack.byzantine)),
    )  # fmt: skip


def page(out: Path, **settings: Any) -> str:  # noqa: ANN401 - any setting of a contest
    contest = Contest(attacks=("liar",), **settings)
    return arena_page.write(contest, judge(contest, ended), out, "cbdsl arena").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("workers", "byzantine", "limit"), [(50, 20, "more than 11 attackers"), (23, 6, "more than 5"), (5, 1, "any")]
)
def test_the_page_says_how_many_attackers_bulyan_can_reckon_with(
    tmp_path: Path, workers: int, byzantine: int, limit: str
) -> None:
    text = page(tmp_path, defences=("bulyan",), byzantine=(byzantine,), settings={"workers": workers})
    assert f"Bulyan cannot reckon with {limit}" in text
    assert f"among {workers} workers" in text


def test_the_page_does_not_speak_of_defences_that_are_not_there(tmp_path: Path) -> None:
    text = page(tmp_path, defences=("fedavg",), byzantine=(20,))
    assert not any(name in text for name in ("Bulyan", "FLTrust also", "on D_sc"))
    (tmp_path / "other").mkdir()
    text = page(tmp_path / "other", defences=("bulyan", "zeno", "guard", "fltrust"), byzantine=(3,))
    assert "Zeno and CB-DSL score on D_sc" in text
    assert "FLTrust also trains on it" in text
    assert "Bulyan cannot" not in text  # 3 of 50 it can


def test_bulyans_limit_on_the_page_is_that_of_the_rule() -> None:
    workers, limit = 23, 5
    models = list(np.random.default_rng(0).normal(size=(workers, 3)).astype(np.float32))
    nothing = np.zeros(3, np.float32)
    trust = Trust(nothing, lambda: nothing, lambda rows: rows.sum(1, dtype=np.float64))
    below, at, above = (aggregate("bulyan", models, limit + step, trust) for step in (-1, 0, 1))
    assert (at == above).all()
    assert (at != below).any()
