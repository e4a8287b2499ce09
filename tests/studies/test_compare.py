from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import cbdsl
from cbdsl.report.comparison_page import write_comparison, write_sweep_index
from cbdsl.runs.metrics import Spread as WorkerSpread
from cbdsl.runs.records import LocalTest
from cbdsl.studies.compare import (
    ComparisonRow,
    Spread,
    compare,
    comparison_rows,
    describe_run,
    describe_setting,
    describe_tests,
    format_csv,
    format_value,
    group_results,
)
from cbdsl.studies.comparison_text import format_comparison
from cbdsl.studies.sweep import FinishedRun, grid, run_all
from support.finished_runs import make_run
from support.helpers import blobs, perceptron, small_spec
from support.refusals import refused_as

FINALS = {("cb-dsl", 1): (0.90, 0.92), ("cb-dsl", 3): (0.93, 0.95), ("fedavg", 1): (0.80, 0.80)}
SWEEP = [
    make_run([0.5, final], Path(f"{method}{epochs}-{seed}"), method=method, local__epochs=epochs, seed=seed)
    for (method, epochs), finals in FINALS.items()
    for seed, final in enumerate(finals)
]


def test_runs_that_differ_by_their_seed_alone_are_one_group() -> None:
    found = group_results(SWEEP)
    assert found.keys == found.distinguishing == ("method", "local.epochs")
    assert [group.settings for group in found.groups] == [
        {"method": method, "local.epochs": epochs} for method, epochs in FINALS
    ]
    assert [len(group.runs) for group in found.groups] == [2, 2, 2]
    assert found.notes == ()
    assert "seed" not in found.common
    assert found.common["workers"] == 50
    assert set(found.common) & set(found.keys) == set()


def test_a_row_by_hand() -> None:
    row = group_results([
        make_run([0.7, 0.9, 0.8], seed=4, uplink=1000, banned=[1]),
        make_run([0.7, 0.6, 0.6], seed=2, uplink=3000, banned=[1, 2, 3]),
    ]).rows[0]  # fmt: skip
    root = 2**0.5
    assert isinstance(row, ComparisonRow)
    assert (row.settings, row.runs, row.seeds) == ({}, 2, (2, 4))
    assert (row.final.mean, row.final.deviation) == pytest.approx((0.7, 0.1 * root))
    assert (row.best.mean, row.best.deviation) == pytest.approx((0.8, 0.1 * root))
    assert (row.uplink_bytes.mean, row.uplink_bytes.deviation) == pytest.approx((6000, 3000 * root))
    assert row.downlink_bytes.mean == 12000
    assert row.uploads == Spread(3, 0.0)
    assert (row.bans.mean, row.bans.deviation) == pytest.approx((2, root))


def test_the_table_for_people_has_a_row_a_group() -> None:
    heads, rows = comparison_rows(group_results(SWEEP))
    assert heads == (
        "method", "local.epochs", "runs", "final accuracy", "best accuracy", "uplink", "downlink", "uploads", "bans",
        "points from the best [95 %]", "p (t)", "p (exact)",
    )  # fmt: skip
    assert rows[0] == (
        "cb-dsl", "1", "2 (seeds 0, 1)", "91.0 ± 1.4 %", "91.0 ± 1.4 %", "2.0 ± 0 kB", "4.0 ± 0 kB", "2 ± 0", "0 ± 0",
        "-3.0 [-3.0, -3.0]", "< 0.001", "0.500",
    )  # fmt: skip
    assert rows[1][-3:] == ("",) * 3


def test_groups_with_the_same_seeds_are_compared_seed_by_seed() -> None:
    better = [make_run([0.5, 0.90 + 0.01 * seed], seed=seed) for seed in (0, 1, 2)]
    worse = [make_run([0.5, value], seed=seed, method="pso") for seed, value in enumerate((0.80, 0.79, 0.84))]
    gaps = group_results([*worse, *better]).gaps
    assert gaps[1] is None
    assert gaps[0] is not None
    assert gaps[0].mean == pytest.approx(-0.10)
    assert gaps[0].deviation == pytest.approx(0.02)
    assert group_results([*worse[:2], *better]).gaps == (None, None)  # other seeds
    assert group_results([worse[0], better[0]]).gaps == (None, None)  # one seed says nothing


WAYS = [
    make_run([0.5, final], uplink=uplink, method=method, seed=seed)
    for method, finals, uplink in (("restart", (0.80, 0.79, 0.84), 10), ("fedavg", (0.90, 0.91, 0.92), 1000))
    for seed, final in enumerate(finals)
]


def test_groups_are_renamed_ordered_and_tested_against_any_of_them() -> None:
    found = group_results(WAYS).arranged({"restart": "rotation"}, "best", "rotation")
    assert [group.label for group in found.groups] == ["fedavg", "rotation"]
    test, none = found.tests(found.measures["final"])
    assert none is None
    assert test is not None
    assert test.mean == pytest.approx(0.10)
    assert comparison_rows(found)[0][-3] == "points from rotation [95 %]"
    assert [group.label for group in found.arranged({}, "label").groups] == ["fedavg", "rotation"]
    with refused_as("unknown-name", "rotation"):
        found.arranged({"restart": "rotation"})
    with refused_as("unknown-name"):
        found.arranged(order="worst")
    with refused_as("unknown-name"):
        found.arranged(against="krum")
    with refused_as("conflict"):
        found.arranged({"rotation": "fedavg"})


def test_a_group_without_a_parts_option_is_called_by_its_method() -> None:
    private = make_run([0.3], method="dp-fedavg")
    runs = [
        make_run([0.5], method="fedavg"),
        *(
            replace(
                private,
                spec=private.spec.with_settings({"options.dp-fedavg.noise": noise}),
                summary=replace(private.summary, epsilon=4 / noise),
            )
            for noise in (2.0, 4.0)
        ),
    ]
    found = group_results(runs)
    assert [group.label for group in found.groups] == ["fedavg", "noise 2", "noise 4"]
    assert "None" not in str(comparison_rows(found))
    assert "epsilon" not in found.measures
    assert "| noise 4 | 30.0 % | **1** |" in format_comparison(group_results(runs[1:]), "md", ("final", "epsilon"))


def test_runs_are_compared_by_what_workers_held_back() -> None:
    spread = WorkerSpread.of([0.5, 0.9, 0.7], "higher")
    assert spread is not None
    runs = [
        replace(run, summary=replace(run.summary, local_test=LocalTest(3, 9, {"accuracy": spread}, {})))
        for run in WAYS[2:4]
    ]
    text = format_comparison(group_results(runs), "md", ("local_mean", "local_worst_tenth"))
    assert text.startswith("| group | local mean | local worst tenth |")
    assert text.splitlines()[2] == "| restart | **70.0 %** | **50.0 %** |"
    every = replace(runs[0], spec=runs[0].spec.with_settings({"data.local_test_every": 2}))
    assert not any("samples" in note for note in group_results([runs[0], every]).notes)
    assert "personal_mean" not in group_results(runs).measures
    assert "local_mean" not in group_results(WAYS).measures


def test_rotation_is_called_rotation() -> None:
    found = group_results([make_run([0.5], method="restart", selection__name="rotation"), make_run([0.5])])
    assert [group.label for group in found.groups] == ["rotation", "cb-dsl"]
    assert [group.settings["method"] for group in found.groups] == ["restart", "cb-dsl"]


def test_a_comparison_says_what_three_seeds_can_tell() -> None:
    words = describe_tests(group_results(WAYS))
    assert "3 seeds" in words
    assert "cannot be below 0.250" in words
    assert "chosen by the same numbers" in words
    assert describe_tests(group_results(WAYS[:3])) == ""


def test_latex_can_be_pasted_and_says_what_it_needs() -> None:
    found = group_results(WAYS).arranged({"restart": "rotation_50 & co"})
    lines = format_comparison(found, "tex", ("final", "uplink_bytes")).splitlines()
    assert lines[0] == r"% needs \usepackage{booktabs}"
    assert lines[1] == r"\begin{tabular}{lrrrrrrrr}"
    assert lines[5].startswith(
        r"rotation\_50 \& co & 81.0 $\pm$ 2.6 \% & $-$10.0 [$-$15.0, $-$5.0] & 0.013 & 0.250 & 20 $\pm$ 0 B &"
    )
    assert lines[6].startswith(r"fedavg & \textbf{91.0 $\pm$ 1.0 \%} &  &  &  & 2.0 $\pm$ 0 kB &")
    assert lines[7:9] == [r"\bottomrule", r"\end{tabular}"]
    assert all(line.startswith("% ") for line in lines[9:])


def test_markdown_has_a_row_per_group_and_the_notes() -> None:
    text = format_comparison(group_results(WAYS), "md")
    assert text.splitlines()[2] == "| restart | 81.0 ± 2.6 % | -10.0 [-15.0, -5.0] | 0.013 | 0.250 |"
    assert "| **91.0 ± 1.0 %** |" in text
    assert "seeds 0, 1, 2" in text
    with refused_as("unknown-name"):
        format_comparison(group_results(WAYS), "docx")
    with refused_as("unknown-name"):
        format_comparison(group_results(WAYS), "md", ("speed",))


UNDER = [
    make_run([0.5, final], defence__aggregator=rule, attack__name=attack, attack__byzantine=2, seed=seed)
    for attack, rule, finals in (
        ("ipm", "krum", (0.70, 0.71, 0.72)), ("ipm", "median", (0.80, 0.82, 0.83)),
        ("alie", "krum", (0.90, 0.92, 0.94)), ("alie", "median", (0.60, 0.61, 0.63)),
    )
    for seed, final in enumerate(finals)
]  # fmt: skip


def test_groups_are_tested_within_the_same_attack_alone() -> None:
    rows = cbdsl.compare(UNDER, within="attack", to="rows")
    assert [(row["within"], row["label"]) for row in rows] == [
        ("alie", "krum"), ("alie", "median"), ("ipm", "krum"), ("ipm", "median"),
    ]  # fmt: skip
    gaps = [row["final_accuracy_difference"] for row in rows]
    assert gaps[0] is gaps[3] is None  # the best of each block
    assert gaps[1:3] == pytest.approx([-0.92 + 0.6133333, 0.71 - 0.8166667])
    tex = cbdsl.compare(UNDER, within=["attack.name"], against="krum", to="tex")
    assert tex.count(r"\midrule") == 2
    assert r"\multicolumn{5}{l}{\emph{ipm}} \\" in tex.splitlines()
    assert tex.count("% in each block: Differences from krum, paired") == 1
    assert "| *alie* |  |  |  |  |" in cbdsl.compare(UNDER, within="attack", to="md").splitlines()
    assert next(csv.DictReader(io.StringIO(cbdsl.compare(UNDER, within="attack", to="csv"))))["within"] == "alie"
    with refused_as("unknown-setting", "attack.name"):
        cbdsl.compare(UNDER, within="atack")
    with refused_as("no-effect", "workers"):
        cbdsl.compare(UNDER, within="workers")
    with refused_as("conflict"):
        cbdsl.compare({"all": UNDER}, within="attack")


def test_python_gets_a_data_frame_or_rows() -> None:
    rows = cbdsl.compare({"mine": WAYS[:3], "FedAvg": WAYS[3:]}, to="rows")
    assert [(row["label"], row["runs"]) for row in rows] == [("mine", 3), ("FedAvg", 3)]
    assert rows[0]["final_accuracy_difference"] == pytest.approx(-0.10)
    assert rows[0]["final_accuracy_exact_p"] == 0.25
    pandas = pytest.importorskip("pandas")
    frame = cbdsl.compare(WAYS, order="best")
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == ["fedavg", "restart"]
    assert cbdsl.compare(WAYS, to="md").startswith("| group |")
    with refused_as("unknown-name"):
        cbdsl.compare(WAYS, to="html")
    with refused_as("missing-file"):
        cbdsl.compare({"nothing": []})


def test_a_run_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    spec = cbdsl.Spec(workers=2, rounds=1, model="softmax").with_settings({"data.samples_per_worker": 20})
    run = cbdsl.run(spec, out=tmp_path / "run", threads=1)
    alone = cbdsl.run(spec, threads=1)
    for given in ([run, run], [tmp_path / "run", str(tmp_path / "run")], [run, tmp_path / "run"], [alone, alone]):
        (row,) = cbdsl.compare(given, to="rows")  # type: ignore[arg-type]
        assert row["runs"] == 1
    with refused_as("wrong-type", "3"):
        cbdsl.compare([3])  # type: ignore[list-item]


def test_without_pandas_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused_as("missing-package", "pandas", "rows"):
        cbdsl.compare(WAYS)


def test_one_run_has_no_deviation() -> None:
    found = group_results([make_run([0.5, 0.75], seed=3)])
    assert found.rows[0].final == Spread(0.75, None)
    assert comparison_rows(found)[1] == [("1 (seed 3)", "75.0 %", "75.0 %", "2.0 kB", "4.0 kB", "2", "0")]
    assert found.groups[0].label == "cb-dsl"
    assert found.notes == ("One run alone: there is nothing to compare it with.",)


def test_the_csv_has_means_and_deviations() -> None:
    rows = list(csv.DictReader(io.StringIO(format_csv(group_results([*SWEEP, make_run([0.5, 0.6], method="pso")])))))
    assert [(row["method"], row["local.epochs"], row["runs"], row["seeds"]) for row in rows] == [
        ("cb-dsl", "1", "2", "0 1"), ("cb-dsl", "3", "2", "0 1"), ("fedavg", "1", "2", "0 1"), ("pso", "1", "1", "0"),
    ]  # fmt: skip
    assert float(rows[1]["final_accuracy_mean"]) == pytest.approx(0.94)
    assert float(rows[1]["final_accuracy_deviation"]) == pytest.approx(0.02 / 2**0.5)
    assert rows[3]["final_accuracy_deviation"] == ""


def test_a_label_has_no_more_words_than_it_takes_to_tell_groups_apart() -> None:
    attacked = [
        make_run([0.5], attack__byzantine=count, defence__declared=count, attack__name=name, data__holdout=count + 50)
        for count, name in ((0, "liar"), (5, "liar"), (5, "alie"))
    ]
    found = group_results(attacked)
    assert found.keys == ("data.holdout", "defence.declared", "attack.name", "attack.byzantine")
    assert [group.label for group in found.groups] == ["holdout 50, liar", "holdout 55, liar", "holdout 55, alie"]


def test_what_follows_from_another_setting_is_not_what_names_a_group() -> None:
    found = group_results([make_run([0.5], attack__byzantine=n, defence__declared=n) for n in (1, 5)])
    assert found.keys == ("defence.declared", "attack.byzantine")
    assert [group.label for group in found.groups] == ["byzantine 1", "byzantine 5"]


def test_a_sweep_is_described_by_its_axes() -> None:
    swept = [make_run([0.5], swarm__inertia=value, shared="both", seed=seed) for value in (0.5, 0.9) for seed in (0, 3)]
    found = group_results(swept, ["swarm.inertia", "shared", "seed"])
    assert found.keys == ("swarm.inertia", "shared")
    assert found.distinguishing == ("swarm.inertia",)
    assert describe_run(found.runs[1], found.distinguishing) == "swarm.inertia 0.5, seed 3"
    assert group_results(swept, ["seed"]).keys == ("swarm.inertia",)  # what differs is never passed over


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((0.5, 0.5), "0.5"), ((1.0, 0.0), "1 to 0"), (True, "yes"), (False, "no"), (1e-6, "1e-06"), (30, "30"),
    ],
)  # fmt: skip
def test_values_in_words(value: object, words: str) -> None:
    assert format_value(value) == words


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("method", "fedavg", "fedavg"),
        ("shared", "both", "shared both"),
        ("swarm.inertia", (1.0, 0.0), "inertia 1 to 0"),
        ("local.learning_rate", 0.01, "learning rate 0.01"),
        ("defence.guard", True, "guard"),
        ("defence.guard", False, "no guard"),
        ("preset", "", "no preset"),
        ("data.source", "/data/fashion", "fashion"),
    ],
)
def test_settings_in_a_label(key: str, value: object, words: str) -> None:
    assert describe_setting(key, value) == words


def changed(**summary: object) -> FinishedRun:
    run = make_run([0.5], seed=1)
    return replace(run, summary=replace(run.summary, **summary))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "note"),
    [
        (
            make_run([0.5], data__source="elsewhere"),
            "The data differ (mnist, elsewhere): results are not of the same",
        ),
        (make_run([0.5], data__partition="shards"), "The samples of workers or server differ (data.partition)."),
        (make_run([0.5], model="mlp", parameters=200), "The models differ (cnn, mlp; 100 and 200 parameters)."),
        (
            make_run([0.5], model="custom"),
            "The model came from Python: the specs do not tell whether all runs had the same.",
        ),
        (make_run([0.5], model="custom", data__source="custom"), "The model and the data came from Python: the specs"),
        (make_run([0.5, 0.6]), "Some runs are longer than others (1, 2 rounds)."),
        (changed(engine="torch"), "The runs differ in their engine: native, torch."),
        (changed(version="2"), "The runs differ in their version: 1, 2."),
        (make_run([0.5], method="fedavg", seed=7), "The groups do not have the same seeds, so their differences"),
        (make_run([0.6]), "Some runs have the same spec and seed and yet other numbers; each of them counts."),
    ],
)
def test_what_is_not_like_with_like_is_said(other: FinishedRun, note: str) -> None:
    assert any(found.startswith(note) for found in group_results([make_run([0.5]), other]).notes)


def test_the_same_run_twice_counts_once() -> None:
    here, there = make_run([0.5, 0.6], Path("here")), make_run([0.5, 0.6], Path("there"))
    assert group_results([here, here]).rows[0].runs == 1
    assert not any("same run" in note for note in group_results([here, here]).notes)
    found = group_results([here, there])
    assert found.rows[0].runs == 1
    assert "Some folders hold the same run, spec, seed and numbers alike; it counts once." in found.notes


def test_nothing_to_compare_is_an_error() -> None:
    with refused_as("missing-file"):
        compare([])


def test_folders_of_finished_runs_are_compared(tmp_path: Path) -> None:
    folders = []
    for method in ("cb-dsl", "fedavg"):
        for seed in (0, 1):
            folders.append(tmp_path / f"{method}-{seed}")
            cbdsl.run(small_spec(method=method, seed=seed), model=perceptron, data=blobs(), out=folders[-1])
    found = compare(folders)
    assert found.keys == ("method", "shared")
    assert [group.label for group in found.groups] == ["cb-dsl", "fedavg"]
    assert [row.seeds for row in found.rows] == [(0, 1), (0, 1)]
    assert found.rows[1].uploads == Spread(30, 0.0)
    assert found.notes == ("The model came from Python: the specs do not tell whether all runs had the same.",)
    page = write_comparison(folders, tmp_path / "new" / "out")
    assert page == tmp_path / "new" / "out" / "comparison.html"
    names = {path.name for path in page.parent.rglob("*") if path.is_file()}
    assert names == {"comparison.html", "comparison.csv", "comparison.png", "comparison.svg", "comparison.pdf"}


def test_a_folder_that_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    with refused_as("unreadable-file", tmp_path / "nowhere", "cbdsl resume"):
        compare([tmp_path / "nowhere"])
    cbdsl.run(small_spec(rounds=1), model=perceptron, data=blobs(), out=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with refused_as("unreadable-file", tmp_path / "run"):
        compare([tmp_path / "run"])
    (tmp_path / "sweep" / "runs").mkdir(parents=True)
    shutil.move(tmp_path / "run", tmp_path / "sweep" / "runs" / "one")
    for many in (tmp_path / "sweep", tmp_path / "sweep" / "runs"):
        with refused_as("unreadable-file", many):
            compare([many])


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused_as("unwritable-file", tmp_path / "file" / "out"):
        write_sweep_index(SWEEP, ["method", "local.epochs", "seed"], tmp_path / "file" / "out")


@pytest.mark.slow
def test_a_sweeps_index_leads_from_words_to_folders(tmp_path: Path) -> None:
    small = cbdsl.Spec(model="softmax", workers=3, rounds=2).with_settings(
        {"data.shared_scoring": 40, "data.samples_per_worker": 20}
    )
    axes: list[tuple[str, list[float]]] = [("swarm.inertia", [0.5, 0.9]), ("seed", [0, 3])]
    results = run_all(grid(small, axes), tmp_path, 1)
    page = write_sweep_index(results, [key for key, _ in axes], tmp_path)
    assert page == tmp_path / "index.html"
    text = page.read_text(encoding="utf-8")
    for result in results:
        key = result.folder.name
        words = f"swarm.inertia {result.spec.swarm.inertia[0]:g}, seed {result.spec.seed}"
        assert f'>{words}</td><td data-label="Folder"><a href="runs/{key}/">{key}</a>' in text
        assert (tmp_path / "runs" / key).is_dir()
    assert text.index('id="figure"') < text.index('id="groups"') < text.index('id="runs"')
    assert (tmp_path / "groups.csv").read_text().startswith("swarm.inertia,runs,seeds,final_accuracy_mean,")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        f"sweep.{ending}" for ending in ("png", "svg", "pdf", "csv")
    }


def test_comparing_loads_no_matplotlib() -> None:
    words = "import sys, cbdsl.studies.compare; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
