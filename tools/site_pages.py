"""The reference pages of the documentation site, made from the code: commands, public names, records, messages.

A Sphinx extension. What it makes is added to the page of that name while the site is built, never written to disk.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import GenericAlias
from typing import TYPE_CHECKING, Any, get_type_hints

from typer.main import get_command

import cbdsl
from cbdsl.cli.app import app as commands
from cbdsl.cli.spec_options import _PANEL
from cbdsl.network import wire
from cbdsl.runs.folder import README
from cbdsl.runs.records import RoundRecord, Summary

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# The section of the page for each module or package that defines public names, in the order of the page.
_SECTIONS = {
    "runs.loop": "Run and resume",
    "runs": "Run and resume",
    "spec": "Specs and presets",
    "presets": "Specs and presets",
    "data": "Data",
    "arrays": "Data",
    "callbacks": "Callbacks",
    "runs.callbacks": "Callbacks",
    "runs.metrics": "Metrics",
    "attacks": "Attacks",
    "algorithm.methods": "Methods and workers",
    "algorithm.worker_round": "Methods and workers",
    "algorithm.particles": "Methods and workers",
    "algorithm": "The server: claims, selections, aggregators",
    "studies": "Studies",
    "codecs": "Codecs",
    "engines": "Engines and networks",
    "models": "Engines and networks",
    "errors": "Errors",
    "register": "Registries",
    "testing": "Law tests",
}

# What stands before the names of a group.
_INTRODUCED = {
    "Law tests": "A part is checked by its name once its file is loaded: "
    "`import my_parts  # registers the parts; run this in its folder`. In a program that also runs a spec with this "
    'plugin, write `cbdsl.register.load(["my_parts.py"])` instead: a name can be registered '
    "only once. [Bring your own parts](../parts.md#does-it-keep-the-laws) has an example.\n",
}


def command_page() -> str:
    """Every command with its arguments and options, as Markdown."""
    return "\n".join(_commands(get_command(commands), "cbdsl"))


def _commands(command: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - a click command
    for name, each in command.commands.items():
        whole = f"{path} {name}"
        yield f"\n## `{whole}`\n" if " " not in path else f"\n### `{whole}`\n"
        yield f"{inspect.cleandoc(each.help or '')}\n"
        if hasattr(each, "commands"):
            yield from _commands(each, whole)
        else:
            yield from _parameters(each)


def _parameters(command: Any) -> Iterator[str]:  # noqa: ANN401 - a click command
    panels: dict[str, list[str]] = {}
    for each in command.params:
        if each.name == "help" or getattr(each, "hidden", False):
            continue
        panel = getattr(each, "rich_help_panel", None) or ("Options" if each.opts[0].startswith("-") else "Arguments")
        default = f" Default: `{each.default}`." if isinstance(each.default, (str, float, int)) and each.default else ""
        panels.setdefault(panel, []).append(f"| {_words(each)} | {_cell(each.help or '')}{default} |")
    for panel, rows in panels.items():
        if panel == _PANEL and command.name != "run":
            yield "And the options of a spec, as for [`cbdsl run`](#cbdsl-run): where to start, and what to change.\n"
            continue
        yield f"| {panel} | |\n|---|---|"
        yield "\n".join(rows) + "\n"


def _words(parameter: Any) -> str:  # noqa: ANN401 - a click parameter
    if not parameter.opts[0].startswith("-"):
        return f"`{_cell(parameter.metavar or parameter.name.upper())}`"
    flag = getattr(parameter, "is_flag", False)
    value = "" if flag else f" {parameter.metavar or parameter.opts[0].lstrip('-').upper()}"
    names = ", ".join(f"`{name}{value}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return _cell(names)


def api_page() -> str:
    """Every public name with its documentation: Markdown around directives of autodoc."""
    groups: dict[str, list[str]] = {title: [] for title in _SECTIONS.values()}
    for name in cbdsl.__all__:
        if not name.startswith("_"):
            module = cbdsl._HOMES[name] or name
            groups[_SECTIONS.get(module) or _SECTIONS[module.split(".")[0]]].append(name)
    parts = []
    for title, names in groups.items():
        if names:
            names.sort(key=lambda name: not inspect.isroutine(getattr(cbdsl, name)))  # what is called comes first
            parts += [f"\n## {title}\n", _INTRODUCED.get(title, ""), "```{eval-rst}", *map(_documented, names), "```"]
    return "\n".join(parts)


def _documented(name: str) -> str:
    value = getattr(cbdsl, name)
    if inspect.ismodule(value):
        return f".. automodule:: cbdsl.{name}\n   :members:\n   :exclude-members: {', '.join(cbdsl.__all__)}\n"
    if isinstance(value, GenericAlias):  # a name for a type, with a text behind it
        source = inspect.getsource(import_module(f"cbdsl.{cbdsl._HOMES[name]}"))
        ((meant, words),) = re.findall(rf'^{name} = (.+)\n"""(.+)$', source, re.MULTILINE)
        return f".. py:currentmodule:: cbdsl\n\n.. py:data:: {name}\n\n   ``{meant}``. {_plain_rst(words)}\n"
    if inspect.isclass(value):
        hidden = "   :exclude-members: __init__\n" if is_dataclass(value) else ""
        return f".. autoclass:: cbdsl.{name}\n   :members:\n{hidden}"
    return f".. autofunction:: cbdsl.{name}\n"


def file_page() -> str:
    """The files of a run's folder, and the fields of its records, as Markdown."""
    parts = []
    for number, block in enumerate(README.strip().split("\n\n")[1:]):
        if number % 2:
            parts.append(block + "\n")
            continue
        rows = [re.split(r"\s{2,}", line, maxsplit=1) for line in block.splitlines()]
        parts.append("| file | what is in it |\n|---|---|")
        parts.append("\n".join(f"| `{name}` | {_cell(words)} |" for name, words in rows) + "\n")
    for title, kind in (("A line of rounds.jsonl", RoundRecord), ("summary.json", Summary)):
        parts.append(f"\n## {title}\n\n{inspect.getdoc(kind)}\n\n{_fields(kind)}\n")
    return "\n".join(parts)


def wire_page() -> str:
    """The messages of a deployment, field by field, as Markdown."""
    parts = []
    for kind, code in wire._KINDS.items():
        title = kind.__name__.removesuffix("Message")
        parts.append(f"\n### {code}: {title}\n\n{inspect.getdoc(kind)}\n\n{_fields(kind)}\n")
    return "\n".join(parts)


def _fields(kind: type[Any]) -> str:
    """A data class as a table."""
    said, hints, rows = _meanings(kind), get_type_hints(kind), []
    for each in fields(kind):
        hint = hints[each.name]  # without the checks of a message's fields
        shown = hint.__name__ if isinstance(hint, type) else str(each.type)
        rows.append(f"| `{each.name}` | `{_cell(shown)}` | {_cell(said.get(each.name, ''))} |")
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _meanings(kind: type[Any]) -> dict[str, str]:
    """What the comments beside a class's fields say."""
    said = re.findall(r"^    (\w+): [^\n]*?  # (.+)$", inspect.getsource(kind), re.MULTILINE)
    return {name: re.sub(r"^(type: ignore|noqa)\S*( - |  # |$)", "", words) for name, words in said}


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli": command_page,
    "reference/api": api_page,
    "reference/files": file_page,
    "reference/wire": wire_page,
}


def _fill(app: Sphinx, name: str, source: list[str]) -> None:
    del app
    if name in PAGES:
        source[0] += "\n" + PAGES[name]()


def _made_anew(*_: object) -> list[str]:
    """Pages to read again in every build: the code may have changed where their own text has not."""
    return list(PAGES)


def _plain_docstring(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Docstrings here are prose, not reStructuredText: names in backticks are code, and nothing else is markup."""
    del app, what, name, options
    paragraphs = "\n".join(lines).strip().split("\n\n")
    known = _parameters_of(value)
    lines[:] = "\n\n".join(_as_rst(each, known) for each in paragraphs).split("\n") if any(lines) else lines
    if inspect.isclass(value) and value.__module__.startswith("cbdsl"):
        lines += ["", *_attributes(value), ""]


def _attributes(kind: type[Any]) -> Iterator[str]:
    """What a class's attributes are, a line each: the fields of a data class, or what others may set in theirs."""
    said = _meanings(kind)
    types = inspect.get_annotations(kind)
    apart = re.findall(r'^    (\w+): [^\n]*\n    """', inspect.getsource(kind), re.MULTILINE)  # autodoc has these
    names = [each.name for each in fields(kind)] if is_dataclass(kind) else list(said)
    for name in names:
        if name in types and name not in apart:
            words = f": {_plain_rst(said[name])}" if said.get(name) else ""
            type_ = re.sub(r"^ClassVar\[(.+)\]$", r"\1", str(types[name]))
            yield _entry(name, f" (``{type_}``){words}")


def _parameters_of(value: object) -> set[str]:
    try:
        return set(inspect.signature(value).parameters) if callable(value) else set()
    except ValueError:  # it has none that could be told
        return set()


def _as_rst(paragraph: str, known: set[str]) -> str:
    if paragraph.startswith(" "):
        return "::\n\n" + paragraph
    listed = re.findall(r"^(\w+(?:, \w+)*): (.*)$", paragraph, re.MULTILINE)
    named = {name for names, _ in listed for name in names.split(", ")}
    if listed and len(listed) == len(paragraph.splitlines()) and named <= known:  # `name: what it is`, a line each
        return "\n".join(_entry(names, f": {_plain_rst(words)}") for names, words in listed)
    paragraph = re.sub(
        r"(^|(?<=\. ))(\w+): ", lambda at: f"`{at[2]}`: " if at[2] in known else at[0], paragraph, flags=re.MULTILINE
    )
    return "\n".join(
        _plain_rst(line) if not line.startswith(" ") else _plain_rst(line.lstrip()) for line in paragraph.split("\n")
    )


def _entry(names: str, words: str) -> str:
    """A line of a list. Not a field list: Sphinx would write the names of fields with capitals."""
    return "* " + ", ".join(f"``{name}``" for name in names.split(", ")) + words


def _plain_rst(text: str) -> str:
    pieces = re.split(r"`([^`]+)`", text)
    escaped = [
        re.sub(r"([\\*|_`])", r"\\\1", piece) if at % 2 == 0 else f"``{piece}``" for at, piece in enumerate(pieces)
    ]
    return "".join(escaped)


def _plain_signature(*given: Any) -> tuple[str | None, str | None]:  # noqa: ANN401 - what Sphinx knows of it
    """Names of types as they are written, also in unions."""
    signature, returned = (text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in given[-2:])
    return signature, returned


def setup(app: Sphinx) -> dict[str, bool]:
    """Tie this to a build."""
    app.connect("env-get-outdated", _made_anew)
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _plain_docstring)
    app.connect("autodoc-process-signature", _plain_signature)
    return {"parallel_read_safe": True}
