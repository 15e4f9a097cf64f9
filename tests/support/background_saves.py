"""Checks of `save_state(blocking=False)` that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from notebook_accelerate.checkpointing import state_saving
from notebook_accelerate.checkpointing.checkpoint_writer import PendingSave
from tests.support.ranks import run_script

_SCRIPT = """
import sys
from tests.support.gates import after_the_main_thread
{setup}
training.accelerator.save_state(sys.argv[1], blocking=False)
{ending}
"""


def pending_save() -> PendingSave:
    """Return the save that this process is writing in the background."""
    return state_saving._pending[-1]


def disk_full(*_: Any) -> Any:
    """Raise the error that a full disk causes. Tests replace a writer with this function."""
    raise OSError(28, "No space left on device")


def check_dead_rank_reported(folder: str, pid: int) -> None:
    """Check that the surviving rank's save reports that rank 1 was killed. Then create a file named "seen".

    Args:
        folder: The checkpoint that the save writes.
        pid: The process id of rank 1.
    """
    save = pending_save()
    save.join()
    assert save.target.rank == 0
    assert f"rank 1 did not finish its part, because its process {pid} has ended" in str(save.error)
    assert not list(Path(folder).glob(".*"))
    Path(folder).with_name("seen").touch()


def check_ending_ranks_finish(setup: str, folder: Path, ending: str = "pass", code: int = 0) -> None:
    """Run a script on two ranks that exit while they write a checkpoint, which must be complete afterwards.

    Args:
        setup: Code that creates `training`, and delays a writer with `after_the_main_thread`.
        folder: The checkpoint that the script writes.
        ending: The last statement of the script.
        code: The expected exit status.
    """
    for status, errors in run_script(_SCRIPT.format(setup=setup, ending=ending), str(folder)):
        assert status == code, errors
    assert (folder / "checkpoint_manifest.json").exists()
