"""Write `tests/golden/folders`, small folders of every kind that commands leave, and `tests/golden/spec_keys.json`.

    python tools/golden_folders.py NAME ...     # writes only these, such as finished or served
    python tools/golden_folders.py all          # writes every folder, and the keys of all specs

The folders stand for those that users have on their disks. A test that fails on one of them means that a change of the
code broke users' files, so writing the folder anew hides the fault. It is legitimate in two cases only: (1) a folder of
a new kind is added, and the others stay as they are; (2) a release changes a format on purpose, says so in the
changelog, and the old folder stays here under another name, with a test that it is refused or still read.

Needs mosquitto, torch and cryptography, and takes a minute, most of it waiting. Keys in `provisioned` are made for this
test and protect nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import numpy as np

import cbdsl

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "tests" / "golden"
sys.path.insert(0, str(GOLDEN.parent))

from support import wire_code as code  # noqa: E402

DATA = "data/points.npz"
SIZES = {
    "data.samples_per_worker": 20,
    "data.shared_training": 12,
    "data.shared_scoring": 30,
    "data.holdout": 100,
    "workers": 4,
    "local.learning_rate": 0.1,
}
SMALL = ["--data", DATA, "--model", "softmax", *(f"--set={key}={value}" for key, value in SIZES.items())]
STUDY = [f"--set={key}={value}" for key, value in {**SIZES, "data.source": DATA, "model": "softmax"}.items()]
DROPPED = ("*.png", "*.svg", "*.pdf", "*.html", "*.log", ".lock", ".*.partial", "figures")
MINUTE = 60.0

PLUGIN = '''"""An aggregator of a user's own."""

import numpy as np

from cbdsl import register


@register.aggregator("middle")
def middle(rows, attackers, trust, *, quantile=0.5):
    """Take a quantile of every weight."""
    return np.quantile(rows, quantile, axis=0).astype(np.float32)
'''

CHECKPOINTS: dict[str, dict[str, object]] = {
    "interrupted-cb-dsl": {"codec.up": "q8", "codec.down": "q4", "attack.byzantine": 1},
    "interrupted-scaffold": {"method": "scaffold"},
    "interrupted-fedadam": {"method": "fedadam", "codec.up": "topk"},
}
"""Runs that stop in round 4 of 6, after a checkpoint in round 3."""


def command(*words: str) -> None:
    """Run a command as a user would, in the present folder."""
    print("cbdsl", *words)
    subprocess.run([sys.executable, "-m", "cbdsl", *words], check=True, stdout=subprocess.DEVNULL)


def small_spec(settings: dict[str, object]) -> cbdsl.Spec:
    """Return a spec on the small data."""
    start = cbdsl.preset("paper-iid").with_settings({**SIZES, "data.source": DATA, "model": "softmax"})
    return start.with_settings({"rounds": 6, **settings})


def write_data(folder: Path) -> None:
    """Write a data set of three clouds of points in four dimensions, and its samples alone."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(3, 4))
    arrays = {}
    for part, count in (("train", 420), ("test", 60)):
        labels = np.arange(count) % 3
        features = centres[labels] + 0.5 * rng.normal(size=(count, 4))
        arrays[f"{part}_features"], arrays[f"{part}_labels"] = features.astype(np.float32), labels.astype(np.uint8)
    np.savez_compressed(folder / "points.npz", allow_pickle=False, **arrays)
    samples = {"features": arrays["test_features"][:12], "labels": arrays["test_labels"][:12]}
    np.savez_compressed(folder / "samples.npz", allow_pickle=False, **samples)


def finished() -> None:
    """Write a finished run with an attacker, and the theory of it."""
    command("run", "paper-iid", *SMALL, "--rounds", "4", "--byzantine", "1", "--out", "finished")
    command("theory", "finished")
    command("run", "paper-iid", *SMALL, "--rounds", "2", "--init", "finished", "--out", "finished-from-a-model")


def interrupted() -> None:
    """Write runs that were stopped, each beside the same run that was not."""
    for name, settings in CHECKPOINTS.items():
        spec = small_spec(settings)
        try:
            cbdsl.run(spec, out=name, callbacks=[_Stop()])
        except KeyboardInterrupt:
            print(f"{name} is stopped")
        cbdsl.run(spec, out=name.replace("interrupted", "whole"), callbacks=[])


class _Stop(cbdsl.Callback):
    """Waits in round 2 until a checkpoint is due, and stops the run in round 4."""

    def round(self, record: cbdsl.RoundRecord) -> None:
        if record.round == 2:
            time.sleep(5.5)
        if record.round == 4:
            raise KeyboardInterrupt


def plugin() -> None:
    """Write a finished run with a plugin."""
    Path("plugins").mkdir(exist_ok=True)
    Path("plugins/middle.py").write_text(PLUGIN)
    words = ["--plugin", "plugins/middle.py", "--aggregator", "middle", "--set=options.middle.quantile=0.4"]
    command("run", "paper-iid", *SMALL, "--method", "fedavg", *words, "--rounds", "2", "--out", "plugin")


def sweep() -> None:
    """Write a sweep of four runs."""
    words = ["--over", "seed=0..1", "--over", "swarm.inertia=0.5,0.9", "--jobs", "1"]
    command("sweep", "paper-iid", *SMALL, "--rounds", "2", *words, "--out", "sweep")


def studies() -> None:
    """Write an arena, a search for settings, and a study."""
    words = ["--attacks", "gaussian", "--defences", "fedavg", "--byzantine", "1", "--seeds", "1", "--jobs", "1"]
    command("arena", *words, "--preset", "paper-iid", *STUDY, "--set=rounds=2", "--out", "arena")
    words = ["--over", "swarm.inertia=0.1..1", "--budget", "2", "--confirm", "1", "--jobs", "1", "--out", "tuned"]
    command("tune", "paper-iid", *SMALL, "--rounds", "2", *words)
    words = ["--seeds", "1", "--ways", "fedavg", "--clean", "--jobs", "1", "--set=rounds=2", "--out", "study"]
    command("study", "fashion", *STUDY, *words)


def generated() -> None:
    """Write shared samples from a generator, and a run that takes them."""
    words = ["--samples", "12", "--scoring", "30", "--passes", "1", "--out", "generated"]
    sizes = [one for one in SMALL if one.startswith(("--set=data.", "--set=workers="))]
    command("generate", "paper-iid", "--data", DATA, *sizes, *words)
    command(
        "run",
        "paper-iid",
        *SMALL,
        "--rounds",
        "2",
        "--set=data.shared_source=generated/shared.npz",
        "--out",
        "on-generated",
    )


def swarm() -> None:
    """Write a swarm on one machine that was stopped in a round, with the workers' state and the journal."""
    words = [sys.executable, "-m", "cbdsl", "swarm", "--preset", "paper-iid", *SMALL]
    words += ["--rounds", "12", "--codec", "q8", "--broker", "mosquitto", "--out", "swarm"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    rounds = Path("swarm/rounds.jsonl")
    _wait(lambda: rounds.exists() and rounds.read_bytes().count(b"\n") >= 3 and Path("swarm/journal.bin").exists())
    process.send_signal(signal.SIGINT)
    process.wait(MINUTE)
    if rounds.read_bytes().count(b"\n") == 12 or not Path("swarm/journal.bin").exists():
        raise SystemExit("The swarm was not stopped in time. Run this again.")


def served() -> None:
    """Write a run of a server with two workers, to its end: with its secret and the workers' state."""
    with _broker() as url:
        words = [sys.executable, "-m", "cbdsl"]
        crew = [
            subprocess.Popen(
                [
                    *words,
                    "work",
                    "--id",
                    name,
                    "--broker",
                    url,
                    "--data",
                    "data/samples.npz",
                    "--state",
                    f"served/{name}",
                ]
            )
            for name in ("sensor-1", "sensor-2")
        ]
        Path("roster.txt").write_text("sensor-1\nsensor-2\n")
        sizes = [one for one in SMALL if "samples_per_worker" not in one and "workers" not in one]
        words += ["serve", "paper-iid", *sizes, "--rounds", "3", "--broker", url, "--roster", "roster.txt"]
        subprocess.run([*words, "--out", "served/server"], check=True, stdout=subprocess.DEVNULL)
        for process in crew:
            process.wait(MINUTE)


def flower() -> None:
    """Write a run on Flower that was stopped in its third round, with the nodes' state."""
    for key, value in {**SIZES, "workers": 3}.items():
        FLOWER_SETTINGS.append(f"{key}={value}")
    config = {"rounds": 5, "settings": " ".join(FLOWER_SETTINGS), "join-seconds": 30.0}
    try:
        code.flower_conversation(Path("flower"), 3, config, stop_after=7)
    except KeyboardInterrupt:
        print("flower is stopped")


FLOWER_SETTINGS = ["model=softmax", f"data.source={DATA}", "codec.up=q8", "codec.down=q8"]


def provisioned() -> None:
    """Write the keys and the rules of a swarm's broker."""
    words = ["--names", "sensor-1,sensor-2,sensor-3", "--swarm", "lab", "--host", "broker.example", "--days", "3650"]
    command("provision", "provisioned", *words)
    command("provision", "provisioned", "--revoke", "sensor-3")


@contextmanager
def _broker() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([shutil.which("mosquitto") or "/usr/sbin/mosquitto", "-p", str(port)])
    time.sleep(0.5)
    try:
        yield f"mqtt://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(MINUTE)


def _wait(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + MINUTE
    while not ready():
        if time.monotonic() > end:
            raise SystemExit("It takes too long.")
        time.sleep(0.002)


MAKERS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "finished": (finished, ("finished", "finished-from-a-model")),
    "interrupted": (interrupted, (*CHECKPOINTS, *(name.replace("interrupted", "whole") for name in CHECKPOINTS))),
    "plugin": (plugin, ("plugin", "plugins")),
    "sweep": (sweep, ("sweep",)),
    "studies": (studies, ("arena", "tuned", "study")),
    "generated": (generated, ("generated", "on-generated")),
    "swarm": (swarm, ("swarm",)),
    "served": (served, ("served", "roster.txt")),
    "flower": (flower, ("flower",)),
    "provisioned": (provisioned, ("provisioned",)),
}


def keep(name: str, target: Path) -> None:
    """Copy what a maker left, without pictures, logs, locks and most of the pages that explain a folder.

    The plugin of a run is named by its whole path, which is made a path in the folder.
    """
    shutil.rmtree(target / name, ignore_errors=True)
    if Path(name).is_file():
        shutil.copy(name, target / name)
        return
    shutil.copytree(name, target / name, ignore=shutil.ignore_patterns(*DROPPED))
    if name == "swarm":
        shutil.rmtree(target / name / "broker")  # made anew whenever a swarm is started
    if name == "plugin":
        spec = target / name / "spec.toml"
        spec.write_text(spec.read_text().replace(f"{Path.cwd()}/", ""))
    for page in (target / name).rglob("README.txt"):
        if name.startswith(("interrupted", "whole")) or page.parent.parent.name in {"runs", "trials", "workers"}:
            page.unlink()
    for empty in sorted((target / name).rglob("*"), reverse=True):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()


def foreign(target: Path) -> list[str]:
    """Return files that name a place on this machine."""
    pattern = re.compile(rb"(?<![\w.])/(tmp|root|home|work|usr|var)/")
    return [str(path) for path in sorted(target.rglob("*")) if path.is_file() and pattern.search(path.read_bytes())]


def spec_keys(target: Path) -> None:
    """Write the key of every preset, and of every spec in the folders."""
    with chdir(target):
        folders = {str(path): code.from_toml(path.read_text()).key() for path in sorted(Path().rglob("spec.toml"))}
    presets = {name: cbdsl.preset(name).key() for name in code.PRESETS}
    (GOLDEN / "spec_keys.json").write_text(json.dumps({"presets": presets, "folders": folders}, indent=1) + "\n")


def main() -> int:
    """Write what the command line names."""
    wanted = sys.argv[1:]
    if not wanted or not set(wanted) <= {*MAKERS, "all"}:
        print(f"Give some of: all, {', '.join(MAKERS)}")
        return 2
    chosen = list(MAKERS) if "all" in wanted else wanted
    target = GOLDEN / "folders"
    target.mkdir(exist_ok=True)
    source = str(HERE.parent / "src")
    os.environ |= {"PYTHONPATH": source, "NO_COLOR": "1", "COLUMNS": "100"}
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):
        if (target / "data").exists():
            shutil.copytree(target / "data", "data")
        else:
            write_data(Path("data"))
            keep("data", target)
        for name in chosen:
            make, left = MAKERS[name]
            make()
            for one in left:
                keep(one, target)
    spec_keys(target)
    found = foreign(target)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
