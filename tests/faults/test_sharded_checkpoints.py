"""If a rank is killed while a sharded state is saved, the previous checkpoint loads, and the new one is refused."""

from __future__ import annotations

import functools
import os
import signal
import sys
from pathlib import Path

import pytest

from notebook_accelerate.errors import BrokenCheckpointError
from tests.support.background_saves import pending_save
from tests.support.ranks import RankError, run_ranks
from tests.support.sharded import ShardedTraining

STEPS = 2
PLACES = {
    "a shard of the model": (1, "open", "pytorch_model_fsdp_0/__1_0.distcp"),
    "a shard of the optimizer": (1, "open", "optimizer_0/__1_0.distcp"),
    "the list of the shards": (0, "open", "optimizer_0/.metadata.tmp"),
    "the manifest": (0, "open", "checkpoint_manifest.json"),
    "the last renaming": (0, "os.rename", ".second.incomplete"),
}
"""The rank to kill, and the audit event before which it is killed, with a part of the event's path."""


def save_until_killed(folder: str, place: str) -> None:
    rank, event, path = PLACES[place]
    training = ShardedTraining()
    for _ in range(STEPS):
        training.step()
    training.accelerator.save_state(f"{folder}/first")

    def audit(name: str, arguments: tuple[object, ...]) -> None:
        if name == event and path in str(arguments[0]) and (name != "open" or "w" in str(arguments[1])):
            os.kill(os.getpid(), signal.SIGKILL)

    if training.accelerator.process_index == rank:
        sys.addaudithook(audit)
    training.accelerator.save_state(f"{folder}/second", blocking=False)
    pending_save().join()
    assert training.accelerator.process_index != rank


def go_on(folder: str) -> list[float]:
    """Check that the second checkpoint is unfinished, resume from the first, and save the second again."""
    training = ShardedTraining(seed=9)
    with pytest.raises((BrokenCheckpointError, ValueError), match=r"never finished|folder does not exist"):
        training.accelerator.load_state(f"{folder}/second")
    training.go_on(f"{folder}/first", STEPS)
    losses = [training.step()]
    training.accelerator.save_state(f"{folder}/second", blocking=False)
    training.accelerator.load_state(f"{folder}/second")
    training.accelerator.end_training()
    return losses


@functools.cache
def expected() -> list[list[float]]:
    return run_ranks(uninterrupted)


def uninterrupted() -> list[float]:
    training = ShardedTraining()
    return [training.step() for _ in range(STEPS + 1)][STEPS:]


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_killed_while_shards_are_written_leaves_no_checkpoint(place: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(save_until_killed, str(tmp_path), place)
    assert PLACES[place][0] in failure.value.reports, failure.value
    assert "signal" in failure.value.reports[PLACES[place][0]]
    assert not (tmp_path / "second").exists()
    assert run_ranks(go_on, str(tmp_path)) == expected()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
