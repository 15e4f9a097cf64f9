"""The built site: short addresses of the pages on exceptions, and notebooks with their reports and pictures."""

from __future__ import annotations

import pytest

from tests.docs.static.test_site import EXCEPTIONS
from tests.support import pages

SITE = pages.ROOT / ".build" / "docs"
pytestmark = [pytest.mark.skipif(not SITE.exists(), reason="the site is not built: make docs")]


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
