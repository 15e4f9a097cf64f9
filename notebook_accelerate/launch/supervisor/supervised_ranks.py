"""The ranks of one attempt, as they are kept while they are watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate.telemetry import Decoder

if TYPE_CHECKING:
    from notebook_accelerate.launch.output.rank_output import RankOutput
    from notebook_accelerate.launch.processes.rank_process import RankProcess
    from notebook_accelerate.launch.run import RankInfo
    from notebook_accelerate.telemetry import Event


class SupervisedRank:
    """A rank under supervision.

    Args:
        process: How it is heard and ended.
        info: What the run tells of it.
        outputs: Where its output goes, by stream.
    """

    def __init__(self, process: RankProcess, info: RankInfo, outputs: dict[str, RankOutput]) -> None:
        self.process, self.info, self.outputs = process, info, outputs
        self.decoder = Decoder()
        self.outcome: Event | None = None
        self.ended = False


class SupervisedRanks:
    """The ranks of one attempt.

    Hundreds of ranks report all the time: what is done for each report must not look at all ranks. So there is a table
    for each question that is asked for every report.

    Attributes:
        all: Every rank that was started.
        living: Those that have not been reaped.
        asked: Of the living, those of whose end nothing tells.
        starting: Of the living, those that have not said yet that they run.
    """

    def __init__(self) -> None:
        self.all: dict[int, SupervisedRank] = {}
        self.living: dict[int, SupervisedRank] = {}
        self.asked: dict[int, SupervisedRank] = {}
        self.starting: set[int] = set()

    def add(self, watched: SupervisedRank) -> None:
        """A rank has started."""
        rank = watched.process.rank
        self.all[rank] = self.living[rank] = watched
        self.starting.add(rank)
        if watched.process.must_be_asked:
            self.asked[rank] = watched

    def leave_out(self, watched: SupervisedRank) -> None:
        """A rank has been reaped."""
        watched.ended = True
        for table in (self.living, self.asked):
            table.pop(watched.process.rank, None)
        self.starting.discard(watched.process.rank)


__all__ = ["SupervisedRank", "SupervisedRanks"]
