"""One server for all tests in this folder, and a bucket for each test."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fresh import fresh_state
from tests.support.s3 import S3Server, s3_server

__all__ = ["fresh_state"]

collect_ignore_glob = [] if importlib.util.find_spec("moto") and importlib.util.find_spec("s3fs") else ["test_*.py"]
LOOP = "fsspec keeps its loop's thread and its connections"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/s3" in str(item.path):
            item.add_marker(pytest.mark.leaks_ok(LOOP))


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    """Yield a server, and make this process and its children use it."""
    before = dict(os.environ)
    with s3_server() as found:
        os.environ.update(found.environment)
        yield found
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def bucket(server: S3Server) -> str:
    """Create a bucket for this test, and return its URL."""
    name = f"tests-{uuid.uuid4().hex[:12]}"
    store().mkdir(name)
    return f"s3://{name}"


def store() -> Any:
    """Return fsspec's file system for the server, with an empty cache."""
    import fsspec

    found = fsspec.filesystem("s3")
    found.invalidate_cache()
    return found
