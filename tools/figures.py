"""Print figures of the code base: its size, its names, its imports, and what a run costs.

    python tools/figures.py [--fast] [--json] [--source DIR] [--without-typing]

--fast leaves out what has to be measured: frames, memory and time. Memory and time are measured on this machine and
need a native library that is built in DIR; only the ratio of times is worth comparing.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TURNS = 5
BESIDE_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
PROBE = """
import os, pathlib, sys, traceback, cbdsl
class Probe(cbdsl.SwarmMethod):
    def move(self, work, rows, received):
        for frame, _ in reversed(list(traceback.walk_stack(sys._getframe(1)))):
            path = pathlib.Path(frame.f_code.co_filename)
            if path.is_relative_to(pathlib.Path(cbdsl.__file__).parent):
                print(path.relative_to(pathlib.Path(cbdsl.__file__).parent), frame.f_code.co_qualname)
        sys.stdout.flush()
        os._exit(0)
size = {"workers": 2, "rounds": 1, "model": "softmax", "data.samples_per_worker": 20, "data.shared_scoring": 40}
cbdsl.run(cbdsl.Spec().with_settings(size), method=Probe(), threads=1)
"""


@dataclass(frozen=True)
class Module:
    """One Python file of the package."""

    path: Path  # in the package
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Its dotted name, such as cbdsl.protocol.rounds."""
        parts = ["cbdsl", *self.path.with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        """The package or single module below cbdsl that it belongs to."""
        return self.path.parts[0].removesuffix(".py")

    @property
    def code(self) -> int:
        """Lines that are not blank, a comment or a docstring."""
        used = {
            line
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if token.type not in BESIDE_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                used -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(used)


def read(package: Path) -> list[Module]:
    """Return all modules of a package."""
    texts = {path.relative_to(package): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    return [Module(path, text, ast.parse(text)) for path, text in texts.items()]


def imports_of(module: Module, names: set[str], typing: bool) -> Iterator[str]:
    """Yield the modules of the package that a module imports, within functions, too."""
    left_out: set[int] = set()
    if not typing:
        blocks = [node for node in ast.walk(module.tree) if isinstance(node, ast.If)]
        types = [block for block in blocks if ast.unparse(block.test).rpartition(".")[2] == "TYPE_CHECKING"]
        left_out = {id(node) for block in types for node in ast.walk(block)}
    here = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    for node in ast.walk(module.tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                yield from [each for each in (f"{base}.{alias.name}", base) if each in names][:1]


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of packages that import each other, directly or not."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            fresh = arrows.get(waiting.pop(), set()) - found
            found |= fresh
            waiting += fresh
        return found

    below = {name: reached(name) for name in arrows}
    groups = {tuple(sorted({name} | {each for each in below[name] if name in below.get(each, ())})) for name in arrows}
    return sorted(list(group) for group in groups if len(group) > 1)


def lines_in(folder: Path, *endings: str) -> int:
    """Return the lines of all files with these endings."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*") if path.suffix in endings)


def static(source: Path, typing: bool) -> dict[str, Any]:
    """Return what can be read off the files; class names are compared without a leading underscore."""
    modules = read(source / "src" / "cbdsl")
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    classes, stems = defaultdict(list), defaultdict(list)
    arrows: dict[str, set[str]] = defaultdict(set)
    importers: dict[str, set[str]] = {module.name: set() for module in modules}
    package_of = {module.name: module.package for module in modules}
    for module in modules:
        group = module.package if len(module.path.parts) > 1 else "(top level)"
        packages[group].update(modules=1, lines=len(module.text.splitlines()), code=module.code)
        stems[module.path.stem].append(str(module.path))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(f"{module.path}:{node.lineno} {node.name}")
        for target in imports_of(module, set(importers), typing):
            if target != module.name:
                importers[target].add(module.name)
            if package_of[target] != module.package:
                arrows[module.package].add(package_of[target])
    return {
        "modules": len(modules),
        "lines": sum(each["lines"] for each in packages.values()),
        "code lines": sum(each["code"] for each in packages.values()),
        "C++ lines": lines_in(source / "src" / "cbdsl", ".cpp", ".hpp", ".h"),
        "test lines": lines_in(source / "tests", ".py"),
        "noqa comments": sum(len(re.findall("# noqa", module.text)) for module in modules),
        "packages": {name: dict(packages[name]) for name in sorted(packages)},
        "class names used more than once": {name: at for name, at in sorted(classes.items()) if len(at) > 1},
        "module names used more than once": {
            name: at for name, at in sorted(stems.items()) if len(at) > 1 and name not in {"__init__", "__main__"}
        },
        "import cycles between packages": cycles(arrows),
        "modules imported by exactly one": {name: min(by) for name, by in sorted(importers.items()) if len(by) == 1},
    }


def measured(source: Path) -> dict[str, Any]:
    """Return what takes runs to find out."""
    environment = {**os.environ, "PYTHONPATH": str((source / "src").resolve())}
    with tempfile.TemporaryDirectory() as scratch:

        def start(*words: str) -> subprocess.Popen[str]:
            out, errors = subprocess.PIPE, subprocess.DEVNULL
            command = [sys.executable, *words]
            return subprocess.Popen(command, cwd=scratch, env=environment, stdout=out, stderr=errors, text=True)

        def seconds(*words: str) -> float:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            process = start(*words)
            process.communicate()
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if process.returncode:
                raise SystemExit(f"failed: {' '.join(words)}")
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        frames = start("-c", PROBE).communicate()[0].splitlines()
        run = ["-m", "cbdsl", "run", "--preset", "paper-iid", "--rounds", "1", "--threads", "1", "--json", "--out"]
        times = [(seconds(*run, f"run{turn}"), seconds("-c", "import torch")) for turn in range(TURNS)]
        ours, torch = (min(column) for column in zip(*times, strict=True))
        memory = peaks(start("-m", "cbdsl", "swarm", "--workers", "2", "--rounds", "2", "--json", "--out", "swarm"))
    return {
        "frames between the call of cbdsl.run and move": frames,
        "peak memory of a worker, MB": round(max(memory.values()) / 1024, 1),
        "start-up, CPU seconds": {"run --rounds 1": round(ours, 3), "import torch": round(torch, 3)},
        "start-up, ratio to import torch": round(ours / torch, 3),
    }


def peaks(swarm: subprocess.Popen[str]) -> dict[str, int]:
    """Return the peak memory (VmHWM, kB) of every worker process of a swarm, by its number; Linux alone."""
    found: dict[str, int] = {}
    while swarm.poll() is None:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words, text = (folder / "cmdline").read_bytes().split(b"\0"), (folder / "status").read_text()
                if b"work" in words and f"\nPPid:\t{swarm.pid}\n" in text:
                    found[folder.name] = int(text.partition("VmHWM:")[2].split()[0])
            except (OSError, IndexError):  # it has ended
                continue
        time.sleep(0.05)
    if swarm.returncode or not found:
        raise SystemExit("failed: the swarm whose workers' memory is measured")
    return found


def show(figures: dict[str, Any]) -> None:
    """Print figures as tables."""
    for name, value in figures.items():
        print(f"{name:46}{len(value) if isinstance(value, list | dict) else value:>10,}")
    for name, value in figures.items():
        if isinstance(value, list | dict):
            print(f"\n{name}")
            for key, each in value.items() if isinstance(value, dict) else enumerate(value, 1):
                parts = [f"{word} {each[word]:,}" for word in each] if isinstance(each, dict) else each
                print(f"  {key!s:30}", ", ".join(parts) if isinstance(parts, list) else parts)


def main() -> None:
    """Print the figures of a checkout."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--fast", action="store_true", help="leave out what has to be measured")
    words.add_argument("--json", action="store_true", help="print JSON")
    words.add_argument("--source", type=Path, default=Path(__file__).parents[1], help="the checkout; this one")
    words.add_argument("--without-typing", action="store_true", help="ignore imports under TYPE_CHECKING")
    given = words.parse_args()
    figures = static(given.source, not given.without_typing)
    if not given.fast:
        figures |= measured(given.source)
    print(json.dumps(figures, indent=1)) if given.json else show(figures)


if __name__ == "__main__":
    main()
