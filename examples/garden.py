"""The whole life of a swarm on one machine, in a minute or two: `python examples/garden.py FOLDER`.

A broker with TLS, eight devices with sensor windows of their own, a network from a file. Devices and server are killed
and started again, a device is added, one is revoked, a second run starts from the first; in the end every device has
the trained model, and it runs as a C program. Needs mosquitto, a C compiler and torch; stops whatever it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from cbdsl.network.broker import Broker, end_process, find_mosquitto, running_broker

DEVICES, SENSORS, STEPS, CLASSES = 8, 6, 64, 4
PATIENCE = 180.0  # seconds for anything to come to pass
NET = Path(__file__).with_name("garden_net.py")
SETTINGS = (
    "--model", f"{NET}:Net", "--set", "local.learning_rate=0.005", "--set", "local.epochs=100", "--set",
    "data.shared_training=80", "--set", "data.shared_scoring=200", "--set", "data.holdout=40", "--threads", "1",
    "--grace-seconds", "10",
)  # fmt: skip
MAIN = """
#include <stdio.h>
void predict(const float *in, float *out);
int main(void) {{
    static float in[{inputs}], out[{classes}];
    while (fread(in, sizeof *in, {inputs}, stdin) == {inputs}) {{
        int best = 0, other;
        predict(in, out);
        for (other = 1; other < {classes}; other++)
            if (out[other] > out[best]) best = other;
        printf("%d\\n", best);
    }}
    return 0;
}}
"""


def windows(rng: np.random.Generator, count: int, shift: float = 0.0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Windows (count, SENSORS, STEPS) as a device measures them, and what was going on: another beat for each class.

    shift: what this device's sensors are off by.
    """
    labels = rng.integers(0, CLASSES, count).astype(np.int32)
    beat = 1.5 * (labels + 1)[:, None, None]
    phase = rng.uniform(0, 2 * np.pi, (count, 1, 1)) + np.arange(SENSORS)[:, None]
    wave = np.sin(beat * 2 * np.pi * np.arange(STEPS) / STEPS + phase)
    noise = rng.normal(0, 2.0, (count, SENSORS, STEPS))
    return (20 + 5 * (wave + noise + shift)).astype(np.float32), labels


class Garden:
    """A folder, a broker, and processes that end with it."""

    def __init__(self, folder: Path, broker: Broker, stack: contextlib.ExitStack) -> None:
        self.folder, self.broker, self._stack = folder, broker, stack
        self._mean, self._deviation = np.full(SENSORS, 20.0), np.full(SENSORS, 5.0)
        self._rng = np.random.default_rng(14)
        self.devices: dict[str, subprocess.Popen[bytes]] = {}

    # --- what is where

    def write_hub(self) -> None:
        """The server's own windows, and some that nobody learns from."""
        train, test, unseen = windows(self._rng, 400), windows(self._rng, 300), windows(self._rng, 400, 0.1)
        np.savez(
            self.folder / "hub.npz", train_features=train[0], train_labels=train[1], test_features=test[0],
            test_labels=test[1], feature_mean=self._mean, feature_deviation=self._deviation,
        )  # fmt: skip
        np.savez(self.folder / "unseen.npz", features=unseen[0], labels=unseen[1])

    def write_device(self, name: str) -> None:
        """A device's windows, in the scale that the server's network is given them."""
        features, labels = windows(self._rng, 240, self._rng.normal(0, 0.2))
        home = self.folder / "devices" / name
        home.mkdir(parents=True)
        scaled = (features - self._mean[:, None]) / self._deviation[:, None]
        np.savez(home / "samples.npz", features=scaled.astype(np.float32), labels=labels)

    # --- who does what

    def start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """A command of cbdsl as a process of its own, which ends with the garden."""
        with log.open("ab") as file:
            command = [sys.executable, "-m", "cbdsl", *words]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self._stack.callback(end_process, process)
        return process

    def start_device(self, name: str) -> None:
        """A worker with the certificate that was made for it; after a run it waits for the next."""
        keys, home = self.folder / "keys" / "workers" / name, self.folder / "devices" / name
        self.devices[name] = self.start(
            "work", "--id", name, "--swarm", "garden", "--broker", f"mqtts://localhost:{self.broker.port}",
            "--ca", f"{keys}/ca.crt", "--cert", f"{keys}/worker.crt", "--key", f"{keys}/worker.key",
            "--data", f"{home}/samples.npz", "--state", str(home), "--threads", "1", "--stay",
            log=home / "worker.log",
        )  # fmt: skip

    def start_server(self, out: str, *words: str) -> subprocess.Popen[bytes]:
        """The parameter server; the same words again go on with a run."""
        keys = self.folder / "keys" / "server"
        return self.start(
            "serve", "paper-iid", "--broker", f"mqtts://localhost:{self.broker.server_port}", "--swarm", "garden",
            "--roster", f"{keys}/roster.txt", "--ca", f"{keys}/ca.crt", "--cert", f"{keys}/server.crt", "--key",
            f"{keys}/server.key", "--data", f"{self.folder}/hub.npz", "--out", f"{self.folder}/{out}", *SETTINGS,
            *words, log=self.folder / f"{out}.log",
        )  # fmt: skip

    def reload_broker(self) -> None:
        """Have the broker read its revocation list again, and its rules where they are in a file."""
        os.kill(self.broker.pid, signal.SIGHUP)

    def rounds(self, out: str) -> list[dict[str, Any]]:
        """The rounds that a run has played."""
        return self.lines(out, "rounds.jsonl")

    def lines(self, out: str, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file in a run's folder."""
        path = self.folder / out / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def happened(self, out: str, event: str, name: str) -> bool:
        """Whether the server's log of events has this of a worker."""
        return any(one["event"] == event and one.get("worker") == name for one in self.lines(out, "events.jsonl"))

    def claimed(self, out: str, name: str) -> bool:
        """Whether a worker has claimed a score."""
        return any(name in one["claims"] for one in self.lines(out, "claims.jsonl"))

    def log_of(self, name: str) -> str:
        """What a device has said so far."""
        return (self.folder / "devices" / name / "worker.log").read_text(encoding="utf-8")

    def finish(self, server: subprocess.Popen[bytes], out: str) -> dict[str, Any]:
        """Wait for the end of a run; its summary."""
        code = server.wait(PATIENCE)
        if code:
            raise SystemExit(f"The server ended with {code}: {(self.folder / f'{out}.log').read_text()[-2000:]}")
        summary: dict[str, Any] = json.loads((self.folder / out / "summary.json").read_text())
        return summary


def cbdsl(*words: str) -> str:
    """Carry out a command of cbdsl; what it prints."""
    command = [sys.executable, "-m", "cbdsl", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise SystemExit(f"cbdsl {' '.join(words)}: {done.stderr}")
    return done.stdout


def wait_for(what: str, condition: Callable[[], bool], server: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until something has come to pass, and not for ever: with a server no longer than that is there."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline or (server is not None and server.poll() is not None):
            raise SystemExit(f"It did not come to pass: {what}.")
        time.sleep(0.1)


@contextlib.contextmanager
def frozen(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """A server whose machine stands still for a while; here so that a fast one does not end its run meanwhile."""
    server.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


def say(text: str) -> None:
    """A line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def first_run(garden: Garden, names: Sequence[str]) -> dict[str, Any]:
    """A run in which devices and server are killed, one device is added and one is revoked."""
    rounds = ("--rounds", "80")
    server = garden.start_server("first", *rounds)
    for name in names:
        garden.start_device(name)
    wait_for("three rounds", lambda: len(garden.rounds("first")) >= 3, server)

    for name in names[:2]:
        garden.devices[name].kill()
        garden.devices[name].wait()
        garden.start_device(name)
    say(f"killed {names[0]} and {names[1]} and started them again")

    wait_for("five rounds", lambda: len(garden.rounds("first")) >= 5, server)
    server.kill()
    server.wait()
    played = len(garden.rounds("first"))
    server = garden.start_server("first", *rounds)
    wait_for("the server goes on", lambda: len(garden.rounds("first")) > played, server)
    say(f"killed the server after {played} rounds; it went on")

    garden.write_device("porch")
    with frozen(server):
        cbdsl("provision", f"{garden.folder}/keys", "--add", "--names", "porch")
        garden.reload_broker()
    wait_for("porch is let in", lambda: garden.happened("first", "enrolled", "porch"), server)
    with frozen(server):
        garden.start_device("porch")
        wait_for("porch says hello", lambda: "the server's welcome" in garden.log_of("porch"))
    wait_for("porch takes part", lambda: garden.claimed("first", "porch"), server)
    say("added porch while the run is played; it takes part")

    with frozen(server):
        cbdsl("provision", f"{garden.folder}/keys", "--revoke", names[-1])
        garden.reload_broker()
    wait_for(f"{names[-1]} is out", lambda: garden.happened("first", "left", names[-1]), server)
    say(f"revoked {names[-1]}; {garden.rounds('first')[-1]['participants']} devices took part in the last round")
    return garden.finish(server, "first")


def second_run(garden: Garden) -> dict[str, Any]:
    """A run that starts from what the first came to; the devices are still there."""
    first = garden.folder / "first"
    summary = garden.finish(garden.start_server("second", "--rounds", "6", "--init", str(first)), "second")
    before, after = (load_file(garden.folder / name) for name in ("first/model.safetensors", "second/init.safetensors"))
    assert all(np.array_equal(before[name], after[name]) for name in before), "it started from another model"
    return summary


def compare_devices(garden: Garden, names: Sequence[str]) -> None:
    """Every device has the server's model, to the bit."""
    trained = load_file(garden.folder / "second" / "model.safetensors")
    for name in names:
        path = garden.folder / "devices" / name / "model.safetensors"

        def has_it(path: Path = path) -> bool:
            found = load_file(path) if path.exists() else {}
            return found.keys() == trained.keys() and all(np.array_equal(found[one], trained[one]) for one in trained)

        wait_for(f"{name} has the trained model", has_it)
    say(f"{len(names)} devices have the trained model in a file, the same to the bit")


def compare_programs(garden: Garden, model: Path) -> float:
    """The model as a C program says what `cbdsl predict` says of windows that nobody learned from; its accuracy."""
    folder, unseen = garden.folder, garden.folder / "unseen.npz"
    said = json.loads(cbdsl("predict", str(model), "--data", str(unseen), "--json"))
    cbdsl("export", str(model), "--to", "c", "--out", f"{folder}/model.c")
    (folder / "main.c").write_text(MAIN.format(inputs=SENSORS * STEPS, classes=CLASSES))
    sources = [str(folder / name) for name in ("main.c", "model.c")]
    options = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([str(compiler()), *options, *sources, "-lm", "-o", str(folder / "garden")], check=True)
    with np.load(unseen) as stored:
        features, labels = stored["features"], stored["labels"]
    done = subprocess.run(
        [str(folder / "garden")], input=features.astype("<f4").tobytes(), capture_output=True, check=True, timeout=60
    )
    classes = [int(line) for line in done.stdout.split()]
    assert classes == [one["class"] for one in said["predictions"]], "the programs differ"
    accuracy = float(np.mean(np.array(classes) == labels))
    assert accuracy == said["accuracy"]
    return accuracy


def compiler() -> str | None:
    """A C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def free_ports() -> tuple[int, int]:
    """Two ports that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        return int(first.getsockname()[1]), int(second.getsockname()[1])


def main(folder: Path) -> None:
    """All of it."""
    names = [f"worker-{number}" for number in range(1, DEVICES + 1)]
    folder.mkdir(parents=True)
    keys = folder / "keys"
    port, inner = free_ports()
    cbdsl(
        "provision", str(keys), "--workers", str(DEVICES), "--swarm", "garden", "--host", "localhost",
        "--port", str(port), "--server-port", str(inner),
    )  # fmt: skip
    config = keys / "broker" / "mosquitto.conf"
    with (
        running_broker(folder / "broker", config=config, port=port, server_port=inner) as broker,
        contextlib.ExitStack() as stack,
    ):
        garden = Garden(folder, broker, stack)
        garden.write_hub()
        for name in names:
            garden.write_device(name)
        first = first_run(garden, names)
        say(f"first run: {first['final_accuracy']:.1%} of the test set after {first['rounds']} rounds")
        second = second_run(garden)
        say(f"second run, from there: {second['final_accuracy']:.1%} after {second['rounds']} rounds")
        compare_devices(garden, [*names[:-1], "porch"])
        accuracy = compare_programs(garden, folder / "devices" / "porch" / "model.safetensors")
        say(f"as a C program: {accuracy:.1%} of windows that nobody learned from, as `cbdsl predict` says")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Give a folder that is not there yet: python examples/garden.py FOLDER")
    if find_mosquitto() is None or compiler() is None:
        sys.exit("This needs mosquitto and a C compiler.")
    main(Path(sys.argv[1]))
