from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cbdsl.cli.main import main
from cbdsl.errors import UserError
from cbdsl.runs.records import Summary
from cbdsl.spec import Spec
from cbdsl.study.arena import DEFENCES, QUICK, Bout, Contest, cells, judge, tasks_of

SMALL = Contest(attacks=("liar", "backdoor"), defences=("fedavg", "guard"), byzantine=(1, 2), seeds=(0, 1))


def results(accuracy: Callable[[Spec], float]) -> Callable[[Spec], Summary]:
    """Runs that end as a function says; CB-DSL bans worker 0, who is an attacker, and worker 9, who is not."""

    def of(spec: Spec) -> Summary:
        attacked = spec.attack.byzantine
        return SimpleNamespace(  # type: ignore[return-value]
            conversation="average" if spec.method == "fedavg" else "swarm", final_accuracy=accuracy(spec),
            uplink_bytes=1000, wasted_uplink_bytes=100, uploads=5,
            byzantine=list(range(attacked)), banned=[0, 9] if attacked and spec.method == "cb-dsl" else [],
            attack_success=0.25 * spec.seed if spec.attack.name == "backdoor" else None,
        )  # fmt: skip

    return of


def test_a_contest_is_every_attack_on_every_defence_and_clean_runs() -> None:
    assert len(cells(SMALL)) == 2 + 2 * 2 * 2
    assert len(tasks_of(SMALL)) == 2 * len(cells(SMALL))
    assert len({task.spec.key() for task in tasks_of(SMALL)}) == len(tasks_of(SMALL))
    spec = SMALL.spec("guard", "liar", 2, 1)
    assert (spec.attack.name, spec.attack.byzantine, spec.seed, spec.defence.guard) == ("liar", 2, 1, True)
    assert spec.defence.declared == 2
    assert SMALL.spec("guard", "", 0, 1).attack.byzantine == 0


def test_a_bout_puts_its_seeds_together() -> None:
    bouts = judge(SMALL, results(lambda spec: 0.9 - 0.1 * spec.attack.byzantine + 0.02 * spec.seed))
    by_key: dict[tuple[str, str, int], Bout] = {(one.defence, one.attack, one.byzantine): one for one in bouts}
    bout = by_key["guard", "liar", 2]
    assert (bout.accuracy, bout.lowest, bout.highest) == pytest.approx((0.71, 0.7, 0.72))
    assert bout.lost == pytest.approx(0.2)
    assert not bout.stands
    assert (bout.precision, bout.recall, bout.banned, bout.false_bans) == (0.5, 0.5, 1.0, 1.0)
    assert by_key["guard", "backdoor", 1].attack_success == 0.125
    assert by_key["guard", "", 0].stands
    plain = by_key["fedavg", "liar", 1]
    assert (plain.precision, plain.recall) == (None, None)  # FedAvg bans nobody


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attacks": ("lair",)}, "Unknown attack 'lair'"),
        ({"defences": ("gard",)}, "Unknown defence 'gard'"),
        ({"byzantine": (0,)}, "start at 1"),
        ({"seeds": ()}, "at least one"),
    ],
)
def test_a_contest_that_cannot_be_held_is_refused(settings: dict[str, tuple[object, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Contest(**settings)  # type: ignore[arg-type]


def test_every_defence_makes_a_spec() -> None:
    for name in DEFENCES:
        Contest().spec(name, "alie", 20, 0)
    assert set(QUICK.defences) <= set(DEFENCES)


def test_the_command_leaves_a_page_tables_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "arena"
    options = ["--attacks", "liar,backdoor", "--defences", "fedavg,guard", "--byzantine", "2", "--out", str(out)]
    small = ["model=softmax", "workers=5", "rounds=2", "data.samples_per_worker=20", "data.shared_scoring=50"]
    words = ["cbdsl", "arena", *options, *(word for text in small for word in ("--set", text))]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "CB-DSL + guard" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names >= {"arena.html", "results.csv", "results.jsonl", "contest.json", "figures", "runs"}
    assert {path.name for path in (out / "figures").iterdir()} >= {"accuracy-2.png", "accuracy-2.svg", "cost.pdf"}
    page = (out / "arena.html").read_text(encoding="utf-8")
    alarms = "refuted in clean runs: CB-DSL + guard: 0 of"
    for word in ("The Byzantine arena", "Worst case", "Backdoor", "Where our own defences break", "liar", alarms):
        assert word in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert len((out / "results.csv").read_text().splitlines()) == 1 + 2 + 4
