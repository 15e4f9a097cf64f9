"""Other versions of transformers train and load checkpoints with this package as with the real Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.integrations.accelerate_alias import STARTUP_FOLDER
from tests.clients import peer
from tests.clients.programs import WITH_OTHER_TRANSFORMERS
from tests.clients.test_programs import check_results

VERSIONS = sorted(path.parent.name for path in peer.VERSIONS.glob("*/.ready"))
pytestmark = [
    pytest.mark.skipif(not peer.FOLDER.exists(), reason="the environment has no real accelerate: make test-clients"),
    pytest.mark.timeout(1800),  # This only guards against hangs: several processes import transformers.
]


@pytest.fixture(scope="module", params=VERSIONS)
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    """Return all programs' results with a version of transformers: on the real Accelerate, and on this package."""
    version = peer.VERSIONS / request.param
    paths: dict[str, tuple[Path | str, ...]] = {"there": (version, peer.FOLDER), "here": (STARTUP_FOLDER, version)}
    folders = {name: tmp_path_factory.mktemp(name) for name in paths}
    started = {name: peer.start(folders[name], WITH_OTHER_TRANSFORMERS, *path) for name, path in paths.items()}
    return [peer.results(process, folders[name]) for name, process in started.items()]


@pytest.mark.parametrize("name", WITH_OTHER_TRANSFORMERS)
def test_a_program_with_another_transformers_gives_equal_results(sides: list[dict[str, list[Any]]], name: str) -> None:
    check_results(name, *(side[name] for side in sides))
