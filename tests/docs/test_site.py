"""The documentation site: built once, without a warning; its notebooks run, its links are followed, its pages fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.main import get_command

import cbdsl
from cbdsl.cli.app import app
from support.browser import tab
from support.shared_folder import shared_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path.name.removesuffix(".nb.py") for path in (ROOT / "docs" / "notebooks").glob("*.nb.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; every notebook is run on the way."""

    def build(out: Path) -> None:
        words = ["-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(out)]
        command = [sys.executable, "-m", "sphinx", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]

    return shared_folder(tmp_path_factory, "site", build)


class Links(HTMLParser):
    """What a page names: where it leads, what it loads, and the places in it that others can lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            if name in {"href", "src"} and value and tag != "use":
                (self.links if tag == "a" else self.loaded).add(value)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {path: Links(path) for path in site.rglob("*.html")}


def test_every_internal_link_leads_to_a_page_and_a_place(pages: dict[Path, Links]) -> None:
    lost, followed = [], 0
    for page, found in pages.items():
        for link in found.links | found.loaded:
            address, _, place = link.partition("#")
            if re.match(r"[a-z]+:", address):
                continue
            target = (page.parent / address.partition("?")[0]).resolve() if address else page
            followed += 1
            if not target.is_file() or (place and target in pages and place not in pages[target].places):
                lost.append(f"{page.name}: {link}")
    assert lost == []
    assert followed > 1000


def test_pages_load_nothing_from_elsewhere(pages: dict[Path, Links]) -> None:
    assert {link for found in pages.values() for link in found.loaded if re.match(r"(https?:)?//", link)} == set()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_says_something_and_ends_in_a_figure(site: Path, name: str) -> None:
    page = (site / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
    assert "<figure class='drawn'><svg role=\"img\" aria-label=" in page
    assert 'class="outcome' in page
    whole = json.loads((site / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert {cell["cell_type"] for cell in whole["cells"]} == {"code", "markdown"}


def test_every_public_name_is_in_the_reference(pages: dict[Path, Links], site: Path) -> None:
    places = pages[site / "reference" / "api.html"].places
    missing = {name for name in cbdsl.__all__ if not {f"cbdsl.{name}", f"module-cbdsl.{name}"} & places}
    assert missing == {"__version__"}


def test_names_in_the_reference_are_those_of_the_code(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    shown = set(re.findall(r"<li><p><code[^>]*><span class=\"pre\">(\w+)</span></code>", page))
    assert {"model", "final_accuracy", "rng", "root", "most", "score"} <= shown
    assert not any(name[0].isupper() for name in shown)


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    shown = set(re.findall(r"<span class=\"pre\">(--[\w-]+)</span>", text))
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert f'id="cbdsl-{name}"' in text
        for each in command.params:
            options = {word for word in each.opts if word.startswith("--") and not getattr(each, "hidden", False)}
            assert options - {"--help"} <= shown, (name, options)


@pytest.mark.parametrize("page", ["index", "results", "reference/cli", "reference/api", "notebooks/duel"])
def test_a_page_fits_a_narrow_screen(site: Path, page: str) -> None:
    with tab(width=390, height=800) as opened:
        opened.open((site / f"{page}.html").as_uri())
        assert opened.value("document.documentElement.scrollWidth") <= 390


def test_the_script_of_ones_own_parts_has_less_than_forty_lines() -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/together.md").read_text(), re.DOTALL | re.MULTILINE)
    assert 20 < len([line for line in script.splitlines() if line.strip()]) < 40
    assert {"model=", "clients=", "attack="} <= set(re.findall(r"\b(?:model|clients|attack)=", script))


def test_the_version_is_the_same_wherever_it_is_said() -> None:
    (said,) = re.findall(r'^version: "?([\w.]+)"?$', (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert said == cbdsl.__version__
    assert 'version = { attr = "cbdsl.__version__" }' in (ROOT / "pyproject.toml").read_text()
