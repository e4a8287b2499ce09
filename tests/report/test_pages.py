from __future__ import annotations

import base64
import hashlib
import importlib
import re
import sys
from html.parser import HTMLParser
from typing import Any

import pytest
from markupsafe import Markup

from cbdsl.report import pages
from cbdsl.report.figures import SHADES
from cbdsl.report.pages import (
    ENVIRONMENT,
    Cell,
    PageFigure,
    Table,
    describe_training,
    find_sort_key,
    join_words,
    render_page,
)
from cbdsl.spec import LocalSpec
from support.refusals import refused_as

PAGE = """\
{% extends "base.html.j2" %}
{% from "macros.html.j2" import bullets, method, picture, section, table with context %}
{% block title %}{{ title }}{% endblock %}
{% block lead %}{{ lead }}{% endblock %}
{% block main %}
{% call section("one", "First & last", title) %}{{ bullets(items) }}{% endcall %}
{% call method("cbdsl run") %}: a sentence.</p>{% endcall %}
{% endblock %}
"""


def fill(text: str, **content: Any) -> str:  # noqa: ANN401
    """Fill in a template that uses the macros of pages."""
    imports = '{% from "macros.html.j2" import picture, table with context %}'
    return ENVIRONMENT.from_string(imports + text).render(links=[], **content).strip()


def page(title: str = "Title", lead: str = "lead", items: tuple[str, ...] = ()) -> str:
    return render_page(ENVIRONMENT.from_string(PAGE), title=title, lead=lead, items=items)


def rows_of(table: str) -> list[str]:
    return [re.sub(r">\s+<", "><", row) for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)]


class Balance(HTMLParser):
    """Says whether every element that was opened is closed, in the right order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_table_has_a_head_and_a_labelled_cell_for_every_word_of_it() -> None:
    found = fill("{{ table(data) }}", data=Table(("Name", "F < G"), [("<b>a</b>", "1"), ("b", "none")], wide=False))
    assert found.startswith('<table class="cards">')
    assert rows_of(found) == [
        '<tr><th scope="col">Name</th><th scope="col">F &lt; G</th></tr>',
        '<tr><td data-label="Name">&lt;b&gt;a&lt;/b&gt;</td><td data-label="F &lt; G" data-sort="1">1</td></tr>',
        '<tr><td data-label="Name">b</td><td data-label="F &lt; G">none</td></tr>',
    ]


def test_a_wide_table_scrolls_and_has_no_cards() -> None:
    found = fill("{{ table(data) }}", data=Table(("Name",), [("a",)]))
    assert found.startswith('<div class="scroll wide" tabindex="0"')
    assert "cards" not in found


@pytest.mark.parametrize(
    ("cell", "html"),
    [
        (Cell("<a>", strong=True), "<b>&lt;a&gt;</b>"),
        (Cell("✗", "a & b", "no", strong=True), '<b class="no">✗</b><br><span class="measured">a &amp; b</span>'),
        (Cell("2 of 4", tone="yes"), '<span class="yes">2 of 4</span>'),
        (Cell("run", href="../a%20b/"), '<a href="../a%20b/">run</a>'),
        (Cell("plain"), "plain"),
    ],
)  # fmt: skip
def test_a_cell_can_be_more_than_text(cell: Cell, html: str) -> None:
    assert f">{html}</td>" in fill("{{ table(data) }}", data=Table(("Head",), [(cell,)]))


@pytest.mark.parametrize(
    ("cell", "key"),
    [
        ("93.6 ± 0.6 %", "93.6"), ("1,234", "1234"), ("-0.5 points (liar, 20)", "-0.5"), (Cell("2 of 4"), "2"),
        ("12.5 kB", "12500"), ("1.3\u00a0±\u00a00.1\u00a0MB", "1300000"), ("900 B", "900"), ("3.2e+06", "3200000"),
        ("–", ""), ("diverged", ""), ("53fc80978d6a", ""), ("4 Byzantine", "4"),
    ],
)  # fmt: skip
def test_cells_are_sorted_by_the_number_they_begin_with_bytes_as_bytes(cell: str | Cell, key: str) -> None:
    assert find_sort_key(cell) == key


def test_rows_can_be_linked_to_and_cards_can_have_other_words() -> None:
    data = Table(("Fig.",), [("1",), ("2",)], labels=("Figure",), anchors=("first", "second"))
    assert rows_of(fill("{{ table(data) }}", data=data)) == [
        '<tr><th scope="col">Fig.</th></tr>',
        '<tr id="first"><td data-label="Figure" data-sort="1">1</td></tr>',
        '<tr id="second"><td data-label="Figure" data-sort="2">2</td></tr>',
    ]


@pytest.mark.parametrize(("rows", "anchors"), [([("1",)], ()), ([("1", "2", "3")], ()), ([("1", "2")], ["a", "b"])])
def test_a_table_with_holes_is_refused(rows: list[tuple[str, ...]], anchors: list[str]) -> None:
    with pytest.raises(ValueError, match="cell for every heading"):
        Table(("one", "two"), rows, anchors=anchors)


def test_a_picture_has_its_caption_and_its_numbers() -> None:
    figure = PageFigure(Markup("<svg/>"), "here", "curve.csv", "round,ß\n1,0.5\n")
    found = fill("{% call picture(figure) %}<b>words</b>{% endcall %}", figure=figure)
    assert found.startswith('<figure id="here">')
    assert "<figcaption><b>words</b></figcaption>" in found
    assert '<div class="scroll"><svg/></div>' in found
    link = re.search(r'download="curve.csv" href="data:text/csv;charset=utf-8;base64,([^"]+)"', found)
    assert link is not None
    assert base64.b64decode(link[1]).decode() == figure.numbers
    plain = fill("{{ picture(figure) }}", figure=PageFigure(Markup("<svg/>")))
    assert "figcaption" not in plain
    assert "<a" not in plain


def test_a_page_explains_the_symbols_it_has_and_no_others() -> None:
    def symbols(lead: str) -> list[str]:
        return re.findall(r"<dt><b>([^<]+)</b></dt>", page(lead=lead))

    assert symbols("nothing to explain, not even UNITS or D_Gx") == []
    assert symbols("CB-DSL + D_G sends 1/U") == ["D_G", "U"]
    assert symbols("F^g of w^g") == ["w^g", "F^g"]


def test_the_one_script_of_a_page_is_the_one_its_policy_allows() -> None:
    text = page()
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text
    assert "<button" not in text.replace(script, "")  # without it, tables are plain


def test_a_page_links_to_its_sections_and_loads_nothing() -> None:
    text = page("A <title>", "<b>lead</b>", ("<i>a</i>", "b"))
    parser = Balance()
    parser.feed(text)
    assert not parser.open
    assert text.startswith("<!doctype html>")
    assert '<a href="#one">First &amp; last</a><a href="#method">Method</a>' in text
    assert "<title>A &lt;title&gt;</title>" in text
    assert "<h2>A &lt;title&gt;</h2>" in text
    assert "<li>&lt;i&gt;a&lt;/i&gt;</li><li>b</li>" in text
    assert '<p class="lead">&lt;b&gt;lead&lt;/b&gt;</p>' in text
    assert "<code>cbdsl run</code>: a sentence.</p>" in text
    assert "default-src 'none'" in text
    assert "@media screen and (prefers-color-scheme: dark)" in text  # and print is light


def test_the_style_sheet_has_the_colours_of_the_figures() -> None:
    light, dark = re.findall(r":root \{(.*?)\}", page(), re.DOTALL)
    for name, shades in SHADES.items():
        assert f"--{name}: {shades[0]};" in light
        assert f"--{name}: {shades[1]};" in dark


def test_lists_read_as_people_write_them() -> None:
    assert join_words([3]) == "3"
    assert join_words([1, 5, 10]) == "1, 5 and 10"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one epoch of plain SGD per round"),
        ({"epochs": 12, "momentum": 0.9}, "12 epochs, momentum 0.9"),
        ({"steps": 7}, "7 batches of plain SGD per round"),
        ({"decay": 0.5}, "one epoch, learning rate halved every round"),
        ({"decay": 0.9, "weight_decay": 0.01}, "one epoch, weight decay 0.01, learning rate times 0.9 every round"),
        (
            {"optimiser": "adamw", "schedule": "cosine", "clip": 1.0, "momentum": 0.9},
            "one epoch, AdamW, gradients of a norm up to 1, cosine of the learning rate within a round",
        ),
    ],
)
def test_local_training_is_described_by_its_settings(settings: dict[str, Any], words: str) -> None:
    assert describe_training(LocalSpec(**settings)) == words


def test_without_jinja2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with refused_as("missing-package", "jinja2", "cbdsl[study]"):
        importlib.reload(pages)
