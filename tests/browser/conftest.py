"""One server for all browser tests; every test is marked, and skipped with the reason where there is no browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import browser
from tests.support.browser import Browser, Server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = browser.missing()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("browser")
            item.add_marker(pytest.mark.timeout(240))
            # The server, chromium and playwright's loop live as long as the module.
            item.add_marker(pytest.mark.leaks_ok("the server and the browser serve all tests of the module"))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with Browser() as started:
        yield started
