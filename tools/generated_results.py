"""The table of docs/generate.md: CB-DSL with real and with generated D_G, and with attackers behind a guard.

    python tools/generated_results.py OUT [SEEDS]      # such as 0,1,2; the same command goes on with what was stopped

Every seed has generators of its own: one learned from the samples that its server sets aside, one from its workers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cbdsl.presets import preset
from cbdsl.runs.resolve import resolve
from cbdsl.spec import Spec
from cbdsl.studies.compare import Spread, format_percent
from cbdsl.studies.sweep import run_all

PRESETS = ("paper-iid", "paper-noniid")
SIZES = (150, 600, 2000)
GUARDED = {"defence.guard": True, "defence.commitment": True}
ATTACKS = ("", "sign-flip", "memoriser")
ATTACKERS = 5
Case = tuple[str, str, int, str]  # preset, where D_G is from, samples of D_tr, the attack; "-": no guard either


def file_of(out: Path, source: str, seed: int) -> Path:
    """A generator's file; those of workers are learned on non-i.i.d. data, the harder case."""
    folder = out / f"{source}-{seed}"
    words = ["--seed", str(seed), "--from", source, "--out", str(folder), "--samples", "2000", "--scoring", "2000"]
    if source == "server":  # the smallest D_tr, so that no run's hold-out is among what it learns from
        words += ["--holdout", "2000", "--set", "data.shared_training=150"]
    if source == "workers":
        words += ["--participation", "0.2"]
    start = "paper-noniid" if source == "workers" else "paper-iid"
    if not (folder / "shared.npz").exists():
        subprocess.run([sys.executable, "-m", "cbdsl", "generate", start, *words], check=True)
    return folder / "shared.npz"


def cases() -> list[Case]:
    """Every row of the two tables."""
    places = ("real", "server")
    plain = [(name, source, size, "-") for name in PRESETS for source in places for size in SIZES]
    federated = [(name, "workers", 600, "-") for name in PRESETS]
    return plain + federated + [("paper-noniid", source, 600, attack) for source in places for attack in ATTACKS]


def spec_of(case: Case, seed: int, out: Path) -> Spec:
    """One run, resolved."""
    name, source, size, attack = case
    settings: dict[str, object] = {"seed": seed, "data.shared_training": size}
    if source != "real":
        settings["data.shared_source"] = str(file_of(out, source, seed))
    if attack != "-":
        settings |= GUARDED
    if attack not in {"", "-"}:
        settings |= {"attack.name": attack, "attack.byzantine": ATTACKERS}
    return resolve(preset(name).with_settings(settings))


def main() -> None:
    """Run what is missing, and print the table."""
    out = Path(sys.argv[1])
    seeds = [int(word) for word in sys.argv[2].split(",")] if len(sys.argv) > 2 else [0, 1, 2]
    rows = cases()
    results = run_all([spec_of(case, seed, out) for seed in seeds for case in rows], out)
    print(
        "| partition | D_G | \\|D_tr\\| | guard, attack | final accuracy | honest banned |\n|---|---|---|---|---|---|"
    )
    for number, (name, source, size, attack) in enumerate(rows):
        found = [result.summary for result in results[number :: len(rows)]]
        guard = {"-": "no", "": "guard"}.get(attack, f"guard, {attack}")
        banned = sum(one.honest_banned for one in found)
        accuracy = format_percent(Spread.of([one.final_accuracy for one in found]))
        print(f"| {name} | {source} | {size:,} | {guard} | {accuracy} | {banned} |")


if __name__ == "__main__":
    main()
