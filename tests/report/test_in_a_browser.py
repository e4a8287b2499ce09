"""What every page has, tried in a real browser: tables that sort, and no more width than there is."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbdsl.report.figures import new_figure
from cbdsl.report.pages import ENVIRONMENT, Cell, Drawing, Row, Table, render_page, save_drawing
from support.browser import Tab, browser, tab
from support.deployment import wait_until

pytestmark = pytest.mark.slow

HEAD = ("Defence", "Accuracy", "Uplink", "Banned", "Under the worst attack that we know of")
ROWS: list[Row] = [
    ("epochs 10", "9.8 ± 0.1 %", "12.5 kB", "–", "liar"),
    ("epochs 2", "93.6 %", "1.3 MB", "2 of 4", "alie"),
    ("epochs 1", Cell("10.1 %", strong=True), "900 B", "10 of 10", "memoriser"),
]

PAGE = """\
{% extends "base.html.j2" %}
{% from "macros.html.j2" import picture, section, table with context %}
{% block title %}A page{% endblock %}
{% block lead %}CB-DSL + D_G.{% endblock %}
{% block main %}
{% call section("all", "All", "All of it") %}{{ picture(curve) }}{{ table(few) }}{{ table(many) }}{% endcall %}
{% endblock %}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    figure = new_figure(10, 3)
    figure.subplots().plot([1, 2], [0.1, 0.9])
    drawing = Drawing(figure, ("round", "accuracy"), [(1, 0.1), (2, 0.9)])
    text = render_page(
        ENVIRONMENT.from_string(PAGE),
        curve=save_drawing(drawing, out / "figures" / "curve", "A curve"),
        few=Table(HEAD, ROWS, wide=False),
        many=Table([*HEAD, *(f"Another number, {n}" for n in range(8))], [(*row, *"12345678") for row in ROWS]),
    )
    path = out / "page.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def opened(page: Path) -> Iterator[Tab]:
    with tab() as found:
        found.open(page.as_uri())
        yield found


def names(shown: Tab) -> list[str]:
    found: list[str] = shown.value(
        "[...document.querySelector('table').tBodies[0].rows].map((r) => r.cells[0].innerText)"
    )
    return [name.rpartition("\n")[2] for name in found]


def click(shown: Tab, column: int) -> tuple[list[str], list[str | None]]:
    """Click a heading: the first cells of all rows, and how the columns say that they are sorted."""
    heads = "[...document.querySelector('table').tHead.rows[0].cells]"
    shown.value(f"{heads}[{column}].querySelector('button').click()")
    return names(shown), shown.value(f"{heads}.map((head) => head.getAttribute('aria-sort'))")


@pytest.mark.parametrize(
    ("column", "upwards", "downwards"),
    [
        (0, [1, 2, 10], [10, 2, 1]),  # words with numbers in them, as people count
        (1, [10, 1, 2], [2, 1, 10]),
        (2, [1, 10, 2], [2, 10, 1]),  # bytes, kB, MB
        (3, [2, 1, 10], [1, 2, 10]),  # what is not there stays last
        (4, [2, 10, 1], [1, 10, 2]),
    ],
)
def test_a_heading_sorts_up_then_down_then_as_it_was(
    opened: Tab, column: int, upwards: list[int], downwards: list[int]
) -> None:
    for order, said in ((upwards, "ascending"), (downwards, "descending"), ([10, 2, 1], None)):
        found, sorts = click(opened, column)
        assert found == [f"epochs {number}" for number in order]
        assert sorts == [said if place == column else None for place in range(len(HEAD))]


def test_one_column_at_a_time_and_by_keyboard(opened: Tab) -> None:
    click(opened, 1)
    opened.value("document.querySelector('table th:nth-child(3) button').focus()")
    for kind in ("keyDown", "keyUp"):
        opened.command("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r" * (kind == "keyDown"),
                       windowsVirtualKeyCode=13)  # fmt: skip
    assert opened.value("document.querySelectorAll('table')[0].querySelectorAll('[aria-sort]').length") == 1
    assert names(opened) == ["epochs 1", "epochs 10", "epochs 2"]


@pytest.mark.parametrize("width", [360, 721, 1300])
def test_tables_and_figures_scroll_inside_and_the_page_does_not(opened: Tab, width: int) -> None:
    opened.look(width, 900)
    assert opened.value("document.documentElement.scrollWidth") == width
    inside = "[...document.querySelectorAll('.scroll')].map((box) => box.scrollWidth > box.clientWidth)"
    assert opened.value(inside) == [width < 1000, True]  # the figure, the wide table
    small = "Math.min(...[...document.querySelectorAll('svg text')].map((t) => t.getBoundingClientRect().height))"
    assert opened.value(small) >= 9  # text in figures can be read wherever it is


def test_on_a_narrow_screen_cards_can_be_sorted_too(opened: Tab) -> None:
    opened.look(360, 900)
    button = "document.querySelector('.cards th:nth-child(2) button').getBoundingClientRect()"
    assert opened.value(f"{button}.height > 0 && {button}.right <= 360")
    assert click(opened, 1)[0] == ["epochs 10", "epochs 1", "epochs 2"]


def test_the_numbers_can_be_saved_from_the_page_alone(opened: Tab, page: Path, tmp_path: Path) -> None:
    browser().command("", "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved"))
    opened.value("document.querySelector('a.numbers').click()")
    saved = tmp_path / "saved" / "curve.csv"
    wait_until(saved.is_file)
    assert saved.read_bytes() == (page.parent / "figures" / "curve.csv").read_bytes()
    assert list(csv.reader(saved.open())) == [["round", "accuracy"], ["1", "0.1"], ["2", "0.9"]]


def test_printed_it_is_light_and_says_what_symbols_mean(opened: Tab) -> None:
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    ground = "getComputedStyle(document.body).backgroundColor"
    meaning = "document.querySelector('.symbols dd').checkVisibility({contentVisibilityAuto: true})"
    opened.command("Emulation.setEmulatedMedia", media="screen", features=[dark])
    assert opened.value(ground) == "rgb(22, 24, 28)"
    assert not opened.value(meaning)  # folded away
    opened.command("Emulation.setEmulatedMedia", media="print", features=[dark])
    assert opened.value(ground) == "rgb(255, 255, 255)"
    assert opened.value(meaning)
