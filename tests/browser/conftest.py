"""One server for all browser tests. Every test is marked, and is skipped with a reason if there is no browser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import browser
from tests.support.browser import App, Browser, NotebookPage, Server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = browser.missing()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("browser")
            item.add_marker(pytest.mark.timeout(900))
            # The server, Chromium and playwright's loop outlive single tests.
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


@pytest.fixture(params=["lab", "notebook"])
def app(request: pytest.FixtureRequest) -> App:
    """The application that opens the notebook. Tests run in both applications, one after the other."""
    found: App = request.param
    return found


@pytest.fixture
def opened(server: Server, chromium: Browser, app: App) -> Iterator[Any]:
    """Yield a function that opens a notebook with the given cells and executes the first one."""
    pages: list[NotebookPage] = []

    def start(cells: list[str], theme: str = "light") -> NotebookPage:
        name = f"{app}-{time.monotonic_ns()}.ipynb"
        server.write(name, cells)
        page = server.open(chromium, name, app, theme)
        pages.append(page)
        page.run(0)
        page.idle()
        return page

    yield start
    for page in pages:
        page.close()
        assert page.errors == []
        assert page.outside == []
