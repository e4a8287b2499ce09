"""Gather the public surface of the package: commands, exit codes, JSON output, parts, settings and Python names.

    python tests/support/surface.py          # check: exit code 1 and a list of what is gone
    python tests/support/surface.py record   # add what is new to surface.json, drop what its "removed" lists

`surface.json` has two entries. "surface" is the recorded tree. "removed" maps a path in that tree, such as
"commands/run/options/--soup", to the reason for its removal; it covers everything below that path. To remove
something on purpose, add it there, and record. Recording never drops anything else.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import numpy as np
import typer

import cbdsl

Tree = dict[str, Any]

command_line = importlib.import_module("cbdsl.__main__").main
SNAPSHOT = Path(__file__).parents[1] / "golden" / "surface.json"
MODULES = ("cbdsl", "cbdsl.callbacks", "cbdsl.register", "cbdsl.testing")
PARTS = ("methods", "selections", "aggregators", "attacks", "partitions", "models", "data", "codecs", "metrics")

SMALL = (
    "--data own.npz --model softmax --workers 4 --set data.samples_per_worker=40 --set data.shared_training=20 "
    "--set data.shared_scoring=60 --set data.holdout=30"
)
CALLS = (  # in this order and in one folder; SMALL stands for the words above; --json: the output is recorded
    "--version",
    "--help",
    "run SMALL --rounds 2 --byzantine 1 --out run --json",
    "run SMALL --rounds 2 --method fedavg --out fedavg --json",
    "resume run --json",
    "compare run fedavg",
    "theory run --json",
    "predict run --data unseen.npz --json",
    "audit run",
    "run SMALL --rounds 5 --data pictures.npz --set data.holdout=200 --set local.learning_rate=0.1 --out seen --json",
    "audit seen --json",
    "export run --to c --out model.c",
    "sweep SMALL --rounds 1 --over seed=0,1 --jobs 1 --out sweep",
    "generate --from own.npz --data own.npz --passes 1 --samples 10 --scoring 40 --out made --json",
    "bench --models softmax --workers 2 --quick --repeats 1 --batch 2 --scoring 10 --json",
    "bench --codecs none,q4 --workers 2 --json",
    "list",
    "list --json",
    "list settings --json",
    "list presets --json",
    *(f"list {kind} --json" for kind in PARTS),
    "presets",
    "presets paper-iid",
    "data list --json",
    "data info mnist --json",
    "data info hapt --json",
    "data show --out picture.svg --workers 4",
    "doctor",
    "flower new app",
    "provision keys --workers 1 --host localhost",
    "nonsense",
    "run --nonsense",
    "run nonsense",
    "run --rounds many",
    "run --rounds 0",
    "run --set local.nonsense=1",
    "run --set shared=nonsense",
    "run --method nonsense",
    "run --byzantine 1 --attack nonsense",
    "run --data nonsense",
    "run --out run",
    "run --method fedavg --soup 2",
    "resume nonsense",
    "watch --nonsense",
    "compare nonsense",
    "theory nonsense",
    "predict nonsense --data unseen.npz",
    "audit nonsense",
    "predict run",
    "export run --to nonsense --out model.x",
    "sweep",
    "sweep --over seed",
    "study nonsense",
    "tune nonsense",
    "reproduce --nonsense",
    "arena --attacks nonsense",
    "generate --from nonsense",
    "bench --workers many",
    "bench --shards 2",
    "list nonsense",
    "list attacks --plugin nonsense.py",
    "presets nonsense",
    "data info nonsense",
    "data fetch nonsense",
    "flower new run",
    "provision",
    "serve",
    "serve --broker mqtt://host:nonsense --out served",
    "work",
    "work --id one --broker mqtt://host:nonsense --data unseen.npz",
    "swarm --broker nonsense",
    "doctor --ca nonsense.pem",
)
SWARM = "swarm SMALL --rounds 1 --out swarm --json"
LONG = "run SMALL --rounds 100000 --out long"


def gather(known: Mapping[str, Any]) -> Tree:
    """Return the surface of the package as it is now.

    known: the recorded surface. Its options and Python names are looked up even where they are hidden or not listed
    any more, as deprecated aliases are.
    """
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            codes, outputs = call_all()
        finally:
            os.chdir(before)
    return {
        "commands": commands(known.get("commands", {})),
        "exit codes": codes,
        "json": {line: shape(value) for line, value in outputs.items()},
        "parts": {
            kind: {row["name"]: row["settings"] for row in outputs.get(f"list {kind} --json", ())} for kind in PARTS
        },
        "presets": {row["name"]: row["settings"] for row in outputs.get("list presets --json", ())},
        "settings": settings(cbdsl.Spec, ""),
        "python": {name: module(name, known.get("python", {}).get(name, ())) for name in MODULES},
    }


def commands(known: Mapping[str, Any]) -> Tree:
    """Return every command with its options and arguments; hidden ones only if they are known."""
    found: Tree = {}

    def visit(command: Any, name: str) -> None:  # noqa: ANN401 - a click command
        old = known.get(name, {}).get("options", {})
        shown = [each for each in command.params if not getattr(each, "hidden", False) or old.keys() & {*each.opts}]
        options = [each for each in shown if each.param_type_name == "option"]
        found[name] = {
            "options": {
                spelling: {"flag": bool(each.is_flag), "repeats": bool(each.multiple)}
                for each in options
                for spelling in (*each.opts, *each.secondary_opts)
            },
            "positional": [each.name for each in shown if each not in options],
            "needs": [each.opts[0] for each in command.params if each.required],
        }
        for word, below in getattr(command, "commands", {}).items():
            visit(below, f"{name} {word}".strip())

    with mock.patch.object(typer.Typer, "__call__", autospec=True) as called:  # wherever the commands are defined
        command_line()
    visit(typer.main.get_command(called.call_args.args[0]), "")
    return found


def call_all() -> tuple[Tree, Tree]:
    """Return the exit codes of all calls and the values that those with --json print."""
    rng = np.random.default_rng(0)
    labels = np.arange(600) % 3
    features = np.eye(8)[labels] + 0.5 * rng.normal(size=(600, 8))
    os.environ["PYTHONPATH"] = str(Path(cbdsl.__file__).resolve().parents[1])  # for other processes
    np.savez("own.npz", train_features=features, train_labels=labels, test_features=features, test_labels=labels)
    images = features.reshape(-1, 1, 2, 4)
    np.savez("pictures.npz", train_features=images, train_labels=labels, test_features=images, test_labels=labels)
    np.savez("unseen.npz", features=features[:5], labels=labels[:5])
    codes: Tree = {}
    outputs: Tree = {}
    for line in (*CALLS, *(f"{name} --help" for name in commands({}) if name)):
        codes[line], text, errors = call(line)
        if "--json" in line and codes[line] == 0:
            outputs[line] = json.loads(text)
        elif codes[line] not in {0, 2}:
            print(line, errors, sep="\n", file=sys.stderr)
    done = subprocess.run([sys.executable, "-m", "cbdsl", *words_of(SWARM)], capture_output=True, check=False)
    codes[SWARM] = done.returncode
    outputs[SWARM] = json.loads(done.stdout or "null")
    codes[f"{LONG}, interrupted"] = interrupted(LONG, Path("long/rounds.jsonl"))
    return codes, outputs


def words_of(line: str) -> list[str]:
    """Return the words of a call."""
    return shlex.split(line.replace("SMALL", SMALL))


def call(line: str) -> tuple[object, str, str]:
    """Run a command in this process and return exit code, output and errors."""
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["cbdsl", *words_of(line)]),
        mock.patch.dict(os.environ, {"NO_COLOR": "1", "COLUMNS": "100"}),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as errors,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            command_line()
        except SystemExit as end:
            code = end.code or 0
        except Exception as error:  # a traceback for the user
            code = type(error).__name__
            print(error, file=errors)
    return code, out.getvalue(), errors.getvalue()


def interrupted(line: str, sign: Path) -> int:
    """Start a command, send SIGINT as soon as a file exists, and return the exit code."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, "-m", "cbdsl", *words_of(line)], stdout=quiet, stderr=quiet) as process:
        deadline = time.monotonic() + 60
        while not sign.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(60)
        finally:
            process.kill()


def shape(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return keys and types of a JSON value: mappings stay mappings, items of lists are merged, a leaf is its types.

    A null has no type: whether a number is known may depend on the machine.
    """
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return {"[]": merge(shape(each) for each in value)}
    return [] if value is None else [type(value).__name__]


def merge(shapes: Iterable[Any]) -> Any:  # noqa: ANN401 - a shape
    """Return one shape that has the keys and types of all."""
    merged: Any = []
    for each in shapes:
        if isinstance(each, dict):
            old = merged if isinstance(merged, dict) else {}
            merged = {key: merge(one[key] for one in (old, each) if key in one) for key in {**old, **each}}
        elif not isinstance(merged, dict):
            merged = sorted({*merged, *each})
    return merged


def settings(kind: type, prefix: str) -> Tree:
    """Return every setting of a spec by its dotted name: type or allowed values, and default."""
    found: Tree = {}
    for name, hint in get_type_hints(kind).items():
        default = getattr(kind(), name)
        if is_dataclass(hint) and isinstance(hint, type):
            found |= settings(hint, f"{prefix}{name}.")
        elif get_origin(hint) is Literal:
            found[prefix + name] = {"values": list(get_args(hint)), "default": default}
        elif isinstance(default, Mapping):
            found[prefix + name] = {"default": dict(default)}
        else:
            found[prefix + name] = {"type": getattr(hint, "__name__", str(hint)), "default": default}
    return found


def module(name: str, known: Iterable[str]) -> Tree:
    """Return the public names of a module, and of the `known` ones those that it still has."""
    found = importlib.import_module(name)
    own = getattr(found, "__all__", None) or [
        each
        for each, value in vars(found).items()
        if not each.startswith("_")
        and each != "TYPE_CHECKING"
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", name) == name
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {each: described(getattr(found, each)) for each in sorted({*own, *known}) if hasattr(found, each)}


def described(value: Any) -> Tree:  # noqa: ANN401 - any object
    """Return kind and parameters of an object; of a class the public members, too."""
    kind = "value"
    if inspect.isclass(value):
        names = {each.name for each in fields(value)} if is_dataclass(value) else set()
        names |= {each for each in dir(value) if not each.startswith("_")}
        members = {each: parameters(inspect.getattr_static(value, each, None)) for each in sorted(names)}
        return {"kind": "class", **parameters(value), "members": members}
    if inspect.ismodule(value):
        kind = "module"
    elif inspect.isfunction(value):
        kind = "function"
    return {"kind": kind, **parameters(value)}


def parameters(value: Any) -> Tree:  # noqa: ANN401 - any object
    """Return the parameters of what can be called: those by position, all by name, and those without a default."""
    value = getattr(value, "__func__", value)  # of a class method
    if not callable(value) or inspect.ismodule(value):
        return {}
    try:
        found = [each for each in inspect.signature(value).parameters.values() if each.name not in {"self", "cls"}]
    except (TypeError, ValueError):
        return {}
    single = [each for each in found if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    return {
        "positional": [each.name for each in single if each.kind is not each.KEYWORD_ONLY],
        "names": [each.name for each in single if each.kind is not each.POSITIONAL_ONLY],
        "needs": [each.name for each in single if each.default is each.empty],
        "rest": [str(each) for each in found if each not in single],
    }


def missing(recorded: Any, present: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401 - any JSON
    """Yield the paths of what was recorded and is not there any more, or is not the same."""
    key = path.rpartition("/")[2]
    if isinstance(recorded, dict) and isinstance(present, dict):
        for name, value in recorded.items():
            below = f"{path}/{name}" if path else name
            if name not in present:
                yield below
            elif name != "names" or not any(str(each).startswith("**") for each in present.get("rest", ())):
                yield from missing(value, present[name], below)
    elif key == "needs":  # what is needed may become fewer
        yield from (f"{path}/{name} is new" for name in present if name not in recorded)
    elif key == "positional":  # others may follow
        if present[: len(recorded)] != recorded:
            yield f"{path}: {recorded} became {present}"
    elif isinstance(recorded, list) and isinstance(present, list) and key != "default":
        if not present and path.startswith("json/"):  # it is null here
            return
        yield from (f"{path}/{value}" for value in recorded if value not in present)
    elif recorded != present:
        yield f"{path}: {recorded} became {present}"


def unexplained(gone: Iterable[str], removed: Mapping[str, str]) -> list[str]:
    """Return the paths that no entry of the list of removals covers."""
    return [
        path for path in gone if not any(path == each or path.startswith((f"{each}/", f"{each}:")) for each in removed)
    ]


def read() -> tuple[Tree, dict[str, str]]:
    """Return the recorded surface and the removals with their reasons."""
    if not SNAPSHOT.exists():
        return {}, {}
    kept = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return kept["surface"], kept["removed"]


def as_text(value: Any, indent: str = "") -> str:  # noqa: ANN401 - any JSON
    """Return JSON text in which a value that fits into a line has a line of its own."""
    line = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if not isinstance(value, dict) or len(indent) + len(line) <= 100:
        return line
    inner = [f"{indent} {json.dumps(key)}: {as_text(each, indent + ' ')}" for key, each in sorted(value.items())]
    return "{\n" + ",\n".join(inner) + f"\n{indent}}}"


def main(words: Sequence[str]) -> int:
    """Check the surface, or record it anew."""
    recorded, removed = read()
    present = json.loads(json.dumps(gather(recorded), default=str))
    gone = unexplained(missing(recorded, present), removed)
    print("\n".join(gone) or "nothing is gone")
    if not gone and list(words) == ["record"]:
        SNAPSHOT.write_text(as_text({"removed": removed, "surface": present}) + "\n", encoding="utf-8")
    return bool(gone)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
