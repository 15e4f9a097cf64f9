"""The built site: links and anchors, short addresses for exceptions, and notebooks with their reports."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.docs.static.test_site import EXCEPTIONS
from tests.support import pages

SITE = pages.ROOT / ".build" / "docs"
pytestmark = [pytest.mark.skipif(not SITE.exists(), reason="the site is not built: make docs")]
PAGES = sorted(path for path in SITE.rglob("*.html") if path.parent.parent.name != "e" and "_static" not in path.parts)


class Links(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if anchor := values.get("id"):
            self.anchors.add(anchor)
        target = values.get("href" if tag in {"a", "link"} else "src")
        if target and not target.startswith(("http:", "https:", "mailto:", "data:")):
            self.targets.append(target)


@cache
def links(path: Path) -> Links:
    return Links(path.read_text())


def leads_nowhere(page: Path, target: str) -> bool:
    name, anchor = urldefrag(target)
    other = (page.parent / unquote(name.partition("?")[0])).resolve() if name else page
    if other.is_dir():
        other /= "index.html"
    if not other.exists():
        return True
    return bool(anchor) and other.suffix == ".html" and unquote(anchor) not in links(other).anchors


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(SITE)))
def test_links_and_anchors_of_the_site_have_targets(path: Path) -> None:
    targets = links(path).targets
    assert targets
    assert [target for target in targets if leads_nowhere(path, target)] == []


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_a_short_address_leads_to_the_page(name: str) -> None:
    page = (SITE / "e" / name / "index.html").read_text()
    assert f'content="0; url=../../errors/{name}.html"' in page
    assert (SITE / "errors" / f"{name}.html").exists()


def test_the_quickstart_shows_its_reports_and_pictures() -> None:
    page = (SITE / "tutorials" / "01_quickstart.html").read_text()
    assert page.count('class="notebook-accelerate-report"') >= 3
    assert page.count("<img") >= 4
    assert 'href="02_tiny_gpt.html"' in page
    assert 'href="../hosts.html"' in (SITE / "tutorials" / "07_cluster.html").read_text()


def test_a_class_that_users_never_construct_shows_no_constructor() -> None:
    page = (SITE / "api" / "run.html").read_text()
    signature = page.partition('id="notebook_accelerate.Run">')[2].partition("</dt>")[0]
    assert ">Run<" in signature
    assert "sig-paren" not in signature
    assert "Name of the launched function" in page  # The attributes' entries remain.
    assert "None means a new one" not in page


def test_signatures_contain_no_internal_names() -> None:
    defaults = {
        re.sub("<.*?>", "", text)
        for page in (SITE / "api").glob("*.html")
        for text in re.findall('<span class="default_value">(.*?)</span></em>', page.read_text(), re.DOTALL)
    }
    assert {"None", "False", "5.0"} <= defaults
    assert [text for text in defaults if re.search(r"^[a-z_]+\.\w|^[A-Z_]{3,}$|&lt;", text)] == []


@pytest.mark.parametrize("page", ["api/exceptions", "errors/index"])
def test_the_tree_of_exceptions_is_a_nested_list_with_links(page: str) -> None:
    text = (SITE / f"{page}.html").read_text()
    assert "├──" not in text
    tree = text[text.index("NotebookAccelerateError</") :]
    assert re.search(r"LaunchError</.*?<ul>.*?PortInUseError</", tree, re.DOTALL)
    for name in ("WorkerError", "RunLostError", "DistributedOperationException"):
        assert re.search(rf'<a [^>]*href="[^"]*{name}[^"]*"', tree)


def test_pictures_follow_the_theme() -> None:
    pictures = {path.name for path in (pages.DOCS / "pictures").iterdir()}
    assert all("-dark" in name or name.replace(".", "-dark.") in pictures for name in pictures)
    page = (SITE / "index.html").read_text()
    for theme in ("light", "dark"):
        assert re.search(rf'<img [^>]*class="only-{theme}"', page)


def test_inherited_members_have_entries() -> None:
    inherited = ("device", "is_main_process", "main_process_first", "on_main_process", "sync_gradients")
    anchors = links(SITE / "api" / "accelerator.html").anchors
    assert {f"notebook_accelerate.Accelerator.{name}" for name in inherited} <= anchors
    assert "notebook_accelerate.tracking.WandBTracker.log_images" in links(SITE / "api" / "tracking.html").anchors


def test_descriptions_of_fields_are_complete() -> None:
    pages_with_types = [path.name for path in (SITE / "api").glob("*.html") if ">Type<span" in path.read_text()]
    assert pages_with_types == []
    configuration = (SITE / "api" / "configuration.html").read_text()
    assert "Number of batches per optimizer step. If None, the Accelerator" in configuration


def test_internal_members_have_no_entry() -> None:
    anchors = links(SITE / "api" / "run.html").anchors
    assert "notebook_accelerate.Run.panel" in anchors
    assert not {f"notebook_accelerate.Run.{name}" for name in ("journal", "commands", "store")} & anchors
