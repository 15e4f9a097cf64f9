"""The checks that every strategy must pass: its losses equal plain torch's, even after its ranks were killed."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate.errors import CheckpointError
from tests.parity.strategies.scripts import Case, accelerated, killed, plain, saves_alone
from tests.support.ranks import RankError, run_ranks

# In fp32, sums are computed in another order. In bf16, FSDP units and DeepSpeed engines round their weights once more
# than autocast does.
TOLERANCE = {"no": 1e-5, "bf16": 1e-2}
ACCUMULATION = (1, 4)
SECONDS = 300.0
"""The time limit in seconds for one training run, which takes a second or two on an idle machine."""
patient = pytest.mark.timeout(3 * SECONDS)


@functools.cache
def plain_losses(precision: str, accumulation: int) -> list[float]:
    """Return the losses of the same training run in plain torch."""
    return plain(Case(precision=precision, accumulation=accumulation))


def assert_trains_and_resumes(case: Case, ranks: int, folder: Path) -> None:
    """Train, saving halfway, and compare the losses. Kill the ranks, resume in other processes, and compare again."""
    checkpoint, results = folder / "checkpoint", folder / "results.pt"
    run = functools.partial(run_ranks, world_size=ranks, timeout=SECONDS, env=machine(case))
    with pytest.raises(RankError, match="exit code -9"):
        run(killed, case, str(checkpoint), str(results))
    whole = torch.load(results, weights_only=True)
    expected = plain_losses(case.precision, case.accumulation)
    assert whole["losses"] == pytest.approx(expected, rel=TOLERANCE[case.precision])
    assert expected[-1] < 0.75 * expected[0]  # The losses must decrease clearly.
    half = case.steps // 2
    resumed = run(accelerated, replace(case, first=half, steps=case.steps - half), None, str(checkpoint))[0]
    assert_same(resumed, whole, half * case.accumulation, exactly=ranks == 2 or not adds_in_another_order(case))


def assert_same(resumed: dict[str, Any], whole: dict[str, Any], first: int, exactly: bool) -> None:
    """Compare a resumed training run with an uninterrupted one, from batch `first` on."""
    assert resumed["weights"].keys() == whole["weights"].keys()
    if not exactly:
        assert resumed["losses"] == pytest.approx(whole["losses"][first:], rel=1e-4)
        return
    assert resumed["losses"] == whole["losses"][first:]
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, whole["weights"][name]), name


def assert_notices_saving_alone(case: Case, folder: Path) -> None:
    """Check that saving a sharded state on a single rank raises an error that says what to write instead."""
    with pytest.raises(RankError, match="Rank 0 is in save_state, and the other ranks cannot reach it") as caught:
        run_ranks(saves_alone, case, str(folder / "checkpoint"), timeout=SECONDS)
    assert isinstance(caught.value.__cause__, CheckpointError)
    said = str(caught.value.__cause__)
    assert "rank 1 is waiting in another collective, at " in said
    assert "scripts.py" in said
    assert "take it out of `if accelerator.is_main_process:`" in said
    assert not (folder / "checkpoint").exists()


def adds_in_another_order(case: Case) -> bool:
    """Return whether the first step sums the gradients of more than two ranks in another order than later steps.

    After that step, DistributedDataParallel rebuilds its buckets in the order in which gradients became ready.
    """
    return case.fsdp is None and case.deepspeed is None and case.degrees is None


def machine(case: Case) -> dict[str, str]:
    """Return variables that make ranks believe that they are spread across several machines."""
    return {} if case.ranks_of_a_machine is None else {"LOCAL_WORLD_SIZE": str(case.ranks_of_a_machine)}
