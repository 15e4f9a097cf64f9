"""The supervisor's records of the ranks of one attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate.telemetry import Decoder

if TYPE_CHECKING:
    from notebook_accelerate.launch.output.rank_output import RankOutput
    from notebook_accelerate.launch.processes.rank_process import RankProcess
    from notebook_accelerate.telemetry import Event


class SupervisedRank:
    """A rank, and what its supervisor knows about it.

    Args:
        process: The rank's process, which has started.
        output: Handles the rank's output.

    Attributes:
        decoder: Decodes what arrives on the rank's channel.
        outcome: The result or failure that the rank reported, or None until then.
        channel_error: Why the channel is no longer decoded, or "" if it is.
        ended: Whether the process has been reaped.
    """

    def __init__(self, process: RankProcess, output: RankOutput) -> None:
        self.process, self.output = process, output
        self.decoder = Decoder()
        self.outcome: Event | None = None
        self.channel_error = ""
        self.ended = False


class SupervisedRanks:
    """The ranks of one attempt.

    Hundreds of ranks report all the time, so handling a report must not iterate over all of them. The sets of ranks
    that every report needs are therefore kept in separate tables.

    Attributes:
        all: Every rank that was started.
        living: The ranks that have not been reaped.
        polled: The living ranks whose exit can be detected only by polling.
    """

    def __init__(self) -> None:
        self.all: dict[int, SupervisedRank] = {}
        self.living: dict[int, SupervisedRank] = {}
        self.polled: dict[int, SupervisedRank] = {}

    def add(self, rank: SupervisedRank) -> None:
        """Add a rank that has started."""
        number = rank.process.rank
        self.all[number] = self.living[number] = rank
        self.poll_if_needed(rank)

    def poll_if_needed(self, rank: SupervisedRank) -> None:
        """Start polling a living rank if nothing reports its exit."""
        if rank.process.needs_polling and not rank.ended:
            self.polled[rank.process.rank] = rank

    def remove(self, rank: SupervisedRank) -> None:
        """Remove a reaped rank from the living ranks."""
        rank.ended = True
        for table in (self.living, self.polled):
            table.pop(rank.process.rank, None)
