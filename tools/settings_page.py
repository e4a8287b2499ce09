"""Generates the settings page: `python tools/settings_page.py > docs/settings.md`."""

from __future__ import annotations

from cbdsl.spec import as_text, reference

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
so on show them. `cbdsl list settings` prints this page in a terminal; both are made from `src/cbdsl/spec.py`.
"""


def make_page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for group in reference():
        rows = []
        for line in group.lines:
            meaning = line.meaning.replace("|", "\\|")
            rows.append(f"| `{line.key}` | `{as_text(line.default)}` | {line.allowed} | {meaning} |")
        parts.append(
            "\n".join(
                [f"## {group.title}\n", "| setting | default | allowed | meaning |", "|---|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(parts)


if __name__ == "__main__":
    print(make_page(), end="")
