from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from cbdsl.cli.app import app
from cbdsl.data.dataset import Dataset
from cbdsl.errors import UserError
from cbdsl.presets import preset
from cbdsl.theory.genie import divergence_curve
from cbdsl.theory.measure import TheoryResult, describe_result, measure
from support.helpers import SMALL, blobs, cbdsl, perceptron, small_spec
from support.refusals import refused_as

READINGS: dict[str, dict[str, object]] = {
    "as printed": {},
    "shards": {"data__partition": "shards"},
    "no shared data": {"shared": "none", "data__partition": "shards"},
    "of the published script": {
        "swarm__draw": "parameter", "swarm__sgd_from": "moved", "swarm__velocity": "swarm", "swarm__inertia": 0.2,
        "swarm__social": 2, "local__epochs": 3, "local__momentum": 0.9, "local__decay": 0.5,
    },
    "apart": {"swarm__start": "apart"},
    "with attackers": {"attack__byzantine": 2},
    "fedpso": {"method": "fedpso"},
    "no local work": {"local__epochs": 0},
    "one round": {"rounds": 1},
    "on torch": {"engine": "torch", "rounds": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
def test_what_is_corrected_holds_on_every_round_of_every_reading(name: str) -> None:
    found = measure(small_spec(**READINGS[name]), 1, model=perceptron, data=blobs())
    second = found.theorem2
    assert second.corrected.holds
    assert second.corrected_whole.holds
    assert second.played.holds
    assert second.played.tightness.low >= 1 - 1e-9 or math.isnan(second.played.tightness.low)
    assert found.theorem1.played.held == found.theorem1.played.speaks
    assert TheoryResult.from_json(json.loads(found.to_text())).to_text() == found.to_text()
    assert len(describe_result(found)) == 5


def test_a_run_on_which_the_printed_second_theorem_fails() -> None:
    found = measure(small_spec(data__partition="shards", rounds=8), 1, model=perceptron, data=blobs())
    assert not found.theorem2.printed.holds
    assert found.theorem2.corrected.holds


def test_the_papers_network_on_images_keeps_within_the_corrected_bounds(mnist: Dataset) -> None:
    settings = {
        "workers": 4,
        "rounds": 4,
        "data.shared_scoring": 200,
        "data.shard_size": 100,
        "data.shared_training": 100,
    }
    spec = preset("paper-noniid").with_settings(settings)
    found = measure(spec, 2, data=mnist)
    assert found.theorem2.corrected.holds
    assert found.theorem2.played.holds
    assert found.theorem1.played.held == found.theorem1.played.speaks
    assert [row.to_json() for row in found.divergence] == divergence_curve(spec, 2, data=mnist)


def test_threads_change_no_finding() -> None:
    spec = small_spec(data__partition="dirichlet")
    one, two = (measure(spec, threads, model=perceptron, data=blobs()) for threads in (1, 2))
    assert one.to_text() == two.to_text()


def test_a_run_in_which_everybody_left_the_range_of_numbers_says_so() -> None:
    spec = small_spec(local__learning_rate=3e38, rounds=3)
    with refused_as("out-of-range", "learning_rate"), np.errstate(all="ignore"):
        measure(spec, 1, model=perceptron, data=blobs())


def test_a_theorem_that_says_nothing_prints_no_number() -> None:
    found = measure(small_spec(rounds=3), 1, model=perceptron, data=blobs())
    assert found.theorem1.corrected.speaks == 0
    assert found.to_json()["theorem1"]["corrected"]["bound"] is None
    assert any("gives no bound: Phi_E" in sentence for sentence in describe_result(found))


def test_the_command_keeps_its_findings_in_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mnist: Dataset
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cbdsl.runs.build.load", lambda source, *_: {"mnist": mnist}[source])  # once is enough
    assert CliRunner().invoke(app, ["run", *SMALL, "--rounds", "2", "--out", "here"]).exit_code == 0
    done = CliRunner().invoke(app, ["theory", "here"])
    assert done.exit_code == 0, done.output
    for word in ("Theorem 1, corrected", "Theorem 2, printed", "global best v^g", "Model divergence", "Remark 1"):
        assert word in done.stdout
    assert "2/2" in done.stderr
    kept = (tmp_path / "here" / "theory.json").read_text()
    again = CliRunner().invoke(app, ["theory", "here/spec.toml", "--json"])
    assert again.stdout == kept
    assert TheoryResult.from_json(json.loads(kept)).rounds == 2


def test_what_is_no_run_is_a_message_that_names_what_can_be_given(tmp_path: Path) -> None:
    for subject, words in (("paper-nonid", "Did you mean 'paper-noniid'?"), (str(tmp_path), "has no spec.toml")):
        failure = CliRunner().invoke(app, ["theory", subject]).exception
        assert isinstance(failure, UserError)
        assert words in str(failure)


def test_the_command_line_answers_a_wrong_name_with_exit_code_two(tmp_path: Path) -> None:
    done = cbdsl("theory", "paper-nonid", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("cbdsl: Unknown preset 'paper-nonid'. Did you mean 'paper-noniid'?")
