"""The reference of all settings as a page: python -m cbdsl.cli.settings_page > docs/settings.md"""

from __future__ import annotations

from cbdsl.settings import as_text, reference

_HEAD = """\
# Settings

Every setting of a spec, its default and its meaning. A spec is a TOML file, an object in Python, or a preset with
options on the command line; the keys are the same everywhere:

```sh
cbdsl run paper-iid --set local.epochs=3 --set data.partition=dirichlet
```

```toml
preset = "paper-iid"    # what is not in this file is as there; without this line, as in the tables below

[local]
epochs = 3

[data]
partition = "dirichlet"
```

A key that is not here is an error, and so is an option that changes nothing in the run it is given for. Parts such as
attacks and methods have settings of their own, `options.PART.SETTING`; `cbdsl list attacks`, `cbdsl list methods` and
so on show them. `cbdsl list settings` prints this page in a terminal; both are made from the comments in
`src/cbdsl/spec.py`.
"""


def page() -> str:
    """The page as Markdown."""
    parts = [_HEAD]
    for group in reference():
        rows = [f"| `{line.key}` | `{as_text(line.default)}` | {_escaped(line.meaning)} |" for line in group.lines]
        parts.append("\n".join([f"## {group.title}\n", "| setting | default | meaning |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
