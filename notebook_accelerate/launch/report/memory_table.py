"""``RunMemory``: what the memory of ranks holds, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.launch.report.markup import element
from notebook_accelerate.launch.report.profile import Profile
from notebook_accelerate.launch.report.tables import LEFT, html_table, text_table
from notebook_accelerate.profiling.memory_facts import PeakMemory, what_fits
from notebook_accelerate.telemetry.debug_protocol import MemoryReply
from notebook_accelerate.telemetry.memory_text import part_rows, size
from notebook_accelerate.telemetry.sampler import machine_memory

MAX_ROWS = 12
_ESTIMATED = {
    "weights": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
    "activations": "activations at the peak",
}  # fmt: skip


class RunMemory:
    """What the memory of ranks holds; as the last line of a cell, tables.

    Args:
        replies: The report of each rank, or why there is none.
        profile: One recorded step with its allocations; None: none.
        estimate: What ``estimate_memory`` has returned; None: nothing to compare with.
        world: The number of ranks of this machine, which share its memory.
        where: Returns the location of a frame.

    Attributes:
        reports: By rank, the report.
        missing: By rank, why there is none.
        peaks: By rank, the allocations of one step at its peak.
    """

    def __init__(
        self, replies: Mapping[int, MemoryReply | str], profile: Profile | None, estimate: Any, world: int,
        where: Callable[[FrameInfo], str],
    ) -> None:  # fmt: skip
        self.reports = {rank: dict(reply.report) for rank, reply in replies.items() if isinstance(reply, MemoryReply)}
        self.missing = {rank: reply for rank, reply in replies.items() if isinstance(reply, str)}
        self.peaks: dict[int, PeakMemory] = profile.peaks() if profile is not None else {}
        missing = profile.missing if profile is not None else {}
        self._without_step = {rank: why for rank, why in missing.items() if rank not in self.missing}
        self._world, self._where = max(1, world), where
        self._estimate = dict(estimate.training) if estimate is not None else {}
        for rank, peak in self.peaks.items():
            if rank in self.reports and peak.nbytes:
                self.reports[rank]["activations at the peak"] = peak.nbytes

    def bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes of a rank by what they are.

        Args:
            rank: Global index.

        Raises:
            KeyError: There is no report of this rank; ``missing`` says why.
        """
        return dict(part_rows(self.reports[rank]))

    def fits(self) -> list[str]:
        """Return what would fit, a sentence each; empty where no step was recorded."""
        found: list[str] = []
        for rank, report in self.reports.items():
            parts = self.bytes(rank)
            devices = [each["total"] for each in report["devices"].values()]
            capacity = devices[0] if devices else machine_memory()[0] // self._world
            for sentence in what_fits(parts, capacity, self._world):
                if sentence not in found:
                    found.append(sentence)
        return found

    def _part_table(self) -> list[list[str]]:
        ranks = list(self.reports)
        columns = {rank: self.bytes(rank) for rank in ranks}
        names = list(dict.fromkeys(name for parts in columns.values() for name in parts))
        title, estimated = self._compared()
        head = ["bytes of", *(f"rank {rank}" for rank in ranks), *([title] if estimated else [])]
        rows = [head]
        for name in names:
            cells = [size(columns[rank][name]) if name in columns[rank] else "–" for rank in ranks]
            last = [size(estimated[name]) if name in estimated else "–"] if estimated else []
            rows.append([name, *cells, *last])
        return rows

    def _compared(self) -> tuple[str, dict[str, int]]:
        """Return the last column: the estimate, else what parameters and optimizers ask for, if all ranks say the same.

        Ranks with parts of a model expect different numbers of bytes.
        """
        if self._estimate:
            known = {_ESTIMATED[name]: nbytes for name, nbytes in self._estimate.items() if name in _ESTIMATED}
            return "estimated", known
        expected = [dict(report.get("expected", {})) for report in self.reports.values()]
        return "expected", expected[0] if expected and all(each == expected[0] for each in expected) else {}

    def _module_table(self) -> list[list[str]]:
        rows = [["module", "rank", "parameters", "gradients", "optimizer state"]]
        for rank, report in list(self.reports.items())[:1]:
            rows += [[row[0], str(rank), *map(size, row[1:])] for row in report["modules"][:MAX_ROWS]]
        return rows

    def _variable_table(self) -> list[list[str]]:
        rows = [["variable", "rank", "function", "bytes"]]
        for rank, report in self.reports.items():
            rows += [[name, str(rank), function, size(nbytes)] for name, function, nbytes in report["variables"][:5]]
        return rows

    def _line_table(self) -> list[list[str]]:
        rows = [["line", "rank", "bytes", "code"]]
        for rank, peak in self.peaks.items():
            rows += [[line.place, str(rank), size(nbytes), line.source[:60]] for line, nbytes in peak.lines[:5]]
        for rank, report in self.reports.items():
            for name, number, nbytes in report["lines"][:5]:
                rows.append([self._where(FrameInfo(name, number, "", "")), str(rank), size(nbytes), "Python's own"])
        return rows

    def _tables(self) -> list[list[list[str]]]:
        every = self._part_table(), self._module_table(), self._variable_table(), self._line_table()
        return [rows for rows in every if len(rows) > 1]

    def _sentences(self) -> list[str]:
        return [
            *self.fits(),
            *(f"rank {rank} was not looked at: {why}" for rank, why in self.missing.items()),
            *(f"the activations of rank {rank} are not known: {why}" for rank, why in self._without_step.items()),
        ]

    def __repr__(self) -> str:
        return "\n\n".join(
            ["\n".join(self._sentences()), *(text_table(rows, rule=True) for rows in self._tables())]
        ).strip()

    def _repr_html_(self) -> str:
        parts = [element("p", sentence) for sentence in self._sentences()]
        for rows in self._tables():
            columns = [LEFT, *[{} if name not in ("code", "function") else LEFT for name in rows[0][1:]]]
            parts.append(html_table(rows[0], rows[1:], columns=columns))
        return element("div", *parts, class_="notebook-accelerate-memory")


__all__ = ["RunMemory"]
