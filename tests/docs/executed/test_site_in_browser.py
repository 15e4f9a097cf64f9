"""The site in chromium: every page at desktop and phone width, in the light and the dark theme.

Screenshots of some pages are in .build/screenshots/site.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.docs.executed.test_built_site import PAGES, SITE
from tests.support import browser

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")
NAMES = [name for name in (str(path.relative_to(SITE)) for path in PAGES) if not name.startswith("_")]
NAMES.remove("404.html")  # its links start at the root of the published site
PICTURES = {
    *("index.html", "start.html", "guides/debugging.html", "guides/failures.html", "guides/run_panel.html"),
    *("api/run.html", "errors/WorkerError.html", "compared.html", "benchmarks.html", "from_accelerate.html"),
    *("tutorials/01_quickstart.html", "tutorials/ported/simple_cv_example.html"),
}
pytestmark = [
    pytest.mark.skipif(not SITE.exists(), reason="the site is not built: make docs"),
    pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing())),
    pytest.mark.leaks_ok("the server and the browser serve all tests of the module"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with browser.served(SITE) as found:
        yield found


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Page]:
    with browser.Browser() as chromium:
        opened = chromium.page_within(address)
        yield opened
        opened.close()


def shoot(page: Page, name: str, state: str) -> None:
    folder = browser.SCREENSHOTS / "site"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{Path(name).with_suffix('').as_posix().replace('/', '-')}-{state}.png")


WIDER_THAN_THE_PAGE = """() => {
  const width = document.documentElement.clientWidth;
  return document.scrollingElement.scrollWidth > width ? [document.scrollingElement.scrollWidth, width] : [];
}"""
MISSING_PICTURES = """() => [...document.images].filter((image) => !image.loading || image.loading === 'eager')
  .filter((image) => image.complete && !image.naturalWidth).map((image) => image.src.slice(0, 100))"""
COLORS = """() => {
  const style = getComputedStyle(document.body);
  return [style.color, style.backgroundColor];
}"""


def brightness(color: str) -> float:
    red, green, blue = (float(part) for part in color.partition("(")[2].rstrip(")").split(",")[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_its_window_in_both_themes(page: Page, address: str, name: str) -> None:
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("response", lambda response: problems.append(response.url) if response.status >= 400 else None)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}/{name}")
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
        text, background = map(brightness, page.evaluate(COLORS))
        assert background - text > 150 if theme == "light" else text - background > 100
        for window, (width, height) in WIDTHS.items():
            page.set_viewport_size({"width": width, "height": height})
            assert page.evaluate(WIDER_THAN_THE_PAGE) == [], f"{window}: the page scrolls sideways"
            if name in PICTURES:
                shoot(page, name, f"{window}-{theme}")
    assert page.evaluate(MISSING_PICTURES) == []
    assert problems == []


def test_the_page_of_a_missing_address_shows_its_styles_and_leads_back(page: Page, address: str) -> None:
    root = "/notebook-accelerate/"

    def respond(route: Route) -> None:
        path = route.request.url.partition(root)[2].partition("?")[0]
        known = (SITE / path).is_file()
        route.fulfill(status=200 if known else 404, path=SITE / (path if known else "404.html"))

    page.route(f"{address}{root}**", respond)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{address}{root}guides/renamed/long_ago.html")
    assert page.locator("h1").inner_text().startswith("This page does not exist")
    assert page.evaluate("getComputedStyle(document.querySelector('.mobile-header')).display") == "none"
    shoot(page, "404", "desktop")
    page.get_by_role("link", name="Debugging").last.click()
    page.wait_for_url(f"**{root}guides/debugging.html")


def test_a_phone_opens_the_navigation_and_the_search_finds_a_guide(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}/index.html")
    page.locator("label.mobile-header__toc, .header-left label").first.click()
    page.wait_for_timeout(500)
    shoot(page, "navigation", "phone-dark")
    page.get_by_role("link", name="Debugging").first.click()
    page.wait_for_url("**/guides/debugging.html")
    page.goto(f"{address}/search.html?q=breakpoint")
    found = page.locator("#search-results li a")
    found.first.wait_for()
    assert any("breakpoints.html" in str(link.get_attribute("href")) for link in found.all())
