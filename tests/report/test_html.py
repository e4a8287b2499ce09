from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from cbdsl.report.html import Section, bullet_list, document, picture, table


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


def balanced(text: str) -> bool:
    parser = Balance()
    parser.feed(text)
    return not parser.open


def test_a_table_has_a_head_and_a_labelled_cell_for_every_word_of_it() -> None:
    found = table(("Name", "F < G"), [("<b>a</b>", "1"), ("b", "none")])
    assert found == (
        '<table class="cards"><thead><tr><th scope="col">Name</th><th scope="col">F &lt; G</th></tr></thead><tbody>'
        '<tr><td data-label="Name"><b>a</b></td><td data-label="F &lt; G" data-sort="1">1</td></tr>'
        '<tr><td data-label="Name">b</td><td data-label="F &lt; G">none</td></tr></tbody></table>'
    )


def test_a_wide_table_scrolls_and_has_no_cards() -> None:
    found = table(("Name",), [("a",)], wide=True)
    assert found.startswith('<div class="scroll wide" tabindex="0"')
    assert "cards" not in found


@pytest.mark.parametrize(
    ("cell", "key"),
    [
        ("93.6 ± 0.6 %", "93.6"), ("1,234", "1234"), ("-0.5 points (liar, 20)", "-0.5"), ("<b>2 of 4</b>", "2"),
        ("12.5 kB", "12500"), ("1.3&nbsp;±&nbsp;0.1&nbsp;MB", "1300000"), ("900 B", "900"), ("3.2e+06", "3200000"),
        ("–", None), ("diverged", None), ("53fc80978d6a", None), ("<code>seed</code>", None), ("4 Byzantine", "4"),
    ],
)  # fmt: skip
def test_cells_are_sorted_by_the_number_they_begin_with_bytes_as_bytes(cell: str, key: str | None) -> None:
    found = re.search(r'data-sort="([^"]+)"', table(("Head",), [(cell,)]))
    assert (found[1] if found else None) == key


def test_rows_can_be_linked_to_and_cards_can_have_other_words() -> None:
    found = table(("Fig.",), [("1",), ("2",)], labels=("Figure",), anchors=("first", "second"))
    assert '<th scope="col">Fig.</th>' in found
    assert '<tr id="first"><td data-label="Figure" data-sort="1">1</td></tr><tr id="second">' in found


@pytest.mark.parametrize(("rows", "anchors"), [([("1",)], None), ([("1", "2", "3")], None), ([("1", "2")], ["a", "b"])])
def test_a_table_with_holes_is_refused(rows: list[tuple[str, ...]], anchors: list[str] | None) -> None:
    with pytest.raises(ValueError, match="zip"):
        table(("one", "two"), rows, anchors=anchors)


def test_a_picture_scrolls_by_itself() -> None:
    assert picture("<svg/>") == '<figure><div class="scroll"><svg/></div></figure>'
    assert picture("<svg/>", "<b>words</b>", "here").startswith(
        '<figure id="here"><figcaption><b>words</b></figcaption>'
    )


def test_a_figures_numbers_come_with_the_page() -> None:
    found = picture("<svg/>", numbers=("curve.csv", "round,ß\n1,0.5\n"))
    link = re.search(r'download="curve.csv" href="data:text/csv;charset=utf-8;base64,([^"]+)"', found)
    assert link is not None
    assert base64.b64decode(link[1]).decode() == "round,ß\n1,0.5\n"


def test_a_page_explains_the_symbols_it_has_and_no_others() -> None:
    def symbols(lead: str) -> list[str]:
        page = document("Title", lead, [])
        return re.findall(r"<dt><b>([^<]+)</b></dt>", page)

    assert symbols("nothing to explain, not even UNITS or D_Gx") == []
    assert symbols("CB-DSL + D_G sends 1/U") == ["D_G", "U"]
    assert symbols("<b>F^g</b> of w^g") == ["w^g", "F^g"]


def test_the_one_script_of_a_page_is_the_one_its_policy_allows() -> None:
    page = document("Title", "lead", [])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in page
    assert "<button" not in page.replace(script, "")  # without it, tables are plain


def test_a_document_links_to_its_sections_and_allows_nothing_from_outside() -> None:
    parts = [Section("one", "First & last", "All < there is", bullet_list(["<i>a</i>", "b"]))]
    page = document("A <title>", "<b>lead</b>", parts)
    assert balanced(page)
    assert '<a href="#one">First &amp; last</a>' in page
    assert '<section id="one"><h2>All &lt; there is</h2><ul><li><i>a</i></li><li>b</li></ul></section>' in page
    assert "<title>A &lt;title&gt;</title>" in page
    assert "default-src 'none'" in page
    assert "@media screen and (prefers-color-scheme: dark)" in page  # and print is light
