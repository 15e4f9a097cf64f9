"""Memory from the allocations of a trace: the peak of a step, whose lines it is, and what would fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from notebook_accelerate.profiling.collective_waits import size_text
from notebook_accelerate.profiling.op_table import recorded
from notebook_accelerate.profiling.sampled_lines import Line, SampledLines
from notebook_accelerate.profiling.trace import RankTrace

USED = 0.9
"""The share of a device's memory that a training can use: the rest is fragmented, or the driver's."""
MOST = 64
_KEPT = ("parameters", "gradients", "optimizer state", "other tensors")


@dataclass(frozen=True)
class PeakMemory:
    """The allocations of one recorded step at its peak.

    Attributes:
        nbytes: Bytes above what was in use when the step began.
        lines: The lines that have allocated them, by bytes; as far as samples tell.
    """

    nbytes: int
    lines: list[tuple[Line, int]] = field(default_factory=list)


def peak_of(trace: RankTrace, lines: SampledLines) -> PeakMemory:
    """Return the peak of the recorded steps; 0 bytes where allocations were not recorded."""
    start, end = recorded(trace)
    total = best = 0
    when = start
    events = [row for row in trace.memory if start <= row[0] <= end]
    for at, nbytes, _ in events:
        total += nbytes
        if total > best:
            best, when = total, at
    alive: dict[int, tuple[float, int]] = {}
    for at, nbytes, address in events:
        if at > when:
            break
        if nbytes > 0:
            alive[address] = at, nbytes
        else:
            alive.pop(address, None)
    found: dict[Line, int] = {}
    for at, nbytes in alive.values():
        if (line := lines.at(at, at + 1)) is not None:
            found[line] = found.get(line, 0) + nbytes
    return PeakMemory(best, sorted(found.items(), key=lambda row: -row[1]))


def what_fits(parts: Mapping[str, int], capacity: int, ranks: int) -> list[str]:
    """Return what would fit into the memory of a rank, a sentence each; empty where the activations are not known.

    Args:
        parts: Bytes by what they are.
        capacity: The rank's memory.
        ranks: The number of ranks, over which state can be sharded.
    """
    activations = parts.get("activations at the peak", 0)
    if not activations or capacity <= 0:
        return []
    kept = sum(parts.get(name, 0) for name in _KEPT)
    factor = (USED * capacity - kept) / activations
    room = f"of {size_text(capacity)} per rank, {size_text(kept)} are in use between steps"
    if factor >= 1.1:
        return [f"{room} and {size_text(activations)} more at the peak: batches {_times(factor)} as large would fit"]
    state = sum(parts.get(name, 0) for name in _KEPT[:3])
    sharded = (USED * capacity - (kept - state) - state / ranks) / activations
    if ranks > 1 and sharded > factor:
        return [f"{room}: with FSDP over {ranks} ranks, batches {_times(sharded)} as large would fit"]
    return [f"{room}: smaller batches, activation checkpointing or offloading would fit"]


def _times(factor: float) -> str:
    return f"{min(factor, MOST):.1f} times" if factor < MOST else f"more than {MOST} times"
