"""One cluster of two nodes for all tests in this folder. `make test-ray` provides the environment."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ray_cluster import SHADOW, LocalCluster

# Set these before anything imports Ray, in this process or in kernels that it starts.
sys.path.insert(0, str(SHADOW))
os.environ["PYTHONPATH"] = os.pathsep.join([str(SHADOW), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
(Path(__file__).resolve().parents[2] / ".build").mkdir(exist_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests if Ray is missing. Otherwise, give them time, as a busy machine needs minutes to start a node."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if importlib.util.find_spec("ray") is None:
                item.add_marker(pytest.mark.skip(reason="Ray is not installed: make test-ray"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Yield a cluster with three CPUs on the head node and two on the other node."""
    found = LocalCluster(3, 2, client=True)
    os.environ["RAY_ADDRESS"] = found.address
    yield found
    del os.environ["RAY_ADDRESS"]
    found.close()


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest) -> None:
    """Wait until the cluster has released all resources, because the placement of ranks depends on them."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").wait_until_free()
