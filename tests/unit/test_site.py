"""The site of the documents: mkdocs has no warning, all links lead, nothing is from elsewhere."""

from __future__ import annotations

import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
LOADED = {"src", "srcset", "data", "poster", "xlink:href"}  # attributes of what a browser fetches


class Reader(HTMLParser):
    """What a page has: names to link to, links, and what a browser loads to show it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.classes: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.names.add(value or "")
            elif name == "class":
                self.classes |= set((value or "").split())
            elif name in LOADED or (name == "href" and tag in ("link", "image", "use")):
                self.loaded.append(value or "")
            elif name == "href":
                self.links.append(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, where each warning is an error."""
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        # As `make site`: what Python compiles lies in docs/ then.
        patch.setattr(sys, "dont_write_bytecode", False)
        config = load_config(site_dir=str(folder), strict=True)
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
        config.plugins.on_shutdown()
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Reader]:
    return {page: Reader(page) for page in site.rglob("*.html") if page.name != "404.html"}


def test_each_page_of_the_documents_is_in_the_navigation(site: Path) -> None:
    index = Reader(site / "index.html")
    for page in (ROOT / "docs").rglob("*.md"):
        shown = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / shown).exists()
        assert str(shown) in index.links


def test_no_compiled_program_is_on_the_site(site: Path) -> None:
    assert [*site.rglob("__pycache__")] == []


def test_a_browser_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, Reader]) -> None:
    loaded = [url for reader in pages.values() for url in reader.loaded]
    for path in (*site.rglob("*.css"), *site.glob("*.svg")):
        loaded += re.findall(r"url\([\"']?([^)\"']*)|@import [\"']([^\"']*)", path.read_text())
    urls = ["".join(url) for url in loaded]
    assert len(urls) > 100
    assert [url for url in urls if urlsplit(url).scheme not in ("", "data")] == []
    assert [url for url in urls if url.startswith("//")] == []
    # The theme would load a program that draws such blocks.
    assert not any("mermaid" in reader.classes for reader in pages.values())


def test_each_link_leads_to_a_page_and_a_heading(pages: dict[Path, Reader]) -> None:
    for page, reader in pages.items():
        for link in (*reader.links, *reader.loaded):
            url = urlsplit(link)
            if url.scheme or link in (".", ""):
                continue
            target = (page.parent / unquote(url.path)).resolve() if url.path else page
            assert target.exists(), f"{page}: {link}"
            if url.fragment and not url.fragment.startswith("__"):
                assert unquote(url.fragment) in pages[target].names, f"{page}: {link}"


def test_a_list_or_a_table_is_one_and_no_comment_is_shown(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        article = text.partition("<article")[2].partition("</article")[0]
        assert not re.search(r"^(- |[1-9]\d*\. \w|\| )|```|\]\(|&lt;!--", article, re.MULTILINE), (
            page
        )


def test_the_tutorial_has_its_text_its_outputs_and_its_pictures(
    site: Path, pages: dict[Path, Reader]
) -> None:
    page = site / "tutorial-synchronous-sgd.html"
    assert sum(url.startswith("tutorial-") for url in pages[page].loaded) == 4
    assert "each sample was trained exactly once, in 72 steps" in page.read_text()


def test_the_search_finds_pages_by_their_sections(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    titles = {entry["location"]: entry["title"] for entry in index["docs"]}
    assert titles["how-to/machines.html#several-machines"] == "Several machines"
    assert titles["index.html#two-machines"] == "Two machines"
    assert len(titles) > 300
