"""Prove that a change leaves the numbers as they are: hash the rounds and the model of many runs, and compare.

    python tools/round_hashes.py record FILE [WORD ...]     # before the change
    python tools/round_hashes.py compare FILE [WORD ...]    # after it: exit code 1 and a list of what differs
    python tools/round_hashes.py record-short               # write tests/golden/numbers.json anew
    python tools/round_hashes.py compare-short              # what tests/golden/test_numbers.py runs

WORDs choose the cases whose names contain all of them. `--source DIR` runs the code of another checkout, so that one
copy of this tool records the old code and compares the new. `--processes N` runs N cases at once.

A case is one command, `python -m cbdsl ...`; `round_cases.py` contains all of them. There is one hash per key of
rounds.jsonl and summary.json, without times, and one of the model. Texts, such as reasons, have hashes of their own:
their differences are listed, but they are not numbers and do not change the exit code.

FILE holds for one build on one kind of machine, so it is not kept in the repository. The short set is: it uses portable
kernels, see `portable_kernels.py`. Record it anew only when a change of the numbers is intended, and say in the commit
why they change, or when a new version of numpy, zlib or the C library changes them and the code is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import portable_kernels
from round_cases import Case, all_cases, write_files
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
SHORT = ROOT / "tests" / "golden" / "numbers.json"
TIMES = {"seconds", "phases"}
IGNORED = {"summary.seconds", "summary.version", "summary.spec_key"}  # the key contains the path of the data
TEXT = "text: "  # how the names of hashes of texts begin
CHECKPOINT_SECONDS = 5.5  # a run writes its first checkpoint after five seconds
PATIENCE = 300.0  # seconds until a run that should be stopped counts as hanging

Hashes = dict[str, str]


def main() -> None:
    """Record or compare."""
    options = _options()
    is_short = options.order.endswith("-short")
    cases = {name: case for name, case in all_cases().items() if not is_short or case.short}
    cases = {name: case for name, case in cases.items() if all(word in name for word in options.words)}
    if not cases:
        sys.exit("no case has such a name")
    started = time.monotonic()
    found = run_cases(cases, Path(options.source).resolve(), options.processes, portable=is_short)
    used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    _say(f"{len(found)} cases, {time.monotonic() - started:.0f} s, {used:.0f} s of processor time")
    failures = [f"{name}: {hashes['error']}" for name, hashes in found.items() if "error" in hashes]
    failures += twins_that_differ(cases, found)
    path = Path(options.file)
    if options.order.startswith("record"):
        if failures and is_short:
            sys.exit("\n".join(["nothing was recorded:", *failures]))
        path.write_text(_as_json({"recorded with": _versions(), **found}, without_texts=is_short))
    else:
        recorded = json.loads(path.read_text())
        failures += differences({name: recorded[name] for name in cases if name in recorded}, found)
        failures += [f"{name}: was not recorded" for name in cases if name not in recorded]
        if failures and is_short:
            _say(f"recorded with {recorded['recorded with']}; this is {_versions()}")
    failed = [line for line in failures if TEXT not in line]
    texts_only = [line for line in failures if TEXT in line]
    print("\n".join([*failed, *texts_only]) or f"{len(cases)} cases, nothing differs")
    sys.exit(bool(failed))


def run_cases(cases: Mapping[str, Case], source: Path, processes: int, portable: bool) -> dict[str, Hashes]:
    """Run all cases with the code of one checkout, and return their hashes by name."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_files(folder)
        code = portable_kernels.portable_copy(source, folder / "package") if portable else source / "src"
        os.environ.update(portable_kernels.environment() if portable else {})
        os.environ["PYTHONPATH"] = str(code)
        arguments = (str(code), scratch)
        found = {}
        with ProcessPoolExecutor(processes, get_context("spawn"), _prepare, arguments) as pool:
            waiting = {pool.submit(timed_hashes, case): name for name, case in cases.items()}
            for number, done in enumerate(as_completed(waiting), 1):
                name = waiting[done]
                found[name], seconds = done.result()
                failed = "; it failed" if "error" in found[name] else ""
                _say(f"{number}/{len(cases)} {name}: {seconds:.1f} s{failed}")
    return {name: found[name] for name in cases}


def _prepare(code: str, scratch: str) -> None:
    """Prepare a process of the pool: the package from `code`, and a working folder with the data."""
    sys.path.insert(0, code)
    os.chdir(scratch)
    import cbdsl  # noqa: PLC0415 - from the checkout that is compared

    if not Path(str(cbdsl.__file__)).is_relative_to(code):
        raise RuntimeError(f"cbdsl was imported from {cbdsl.__file__}, not from {code}")


def timed_hashes(case: Case) -> tuple[Hashes, float]:
    """Return a case's hashes and the seconds that they took."""
    started = time.monotonic()
    return hashes_of(case), time.monotonic() - started


def hashes_of(case: Case) -> Hashes:
    """Run one case and return its hashes, or the end of its output under "error"."""
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        out, log = Path(scratch) / "run", Path(scratch) / "log"
        words = [*case.words, "--out", str(out), "--json"]
        words += [] if "--threads" in words else ["--threads", "1"]
        try:
            if case.stopped:
                stop_after_checkpoint(words, out, log)
                words = ["resume", str(out), "--threads", "1", "--json"]
            code = (run_here if case.words[0] == "run" and "--on" not in words else run_apart)(words, log)
            return hashes_in(out) if code == 0 else {"error": log.read_text()[-600:]}
        except (OSError, RuntimeError, ValueError) as error:
            return {"error": repr(error)}


def run_here(words: list[str], log: Path) -> int:
    """Run a command in this process as `python -m cbdsl` does, and return its exit code."""
    kept, arguments = [os.dup(1), os.dup(2)], sys.argv
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        sys.argv = ["cbdsl", *words]
        try:
            runpy.run_module("cbdsl", run_name="__main__")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            sys.argv = arguments
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, copy in enumerate(kept, 1):
                os.dup2(copy, stream)
                os.close(copy)
    return 0


def run_apart(words: list[str], log: Path) -> int:
    """Run a command in a process of its own, and return its exit code."""
    with log.open("w") as file:
        return subprocess.run(_command(words), stdout=file, stderr=file, check=False).returncode


def stop_after_checkpoint(words: list[str], out: Path, log: Path) -> None:
    """Start a run, and kill it in the round after its first checkpoint.

    The run is suspended until its first checkpoint is due, which takes time and no processor.
    """
    rounds, checkpoint = out / "rounds.jsonl", out / "checkpoint.npz"
    with log.open("w") as file, subprocess.Popen(_command(words), stdout=file, stderr=file) as process:
        try:
            _wait(process, lambda: rounds.exists() and _lines(rounds) >= 2)
            process.send_signal(signal.SIGSTOP)
            time.sleep(CHECKPOINT_SECONDS)
            process.send_signal(signal.SIGCONT)
            _wait(process, checkpoint.exists)
            at = _lines(rounds)
            _wait(process, lambda: _lines(rounds) > at)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
    if (out / "summary.json").exists():
        raise RuntimeError("the run ended before it was killed")


def _wait(process: subprocess.Popen[bytes], is_true: Callable[[], bool]) -> None:
    """Wait until something about a process is true."""
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended or hangs (exit code {process.returncode}) before it was killed")
        time.sleep(0.002)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "cbdsl", *words]


def hashes_in(folder: Path) -> Hashes:
    """Return the hashes of a finished run: one per key that has a value, and one of the model."""
    rounds = [_flat(json.loads(line)) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    values: dict[str, Any] = {key: [line.get(key) for line in rounds] for line in rounds for key in line}
    for key, value in summary.items():
        values[f"{TEXT if isinstance(value, str) else ''}summary.{key}"] = value
    model = load_file(folder / "model.safetensors")
    return {
        key: _hash(json.dumps(value, sort_keys=True).encode())
        for key, value in values.items()
        if key.removeprefix(TEXT) not in IGNORED and (any(value) if isinstance(value, list) else value)
    } | {"model": _hash(b"".join(model[name].tobytes() for name in sorted(model)))}


def _flat(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of rounds.jsonl with its texts separated from its numbers."""
    verdicts, set_aside = line["verdicts"], line["set_aside"]
    found = {key: value for key, value in line.items() if key not in {*TIMES, "names", "verdicts", "set_aside"}}
    for key in ("worker", "outcome", "claimed", "measured", "reason"):
        found[f"{TEXT if key == 'reason' else ''}verdicts.{key}"] = [verdict[key] for verdict in verdicts]
    found["set_aside"] = sorted(set_aside)
    return found | {f"{TEXT}set_aside": set_aside, f"{TEXT}names": line.get("names")}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:10]


def differences(recorded: Mapping[str, Hashes], found: Mapping[str, Hashes]) -> list[str]:
    """Return a line per case and key that differs; keys that no recorded case has are new, and left out."""
    known = {key for hashes in recorded.values() for key in hashes}
    return [
        f"{name}: {key}"
        for name, hashes in recorded.items()
        if "error" not in found[name]
        for key in sorted({*hashes, *(found[name].keys() & known)})
        if hashes.get(key) != found[name].get(key)
    ]


def twins_that_differ(cases: Mapping[str, Case], found: Mapping[str, Hashes]) -> list[str]:
    """Return a line per key in which a case differs from the one that must have the same numbers."""
    pairs = [(name, case.twin) for name, case in cases.items() if case.twin in found]
    return [
        f"{name}: {line.partition(': ')[2]} is not that of '{twin}'"
        for name, twin in pairs
        if "error" not in found[twin]
        for line in differences({name: found[twin]}, found)
    ]


def _versions() -> dict[str, str]:
    """Return the versions of what the short set's numbers may depend on beside the code."""
    return {"numpy": np.__version__, "zlib": zlib.ZLIB_RUNTIME_VERSION, "libc": " ".join(platform.libc_ver())}


def _as_json(found: Mapping[str, Hashes], without_texts: bool) -> str:
    """Return one line per case, so that a change is seen case by case."""
    lines = []
    for name, hashes in found.items():
        kept = {key: value for key, value in hashes.items() if not (without_texts and key.startswith(TEXT))}
        lines.append(f"{json.dumps(name)}: {json.dumps(kept, sort_keys=True)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hash the numbers of many runs, and compare them with recorded ones.")
    parser.add_argument("order", choices=("record", "compare", "record-short", "compare-short"))
    parser.add_argument("words", nargs="*", help="FILE, unless short; then only cases whose names contain all of these")
    parser.add_argument("--source", default=str(ROOT), help="the checkout whose code is run; this one by default")
    parser.add_argument("--processes", type=int, default=2, help="cases that are run at once")
    options = parser.parse_intermixed_args()
    options.file = str(SHORT) if options.order.endswith("-short") else options.words.pop(0) if options.words else ""
    if not options.file:
        parser.error("name the file to record to or to compare with")
    if options.order == "record-short" and options.words:
        parser.error("the short set is recorded as a whole")
    return options


if __name__ == "__main__":
    main()
