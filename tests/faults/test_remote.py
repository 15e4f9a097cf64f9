"""If a save to a store is killed at any change, the previous checkpoint still loads, and the next save cleans up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.killed import killed_saves

MANIFEST = "checkpoint_manifest.json"


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("target", "blocking", "every", "values"),
    [
        pytest.param("new", True, 2, {"BrokenCheckpointError", "ValueError", "2.0"}, marks=pytest.mark.nightly),
        pytest.param("old", False, 2, {"1.0", "2.0"}, marks=pytest.mark.nightly),
        ("auto", True, 1, {"1.0", "2.0"}),
    ],
)
def test_a_process_killed_at_any_change_of_the_store_loses_nothing(
    tmp_path: Path, target: str, blocking: bool, every: int, values: set[str]
) -> None:
    steps = killed_saves(f"shelf://{tmp_path}", target, blocking, every)
    assert len(steps) * every > 6
    assert {found for _, found in steps} == values
    assert steps[-1][1] == "2.0"
    for step, _ in steps:
        here = tmp_path / f"at_{step}"
        # With total_limit=1, the save has removed all other numbered checkpoints.
        place = here / {"new": "new", "old": "old", "auto": "checkpoints/checkpoint_2"}[target]
        wanted = sorted([*json.loads((place / MANIFEST).read_text())["files"], MANIFEST])
        assert [f"{place.relative_to(here)}/{name}" for name in wanted] == names_in(here)
