"""Findings about ranks on GPUs, from traces written by hand, so that the tests need no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from notebook_accelerate.profiling.analysis import Analysis
from notebook_accelerate.telemetry import FrameInfo
from tests.support.gpu_traces import BACKWARD, CPU, CUDA, GpuRank, all_reduce, traces

STEPS = 4
ELEMENTS = 1_000_000


def _where(frame: FrameInfo) -> str:
    return f"{frame.filename}:{frame.lineno}"


def _train(
    kernel: Callable[[int], float] = lambda _rank: 20_000.0,
    *,
    rows: Callable[[int], int] = lambda _rank: 64,
    kind: str = "c10::BFloat16",
    scaler: bool = False,
    reads: bool = False,
    barrier: bool = False,
    late: float = 0.0,
) -> Analysis:
    """Return the analysis of two ranks that compute, reduce their gradients and step.

    Args:
        kernel: The duration of the matrix product's kernel in microseconds, by rank.
        rows: The number of rows in the batch, by rank.
        kind: The type of the elements in the matrix product.
        scaler: Whether a GradScaler checks for overflowed gradients.
        reads: Whether the function reads its loss in each step.
        barrier: Whether there is a barrier in each step.
        late: The number of microseconds that the host of rank 1 sleeps before its kernels.
    """
    ranks = [GpuRank(rank, asked={"mixed_precision": "bf16"}) for rank in range(2)]
    for _ in range(STEPS):
        for each in ranks:
            each.begin_step()
            each.sleep(late if each.rank else 0.0)
            shape = [[rows(each.rank), 512], [512, 512]]
            each.op("aten::linear", 10.0, dims=shape, kind=kind)
            each.op("aten::addmm", kernel(each.rank), dims=shape, kind=kind)
            each.event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", each.now, 40, BACKWARD)
            each.op("aten::mm", kernel(each.rank) / 4, dims=shape, kind=kind, thread=BACKWARD)
        all_reduce(ranks, ELEMENTS)
        if barrier:
            all_reduce(ranks, 1, 10.0, barrier=True)
        for each in ranks:
            if scaler:
                each.unscale()
            each.op("aten::_fused_adamw_", 200.0)
            if reads:
                each.read()
        for each in ranks:  # The queue is short, so the host is at most one step ahead.
            each.now = max(each.now, each._free[7] - 1_000.0)
            each.end_step()
    return Analysis(traces(ranks), {0: 0.0, 1: 0.0}, _where)


def _rules(analysis: Analysis) -> set[str]:
    return {finding.rule for finding in analysis.findings}


def test_nothing_is_reported_for_a_healthy_training() -> None:
    assert _rules(_train()) == set()
    assert _rules(_train(scaler=True)) == set(), "the scaler's read does not count as the function's"


def test_each_collective_is_joined_once_by_its_kernels() -> None:
    analysis = _train(lambda rank: 40_000.0 if rank else 20_000.0)
    assert [each.label() for each in analysis.joined] == [f"all_reduce #{n + 1} (4.00 MB)" for n in range(STEPS)]
    for each in analysis.joined:
        assert each.last == 1
        assert each.waits()[0] == pytest.approx(0.025, rel=0.05), "40 + 10 ms of kernels against 20 + 5 ms"


def test_the_rank_whose_kernels_take_longest_is_named() -> None:
    analysis = _train(lambda rank: 40_000.0 if rank else 20_000.0)
    finding = next(each for each in analysis.findings if each.rule == "slowest_rank")
    assert finding.ranks == (1,)
    assert finding.sentence.startswith("rank 0 waits 25 ms per step for rank 1 in all_reduce #")
    assert "which computes" in finding.sentence
    assert "unbalanced_batches" not in _rules(analysis), "the batches have equal sizes"


def test_waits_are_drawn_between_the_kernels() -> None:
    timeline = _train(lambda rank: 40_000.0 if rank else 20_000.0).timeline
    assert len(timeline.waits) == STEPS
    for wait in timeline.waits:
        assert "gpu stream 20" in timeline.tracks[wait.from_track].name
        assert "gpu stream 20" in timeline.tracks[wait.to_track].name


def test_larger_batches_are_found_by_the_time_of_their_kernels() -> None:
    analysis = _train(lambda rank: 32_000.0 if rank else 20_000.0, rows=lambda rank: 102 if rank else 64)
    finding = next(each for each in analysis.findings if each.rule == "unbalanced_batches")
    assert finding.ranks == (1,)
    assert "102 rows" in finding.sentence
    assert "slowest_rank" not in _rules(analysis), "unbalanced_batches already names the cause"


def test_full_precision_is_weighed_by_kernels() -> None:
    assert "full_precision" in _rules(_train(kind="float"))
    facts = _train(kind="float").facts.ranks[0]
    assert facts.matrix["float"] == pytest.approx(0.025, rel=0.01), "not the 18 us on the host"


def test_a_barrier_in_each_step_is_found_by_the_wait_for_its_kernel() -> None:
    analysis = _train(barrier=True)
    finding = next(each for each in analysis.findings if each.rule == "barriers")
    assert finding.seconds > 0.02
    assert "reads_of_values" not in _rules(analysis), "the wait is attributed to the barrier"


def test_reads_that_wait_for_the_device_are_found() -> None:
    finding = next(each for each in _train(reads=True, late=8_000.0).findings if each.rule == "reads_of_values")
    assert "waiting for the device" in finding.sentence


def test_a_device_that_waits_in_nccl_counts_as_neither_busy_nor_idle() -> None:
    waiting = _train(lambda rank: 40_000.0 if rank else 20_000.0).facts.ranks[0]
    assert waiting.kernel_seconds == pytest.approx(0.0252, rel=0.02)
    assert waiting.communicating > 0.02
    assert waiting.idle < 0.2 * waiting.step


def test_growth_of_device_memory_is_kept_apart_from_main_memory() -> None:
    ranks = [GpuRank(0)]
    for _ in range(STEPS):
        ranks[0].begin_step()
        ranks[0].op("aten::mm", 100.0)
        ranks[0].allocate(3 << 20, CUDA)
        ranks[0].allocate(-(50 << 20), CPU)
        ranks[0].end_step()
    facts = Analysis(traces(ranks), {0: 0.0}, _where).facts.ranks[0]
    assert facts.memory_growth == 3 << 20
