"""What a profile says: its traces with everything that is drawn from them, each computed when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from notebook_accelerate.profiling.collective_waits import Joined
from notebook_accelerate.profiling.facts import ProfileFacts, RankReader, find_waits
from notebook_accelerate.profiling.op_table import LineSeconds, OpTime, line_table, op_table
from notebook_accelerate.profiling.profile_findings import Finding, find
from notebook_accelerate.profiling.sampled_lines import SampledLines, Where
from notebook_accelerate.profiling.timeline import Timeline
from notebook_accelerate.profiling.timeline_merge import Merger, join_collectives
from notebook_accelerate.profiling.trace import RankTrace


class Analysis:
    """Reads the traces of one profile.

    Args:
        traces: The traces, one of each rank.
        clocks: By rank, what to add to its system time for the run's time, in seconds.
        where: Returns the location of a frame.
    """

    def __init__(self, traces: Sequence[RankTrace], clocks: Mapping[int, float], where: Where) -> None:
        self.traces = sorted(traces, key=lambda trace: trace.rank)
        self._clocks = {trace.rank: trace.base + clocks.get(trace.rank, 0.0) for trace in self.traces}
        self._where = where

    @cached_property
    def samples(self) -> dict[int, SampledLines]:
        """The samples of each rank."""
        return {trace.rank: SampledLines(trace, self._where) for trace in self.traces}

    @cached_property
    def joined(self) -> list[Joined]:
        """The collectives, joined across ranks."""
        return join_collectives(self.traces, self._clocks)

    @cached_property
    def facts(self) -> ProfileFacts:
        """The facts of all ranks."""
        ranks = [RankReader(trace, self.samples[trace.rank]).read() for trace in self.traces]
        by_rank = {trace.rank: trace for trace in self.traces}
        waits = find_waits(by_rank, self._clocks, self.samples, self.joined)
        return ProfileFacts(ranks, waits, max((trace.world for trace in self.traces), default=0))

    @cached_property
    def findings(self) -> list[Finding]:
        """The sentences."""
        return find(self.facts)

    @cached_property
    def ops(self) -> list[OpTime]:
        """The operations by their own time."""
        return op_table(self.traces)

    @cached_property
    def lines(self) -> list[LineSeconds]:
        """The lines of the user's code by time."""
        return line_table(self.traces, self.samples)

    @cached_property
    def timeline(self) -> Timeline:
        """All ranks on one clock."""
        return Merger(self.traces, self._clocks, self.samples).merge(self.joined)


__all__ = ["Analysis"]
