"""Notebooks as text: cells, what they come to, and what happens when one fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_notebooks import Cell, as_ipynb, as_markdown, cells, play

pytestmark = pytest.mark.slow

SOURCE = """\
# %% [markdown]
# # A title
#
# Some words.

# %%
import matplotlib.pyplot as plt
x = 2
print("said")
x + 1

# %%
plt.plot([1, x])
plt.title("drawn")
"""


def test_a_file_is_cut_into_prose_and_code() -> None:
    prose, first, last = cells(SOURCE)
    assert prose == Cell(True, "# A title\n\nSome words.")
    assert not first.prose
    assert first.text.endswith("x + 1")
    assert last.text.startswith("plt.plot")


def test_a_cell_comes_to_what_it_prints_its_last_value_and_its_figures() -> None:
    prose, said, drawn = play(cells(SOURCE), "made")
    assert (prose.text, prose.figures) == ("", ())
    assert (said.text, said.figures) == ("said\n3", ())
    assert drawn.text == ""
    assert len(drawn.figures) == 1
    assert drawn.figures[0].startswith("<svg ")


def test_cells_run_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    list(play([Cell(False, "open('left', 'w').close()")], "made"))
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


def test_a_cell_that_raises_ends_the_page_and_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        as_markdown([Cell(True, "words"), Cell(False, "1 / 0")], "made")
    assert "made, cell 1" in {str(entry.path) for entry in caught.traceback}


def test_jupyters_file_has_the_same_cells_without_outcomes() -> None:
    made = as_ipynb(cells(SOURCE))
    assert '"cell_type": "markdown"' in made
    assert '"outputs": []' in made
