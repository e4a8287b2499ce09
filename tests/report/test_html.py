from __future__ import annotations

from html.parser import HTMLParser

import pytest

from cbdsl.report.html import Section, bullets, document, picture, table


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
    found = table(("Name", "F < G"), [("<b>a</b>", "1"), ("b", "2")])
    assert found == (
        "<table><thead><tr><th>Name</th><th>F &lt; G</th></tr></thead><tbody>"
        '<tr><td data-label="Name"><b>a</b></td><td data-label="F &lt; G">1</td></tr>'
        '<tr><td data-label="Name">b</td><td data-label="F &lt; G">2</td></tr></tbody></table>'
    )


def test_rows_can_be_linked_to_and_cards_can_have_other_words() -> None:
    found = table(("Fig.",), [("1",), ("2",)], labels=("Figure",), anchors=("first", "second"))
    assert "<th>Fig.</th>" in found
    assert '<tr id="first"><td data-label="Figure">1</td></tr><tr id="second">' in found


@pytest.mark.parametrize(("rows", "anchors"), [([("1",)], None), ([("1", "2", "3")], None), ([("1", "2")], ["a", "b"])])
def test_a_table_with_holes_is_refused(rows: list[tuple[str, ...]], anchors: list[str] | None) -> None:
    with pytest.raises(ValueError, match="zip"):
        table(("one", "two"), rows, anchors=anchors)


def test_a_picture_scrolls_by_itself() -> None:
    assert picture("<svg/>") == '<figure><div class="scroll"><svg/></div></figure>'
    assert picture("<svg/>", "<b>words</b>", "here").startswith(
        '<figure id="here"><figcaption><b>words</b></figcaption>'
    )


def test_a_document_links_to_its_sections_and_allows_nothing_from_outside() -> None:
    parts = [Section("one", "First & last", "All < there is", bullets(["<i>a</i>", "b"]))]
    page = document("A <title>", "<b>lead</b>", parts)
    assert balanced(page)
    assert '<a href="#one">First &amp; last</a>' in page
    assert '<section id="one"><h2>All &lt; there is</h2><ul><li><i>a</i></li><li>b</li></ul></section>' in page
    assert "<title>A &lt;title&gt;</title>" in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
