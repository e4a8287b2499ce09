"""A Sphinx extension: pages that are Python files in cells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from myst_parser.parsers.sphinx_ import MystParser
from site_notebooks import SUFFIX, as_ipynb, as_markdown, cells

if TYPE_CHECKING:
    from sphinx.application import Sphinx


class NotebookParser(MystParser):
    """Reads a page that is a Python file in cells."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:  # noqa: ANN401 - a docutils document
        """Run the cells and read the page that they make."""
        name = Path(document["source"]).name.removesuffix(SUFFIX)
        notebook = cells(inputstring)
        files = Path(document.settings.env.app.outdir) / "notebooks"
        files.mkdir(parents=True, exist_ok=True)
        (files / f"{name}.ipynb").write_text(as_ipynb(notebook), encoding="utf-8")
        super().parse(as_markdown(notebook, name), document)


def setup(app: Sphinx) -> dict[str, bool]:
    """Tie this to a build."""
    app.add_source_suffix(SUFFIX, "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": False}
