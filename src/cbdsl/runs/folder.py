"""A run's folder: writes its files atomically, and reads them again to resume or to show the run.

What exists already is never overwritten, except by the run it belongs to.
"""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.numpy import save as safetensors_bytes

from cbdsl import register, spec as specs
from cbdsl.algorithm.messages import BackOff, ServerState
from cbdsl.algorithm.particles import Particles
from cbdsl.algorithm.worker_table import KeptRows
from cbdsl.arrays import Floats, NamedArrays, copy_memory
from cbdsl.errors import UserError
from cbdsl.models.personal_models import FILE as PERSONAL
from cbdsl.models.saved_model import ModelMetadata, file_of
from cbdsl.runs.build import build_method
from cbdsl.runs.records import NO_CLAIMS, Claims, RoundRecord, Summary, describe
from cbdsl.runs.worker_results import WorkerResults
from cbdsl.spec import Spec
from cbdsl.util.files import (
    append_bytes,
    is_free,
    private_folder,
    read_json,
    read_text,
    replace_atomically,
    write_atomically,
    write_json,
)
from cbdsl.util.npz import load_arrays, map_arrays, save_arrays
from cbdsl.util.serialize import from_plain, to_plain

README = """\
A run of cbdsl. `cbdsl watch` shows it in a browser, while it runs and afterwards.

README.txt         this page
spec.toml          what was run; `cbdsl run --spec spec.toml` runs it again
rounds.jsonl       one object per round: accuracy, score, verdicts, messages and bytes
claims.bin         every claim in order, 12 bytes each: round and worker (int32), score (float32), little endian
summary.json       the run in one object
accuracy.png       test accuracy by round, drawn by the command line
model.safetensors  the final global model, its network, the scaling of features; for `cbdsl predict` and `export`
local_test.csv     with data.local_test: metrics by worker, on the samples that each of them held back
local_test.png     the same as a figure, drawn by the command line
personal_models.safetensors  the workers' own models, with their BatchNorm statistics
init.safetensors   the model it started from, where one was given
theory.json        the run's constants and bounds, written by `cbdsl theory`
repaired.safetensors  the model without the backdoors that `cbdsl audit --repair` found
plugins/           the plugins as they were when the run was started, and what they import from their folders
checkpoint.npz     the state of the server and, until the run is finished, of the swarm; for `cbdsl resume`
.lock              held by the process that runs it
.NAME.partial      a file that was being written when its process was killed; it may be removed

Where workers are processes of their own (`cbdsl serve`, `cbdsl swarm`) also:

roster.json        the workers' names in the order of their numbers, and how many samples each says it holds
deployment.json    the number by which workers know this run, and the name of the swarm
events.jsonl       connections, disconnections and refused messages; earlier ones are in events.old.jsonl
claims.jsonl       what every worker claimed, round by round; earlier rounds are in claims.old.jsonl
refused.json       how many messages were refused, by reason and by worker
wire.json          bytes on the server's connection, by direction and kind of message
unban/             requests of `cbdsl unban` that the server has not carried out yet
journal.bin        messages received in the current round; removed when the run is finished
.secret            the server's secret number, which draws its private hold-out (serve); keep it private
broker/            the broker's mosquitto.conf, passwords (a hash of the one of this run) and broker.log (swarm)
workers/           a folder per worker with its samples, its state, its log and a README.txt (swarm)
"""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of the server and of the workers after a round."""

    state: ServerState
    rows: KeptRows | None  # None once the run is finished, or if workers keep nothing between rounds
    attackers: NamedArrays = field(default_factory=dict)  # the attackers' memories, see `Adversary.memory`


@dataclass(frozen=True)
class _CheckpointMeta:
    """What a checkpoint holds beside arrays; floats are hexadecimal, so that they are exact."""

    key: str
    round: int
    global_score: str
    version: int
    told: list[tuple[int, int]]  # worker, version of w^g
    updates: list[int]  # their lengths
    banned: list[int]
    back_offs: list[tuple[int, int, int]]  # worker, times, until
    last_uploaded: list[tuple[int, str]]  # worker, claim


_WORKERS = "workers"
_ROWS = (_WORKERS, *(each.name for each in fields(Particles)))


class RunFolder:
    """The folder of one run, open for one process at a time."""

    def __init__(self, path: Path, private: bool = False) -> None:
        """private: files are readable by the owner alone, whatever the umask."""
        self.path, self._private = path, private
        self._lock: IO[str] | None = None

    @staticmethod
    def create(path: Path, spec: Spec, private: bool = False) -> RunFolder:
        """Create a folder; it must not exist, or be empty. private: see `RunFolder`."""
        try:
            if not is_free(path):
                raise UserError(
                    f"{path} exists and is not an empty folder; nothing was overwritten. Give another --out, or "
                    f"continue that run with: cbdsl resume {path} (cbdsl.resume in Python, with what was given there)",
                    code="exists-already",
                )
            if private:
                private_folder(path)
            else:
                path.mkdir(parents=True, exist_ok=True)
            folder = RunFolder(path, private)
            folder.acquire()
            write_atomically(path / "spec.toml", spec.to_toml().encode(), private)
            write_atomically(path / "README.txt", README.encode())
            for name in spec.plugins:
                _keep_plugin(path / "plugins", name)
        except OSError as error:
            raise _not_writable(path, error) from error
        return folder

    @staticmethod
    def open(path: Path, private: bool = False) -> tuple[RunFolder, Spec]:
        """Open the folder of an earlier run. private: see `RunFolder`."""
        if not (path / "spec.toml").is_file():
            inside = next(path.glob("*/spec.toml"), None) or next(path.glob("runs/*/spec.toml"), None)
            if inside is not None:
                raise UserError(
                    f"{path} is not the folder of a run but of many. Give one of them: {inside.parent}",
                    code="missing-file",
                )
            raise UserError(
                f"{path} is not the folder of a run: it has no spec.toml. Start one with: cbdsl run --out {path}",
                code="missing-file",
            )
        folder = RunFolder(path, private)
        spec = specs.read(path / "spec.toml")
        try:
            folder.acquire()
            for name in spec.plugins:
                _compare_plugin(path, name)
                _keep_plugin(path / "plugins", name)
        except OSError as error:
            folder.close()
            raise _not_writable(path, error) from error
        except UserError:
            folder.close()
            raise
        return folder, spec

    @staticmethod
    def open_or_create(path: Path) -> RunFolder:
        """Open a folder that is not a run's for this process alone; create it if it does not exist."""
        folder = RunFolder(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.acquire()
        except OSError as error:
            raise _not_writable(path, error) from error
        return folder

    def acquire(self) -> None:
        """Lock the folder until `close`; an error if another process has locked it."""
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise UserError(
                f"Another process is working in {self.path}. Wait for it, or give another --out.", code="conflict"
            ) from None
        self._lock = lock

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def keep_init(self, source: str, tensors: dict[str, Floats]) -> None:
        """Copy the model that the run starts from, so that the run can be resumed without that file."""
        file = specs.init_file(source)
        content = file.read_bytes() if file.is_file() else safetensors_bytes(tensors)
        write_atomically(self.path / "init.safetensors", content)

    def append(self, line: RoundRecord, claims: Claims = NO_CLAIMS) -> None:
        """Add a round to rounds.jsonl, and its claims to claims.bin."""
        if len(claims):
            self._append("claims.bin", claims.tobytes())
        self._append("rounds.jsonl", json.dumps(line.to_json(), allow_nan=False).encode() + b"\n")

    def _append(self, name: str, content: bytes) -> None:
        append_bytes(self.path / name, content, self._private)

    def claims(self) -> Claims:
        """Return the claims in claims.bin, memory-mapped; an empty array if there are none."""
        path = self.path / "claims.bin"
        count = path.stat().st_size // NO_CLAIMS.itemsize if path.exists() else 0
        return np.memmap(path, NO_CLAIMS.dtype, "r", shape=(count,)) if count else NO_CLAIMS

    def records(self, count: int) -> list[RoundRecord]:
        """Read the first `count` rounds of rounds.jsonl."""
        path = self.path / "rounds.jsonl"
        records: list[RoundRecord] = []
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
            records.extend(RoundRecord.from_json(read_json(line.decode("utf-8"))) for line in lines[:count])
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is damaged in line {len(records) + 1} ({error}). Nothing was changed. Restore it, or remove "
                "it and checkpoint.npz to run again from the first round.",
                code="damaged-file",
            ) from error
        if len(records) < count or any(line.round != number for number, line in enumerate(records, 1)):
            raise UserError(
                f"{path} does not contain the {count} rounds before the checkpoint. Nothing was changed. Remove "
                "checkpoint.npz to run again from the first round.",
                code="damaged-file",
            )
        return records

    def rewind(self, records: Sequence[RoundRecord]) -> None:
        """Keep only these rounds in rounds.jsonl and claims.bin; later ones are played again."""
        claims, last = self.claims(), records[-1].round if records else 0
        if (self.path / "claims.bin").exists():  # written anew, because a result in Python may have mapped the old file
            write_atomically(self.path / "claims.bin", claims[claims["round"] <= last].tobytes(), self._private)
        text = "".join(json.dumps(line.to_json(), allow_nan=False) + "\n" for line in records)
        write_atomically(self.path / "rounds.jsonl", text.encode(), self._private)

    def save_checkpoint(
        self, state: ServerState, rows: Mapping[str, Any] | None, key: str, attackers: NamedArrays | None = None
    ) -> None:
        """Write a checkpoint atomically. rows: the workers' arrays by name, if they are to be kept."""
        meta = _CheckpointMeta(
            key=key,
            round=state.round,
            global_score=state.global_score.hex(),
            version=state.version,
            told=sorted(state.told.items()),
            updates=[len(update) for update in state.updates],
            banned=sorted(state.banned),
            back_offs=[(worker, one.times, one.until) for worker, one in sorted(state.back_offs.items())],
            last_uploaded=[(worker, claim.hex()) for worker, claim in sorted(state.last_uploaded.items())],
        )
        arrays: dict[str, Any] = {"global_best": state.global_best, "memory": state.memory}
        arrays["references"] = np.array(state.references, np.float32)
        arrays["updates"] = np.frombuffer(b"".join(state.updates), np.uint8)
        arrays["meta"] = np.array(json.dumps(to_plain(meta)))
        arrays |= {f"rule.{name}": array for name, array in state.rule_memory.items()}
        arrays |= {f"attackers.{name}": array for name, array in (attackers or {}).items()}
        arrays |= rows or {}
        replace_atomically(self.path / "checkpoint.npz", lambda file: save_arrays(file, arrays), self._private)

    def mapped_rows(self) -> KeptRows | None:
        """Return the workers' rows in the last checkpoint, memory-mapped, or None if it has none."""
        arrays = map_arrays(self.path / "checkpoint.npz", _ROWS)
        if not arrays:
            return None
        workers = arrays.pop(_WORKERS, None)  # earlier versions wrote a row for every worker
        if workers is None:
            workers = np.arange(len(next(iter(arrays.values()))), dtype=np.int32)
        return KeptRows(workers, arrays)

    def prolong(self, spec: Spec, key: str, before: str, keep: bool) -> None:
        """Replace the spec by one with more rounds. keep: continue from the checkpoint instead of from round 1.

        key, before: the checkpoint's new and old key. The checkpoint changes first, and either key is accepted as the
        old one, so that this can be repeated after a crash in between.
        """
        path = self.path / "checkpoint.npz"
        if not keep:
            path.unlink(missing_ok=True)
        elif path.exists():
            found = self.load_checkpoint(before, also=key)
            assert found is not None
            rows = {_WORKERS: found.rows.workers, **found.rows.arrays} if found.rows is not None else None
            self.save_checkpoint(found.state, rows, key, found.attackers)
        for done in ("summary.json", "accuracy.png"):
            (self.path / done).unlink(missing_ok=True)
        write_atomically(self.path / "spec.toml", spec.to_toml().encode(), self._private)

    def load_checkpoint(self, key: str, also: str = "") -> Checkpoint | None:
        """Read the checkpoint; None if there is none yet. The workers' arrays are mapped. also: another valid key."""
        path = self.path / "checkpoint.npz"
        if not path.exists():
            return None
        try:
            arrays = load_arrays(path, without=_ROWS)
            meta = from_plain(_CheckpointMeta, read_json(str(arrays.pop("meta"))))
            rule, attackers = _pop_prefixed(arrays, "rule."), _pop_prefixed(arrays, "attackers.")
            state = ServerState(
                round=meta.round,
                global_best=arrays.pop("global_best"),
                global_score=float.fromhex(meta.global_score),
                version=meta.version,
                told=dict(meta.told),
                banned=frozenset(meta.banned),
                back_offs={worker: BackOff(times, until) for worker, times, until in meta.back_offs},
                last_uploaded={worker: float.fromhex(claim) for worker, claim in meta.last_uploaded},
                memory=arrays.pop("memory"),
                rule_memory=copy_memory(rule, "The aggregator"),
                references=tuple(arrays.pop("references")),
                updates=_cut(arrays.pop("updates").tobytes(), meta.updates),
            )
            if arrays:
                raise ValueError(f"it has {', '.join(arrays)}, which no checkpoint has")
            rows = self.mapped_rows()
            _check_sizes(state, rows)
        except (OSError, ArithmeticError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is damaged ({error}). Nothing was changed. "
                "Remove that file to run again from the first round.",
                code="damaged-file",
            ) from error
        if meta.key not in {key, also}:
            raise UserError(
                f"{path} belongs to another spec or engine ({meta.key}) than this run's ({key}): was spec.toml "
                "edited, or the package installed again without its native engine? Nothing was changed.",
                code="wrong-run",
            )
        return Checkpoint(state, rows, attackers)

    def resume(self, key: str) -> tuple[Checkpoint | None, list[RoundRecord]]:
        """Return the checkpoint and the rounds before it; remove later ones, which are played again."""
        checkpoint = self.load_checkpoint(key)
        records = self.records(checkpoint.state.round if checkpoint else 0)
        self.rewind(records)
        return checkpoint, records

    def finish(
        self, summary: Summary, tensors: dict[str, Floats], card: ModelMetadata, workers: WorkerResults | None = None
    ) -> None:
        """Write the model with its metadata, the results of workers if they were measured, and the summary."""
        if workers is not None:
            write_atomically(self.path / "local_test.csv", workers.to_csv(), self._private)
            if workers.models is not None:
                write_atomically(self.path / PERSONAL, safetensors_bytes(workers.models.tensors()), self._private)
        content = file_of(card, tensors, {"spec_key": summary.spec_key})
        write_atomically(self.path / "model.safetensors", content, self._private)
        write_json(self.path / "summary.json", summary.to_json(), self._private)


def _not_writable(path: Path, error: OSError) -> UserError:
    return UserError(f"The folder {path} cannot be written: {error.strerror}. Give another --out.", code="not-allowed")


def _check_sizes(state: ServerState, rows: KeptRows | None) -> None:
    """Raise ValueError unless all models have the same length and all arrays have a row per worker."""
    size, kept = state.global_best.shape, rows.arrays if rows else {}
    if rows is not None and any(len(array) != len(rows.workers) for array in kept.values()):
        raise ValueError("rows of different numbers of workers")
    found = [model for name in ("positions", "velocities") for model in kept.get(name, ())[:1]]
    models = [state.global_best, *state.references, *found]
    if len(size) != 1 or any(model.shape != size or model.dtype != np.float32 for model in models):
        raise ValueError("models of different sizes")


def _pop_prefixed(arrays: dict[str, Any], prefix: str) -> NamedArrays:
    """Remove the arrays whose names have a prefix from a dict; return them by the rest of their names."""
    return {name.removeprefix(prefix): arrays.pop(name) for name in list(arrays) if name.startswith(prefix)}


def _cut(joined: bytes, lengths: Sequence[int]) -> tuple[bytes, ...]:
    """Cut joined updates into those of these lengths."""
    ends = np.cumsum([0, *lengths])
    return tuple(joined[first:last] for first, last in pairwise(ends))


def _keep_plugin(folder: Path, name: str) -> None:
    """Copy a plugin as it is now, named by its hash, and what it imports beside it, into a folder of that name."""
    source = register.plugin_source(name)
    if source is not None:
        folder.mkdir(exist_ok=True)
        digest = register.plugin_digest(name)
        write_atomically(folder / f"{digest}-{source.name}", source.read_bytes())
        for place, other in register.plugin_neighbours(name).items():
            (folder / digest / place).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / digest / place, other.read_bytes())


def _compare_plugin(path: Path, name: str) -> None:
    """Refuse a plugin that is missing, or was edited since the run was started."""
    source = register.plugin_source(name)
    file, _ = register.split_plugin_name(name)
    ending = Path(file).name
    copies = sorted((path / "plugins").glob(f"*-{ending}"))
    if source is None:
        kept = f" The run kept a copy of it: cp {copies[-1]} {file}" if copies else ""
        raise UserError(
            f"The plugin {name} of the run {path} is not there any more. Put it back.{kept}", code="missing-file"
        )
    if copies and f"{register.plugin_digest(name)}-{ending}" not in [copy.name for copy in copies]:
        raise UserError(
            f"The plugin {name} was edited since the run {path} was started, or a file beside it that it imports; its "
            f"copy from then is {copies[-1]}. "
            "Nothing was changed. Put it back for the same numbers, or remove the copy to use the plugin as it is now.",
            code="wrong-run",
        )


def read_result(path: Path) -> tuple[Spec, Summary, list[RoundRecord]]:
    """Read spec, summary and records of a finished run."""
    try:
        summary = from_plain(Summary, read_json(read_text(path / "summary.json")), defaults=True, nan=True)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is not the folder of a finished run: {error}. Finish it: cbdsl resume {path}", code="missing-file"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path / 'summary.json'} is damaged ({error}). Write it again from the rest: cbdsl resume {path}",
            code="damaged-file",
        ) from error
    return specs.read(path / "spec.toml"), summary, RunFolder(path).records(summary.rounds)


def free_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Return `runs/name`, with a number behind it if that exists."""
    candidate, number = parent / name, 2
    while candidate.exists():
        candidate, number = parent / f"{name}-{number}", number + 1
    return candidate


_LONGEST = 24  # characters of one part of a name


def run_folder(spec: Spec, prefix: str = "") -> Path:
    """Return a new folder below runs/, named after a resolved spec."""
    return free_folder(prefix + folder_name(spec))


def folder_name(spec: Spec) -> str:
    """Return a name of data, partition, method, what is not the default, and the seed; safe in any file system."""
    words = [Path(spec.data.source).stem, spec.data.partition, spec.method]
    if spec.shared != build_method(spec).shared:
        words.append(f"shared-{spec.shared}")
    words += describe(spec).replace(" ", "").split(",")
    if spec.attack.byzantine:
        words.append(f"{_safe(spec.attack.name)}{spec.attack.byzantine}")
    words.append(f"seed{spec.seed}")
    return "-".join(filter(None, map(_safe, words)))


def _safe(word: str) -> str:
    """Return a word of letters, digits and a few signs, not too long."""
    return re.sub(r"[^A-Za-z0-9_+-]+", "-", word).strip("-")[:_LONGEST].strip("-")
