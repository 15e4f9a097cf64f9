"""Measurements of running ranks: the lines that take the most time, a flame graph, and the contents of memory."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.hardware.detection import machine_memory
from notebook_accelerate.launch.report.document import Cell, Column, Drawing, Group, Row, Section, Table, Text, table_of
from notebook_accelerate.launch.report.markup import Markup, element, join, svg_text
from notebook_accelerate.launch.report.profile import Profile
from notebook_accelerate.launch.report.rendering import DocumentView
from notebook_accelerate.profiling.tables import PeakMemory, what_fits
from notebook_accelerate.telemetry.debug_protocol import MemoryReply, SampleReply, memory_rows
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.tracebacks import is_user_code

WIDTH, ROW = 900, 18
LEAST_SHARE = 0.003
"""Frames with a smaller share of the time than this are left out of the flame graph."""
DIFFERENT_SHARE = 0.1
"""A frame whose share of the time differs by at least this much among the ranks is drawn in another colour."""
MAX_LINES = 15
MAX_DRAWN_DEPTH = 60
STRONG_SHARE = 0.5
"""A frame whose share differs by at least this much has the strongest colour."""
# These colours are visible on both light and dark backgrounds, and dark text is legible on them.
_LIBRARY, _USER, _DIFFERENT = "#e0cda8", "#a9c9ea", "#e8694f"
_INK = "#1c1c1c"
_NARROW, _WIDE = frozenset("ijlrtfI.,:;'|!()[]· "), frozenset("mwMW@%")


@dataclass(frozen=True)
class LineTime:
    """The time spent in one line, including the library functions that it called.

    Attributes:
        place: The file and line, such as "Cell In[7], line 3".
        function: The function that contains the line.
        source: The text of the line, or "" if unknown.
        shares: For each rank, the share of the sampled time that was spent in the line, from 0 to 1.
    """

    place: str
    function: str
    source: str
    shares: Mapping[int, float]

    @property
    def share(self) -> float:
        """The mean share of all sampled ranks."""
        return sum(self.shares.values()) / max(1, len(self.shares))


@dataclass
class _Node:
    place: tuple[str, int, str]
    shares: dict[int, float] = field(default_factory=dict)
    children: dict[tuple[str, int, str], _Node] = field(default_factory=dict)


class Samples(DocumentView):
    """The sampled stacks of ranks. A cell whose last line is this object shows a flame graph and a table of lines.

    Args:
        replies: The reply of each rank, or the reason why there is none.
        name_place: A function that returns the location of a frame, such as "Cell In[7], line 12".

    Attributes:
        seconds: How many seconds each rank was sampled, by rank.
        missing: For each rank without samples, the reason.
    """

    def __init__(self, replies: Mapping[int, SampleReply | str], name_place: Callable[[FrameInfo], str]) -> None:
        self._name_place = name_place
        self._replies = {rank: reply for rank, reply in replies.items() if isinstance(reply, SampleReply)}
        self.missing = {rank: reply for rank, reply in replies.items() if isinstance(reply, str)}
        self.seconds = {rank: reply.seconds for rank, reply in self._replies.items()}

    def lines(self) -> list[LineTime]:
        """Return the lines of the user's code, sorted by time, longest first.

        The time of a stack is attributed to its innermost line outside installed libraries.
        """
        found: dict[tuple[str, int, str], dict[int, float]] = {}
        for rank, reply in self._replies.items():
            for weight, _, indices in reply.stacks:
                if not indices:
                    continue
                places = [_place(reply, index) for index in indices]
                place = next((each for each in reversed(places) if is_user_code(each[0])), places[-1])
                shares = found.setdefault(place, dict.fromkeys(self._replies, 0.0))
                shares[rank] += weight / reply.seconds
        lines = [
            LineTime(self._named(place), place[2], linecache.getline(place[0], place[1]).strip(), shares)
            for place, shares in found.items()
        ]
        return sorted(lines, key=lambda line: -line.share)

    def _named(self, place: tuple[str, int, str]) -> str:
        return self._name_place(FrameInfo(place[0], place[1], place[2], ""))

    # ---- as a document

    def document(self) -> Section:
        """Return a flame graph and the table of lines."""
        notes = Text(lines=tuple(f"{rank_names([rank])} was not sampled: {why}" for rank, why in self.missing.items()))
        if not self._replies:
            return Section(key="samples", nodes=(notes,))
        legend, graph = self._legend(), element("div", self.flame_graph(), style="overflow-x:auto")
        drawing = Drawing(html=join([legend, graph]), text=self._sampled())
        return Section(key="samples", nodes=(drawing, self._table(), notes))

    def _table(self) -> Table:
        """Return the table of lines. Each share is also drawn as a bar."""
        titles = ["line", "function", *(f"rank {rank}" for rank in self._replies), "code"]
        kinds = ["text", "text", *["number"] * len(self._replies), "code"]
        columns = [
            Column(title=title, kind=kind, numeric=kind == "number") for title, kind in zip(titles, kinds, strict=True)
        ]
        rows = []
        for line in self.lines()[:MAX_LINES]:
            shares = [Cell(text=f"{100 * share:.0f} %", meter=share) for share in line.shares.values()]
            rows.append(Row(cells=(line.place, line.function, *shares, line.source[:60])))
        return Table(key="lines", columns=tuple(columns), groups=(Group(rows=tuple(rows)),))

    def _sampled(self) -> str:
        seconds = max(self.seconds.values())
        return f"{rank_names(list(self._replies))} sampled for {seconds:.1f} s"

    def _legend(self) -> Markup:
        colours = [(_USER, "your code"), (_LIBRARY, "libraries")]
        if len(self._replies) > 1:
            colours.append((_DIFFERENT, "its share differs among ranks: the redder, the more"))
        entries = [
            join([element("span", style=f"{_SWATCH};background:{colour}"), element("span", text)])
            for colour, text in colours
        ]
        return element("p", *(element("span", part, style=_ENTRY) for part in (self._sampled(), *entries)))

    def flame_graph(self) -> Markup:
        """Return a flame graph as SVG, with callers on top. The width of a bar is the mean share of the ranks.

        Bars of the user's code are blue with bold text, and bars of libraries are brown. If the share differs among the
        ranks by at least 10 % of the time, the bar is redder the more it differs. The callees of a frame are
        ordered by the lines of their calls. The title of each bar names its place and shares.
        """
        bars: list[Markup] = []
        depth = self._draw(self._tree(), 0.0, 0, bars)
        height = ROW * max(1, depth)
        return element(
            "svg",
            *bars,
            viewBox=f"0 0 {WIDTH} {height}",
            style=f"width:100%;min-width:{WIDTH - 200}px;max-width:{WIDTH}px;font:11px sans-serif;display:block",
            role="img",
            aria_label="Flame graph: where the time of the ranks went",
        )

    def _tree(self) -> dict[tuple[str, int, str], _Node]:
        roots: dict[tuple[str, int, str], _Node] = {}
        for rank, reply in self._replies.items():
            for weight, _, indices in reply.stacks:
                level = roots
                for index in indices[:MAX_DRAWN_DEPTH]:
                    place = _place(reply, index)
                    node = level.setdefault(place, _Node(place, dict.fromkeys(self._replies, 0.0)))
                    node.shares[rank] += weight / reply.seconds
                    level = node.children
        return roots

    def _draw(self, level: Mapping[tuple[str, int, str], _Node], left: float, depth: int, bars: list[Markup]) -> int:
        """Add the bars of a level and of all levels below it, and return the depth of the lowest level."""
        deepest = depth
        for node in sorted(level.values(), key=lambda node: node.place):
            share = sum(node.shares.values()) / len(self._replies)
            if share < LEAST_SHARE:
                continue
            bars.append(self._bar(node, left, share, depth))
            deepest = max(deepest, self._draw(node.children, left, depth + 1, bars), depth + 1)
            left += share
        return deepest

    def _bar(self, node: _Node, left: float, share: float, depth: int) -> Markup:
        x, y, width = WIDTH * left, ROW * depth, WIDTH * share
        user = is_user_code(node.place[0])
        most, least = (choose(node.shares, key=lambda rank: node.shares[rank]) for choose in (max, min))
        difference = node.shares[most] - node.shares[least]
        colour = _colour(_USER if user else _LIBRARY, difference)
        shares = ", ".join(f"rank {rank}: {100 * each:.0f} %" for rank, each in node.shares.items())
        named = self._named(node.place)
        source = linecache.getline(node.place[0], node.place[1]).strip()
        title = element("title", "\n".join(filter(None, [f"{node.place[2]} · {named}", source, shares])))
        rectangle = element("rect", title, x=f"{x:.1f}", y=y, width=f"{max(0.5, width - 0.5):.1f}", height=ROW - 1,
                            fill=colour)  # fmt: skip
        function = node.place[2].replace("<locals>.", "")
        text = f"{function} · {named}" if user else function
        if difference >= DIFFERENT_SHARE:
            text += (
                f" · {100 * node.shares[most]:.0f} % of rank {most}, {100 * node.shares[least]:.0f} % of rank {least}"
            )
        shown = _fitted(text, width - 8, 1.08 if user else 1.0)
        if not shown:
            return rectangle
        weight = 600 if user else None
        return join([rectangle, svg_text(x + 4, y + 12.5, shown, _INK, font_weight=weight, pointer_events="none")])


_SWATCH = "display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px"
_ENTRY = "margin-right:16px;white-space:nowrap"


def _colour(base: str, difference: float) -> str:
    """Return the colour of a bar. The more the shares differ, the redder it is."""
    if difference < DIFFERENT_SHARE:
        return base
    part = 0.3 + 0.7 * min(1.0, (difference - DIFFERENT_SHARE) / (STRONG_SHARE - DIFFERENT_SHARE))
    pairs = [(int(base[at : at + 2], 16), int(_DIFFERENT[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(low + part * (high - low)):02x}" for low, high in pairs)


def _fitted(text: str, room: float, scale: float) -> str:
    """Shorten 11 px ``text`` to ``room`` pixels. Return "" if fewer than three letters would be left."""
    width = 0.0
    for place, letter in enumerate(text):
        width += scale * (3.6 if letter in _NARROW else 9.6 if letter in _WIDE else 6.7)
        if width > room:
            kept = text[: max(0, place - 2)]
            return f"{kept}…" if len(kept) >= 3 else ""
    return text


def _place(reply: SampleReply, index: int) -> tuple[str, int, str]:
    filename, line, function = reply.frames[index]
    return filename, line, function


# ``RunMemory`` shows the contents of the ranks' memory, and what else would fit into it.

MAX_ROWS = 12
_ESTIMATED = {
    "weights": "parameters", "gradients": "gradients", "optimizer": "optimizer state",
    "activations": "activations at the peak",
}  # fmt: skip


class RunMemory(DocumentView):
    """The contents of the ranks' memory. A cell whose last line is this object shows them as tables.

    Args:
        replies: The report of each rank, or the reason why there is none.
        profile: The profile of a step with its allocations, or None.
        estimate: The result of ``estimate_memory`` to compare with, or None.
        world: The number of ranks that share the memory of this machine.
        where: A function that returns the location of a frame.

    Attributes:
        reports: The report of each rank.
        missing: For each rank without a report, the reason.
        peaks: The allocations at the peak of a step, by rank.
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
        """Return how many bytes each kind of content takes on a rank.

        Args:
            rank: The rank's global index.

        Raises:
            KeyError: There is no report from this rank. The reason is in ``missing``.
        """
        return dict(memory_rows(self.reports[rank]))

    def fits(self) -> list[str]:
        """Return sentences about what else would fit into memory, or an empty list if no step was recorded."""
        found: list[str] = []
        for rank, report in self.reports.items():
            parts = self.bytes(rank)
            devices = [each["total"] for each in report["devices"].values()]
            capacity = devices[0] if devices else machine_memory()[0] // self._world
            for sentence in what_fits(parts, capacity, self._world):
                if sentence not in found:
                    found.append(sentence)
        return found

    def document(self) -> Section:
        """Return sentences about what else would fit, and tables of parts, modules, variables and lines."""
        tables = (self._part_table(), self._module_table(), self._variable_table(), self._line_table())
        return Section(key="memory", nodes=(Text(lines=tuple(self._sentences())), *tables))

    def _part_table(self) -> Table:
        ranks = list(self.reports)
        columns = {rank: self.bytes(rank) for rank in ranks}
        names = list(dict.fromkeys(name for parts in columns.values() for name in parts))
        title, estimated = self._compared()
        head = ["bytes of", *(f"rank {rank}" for rank in ranks), *([title] if estimated else [])]
        rows = [head]
        for name in names:
            cells = [size_text(columns[rank][name]) if name in columns[rank] else "–" for rank in ranks]
            last = [size_text(estimated[name]) if name in estimated else "–"] if estimated else []
            rows.append([name, *cells, *last])
        return table_of("parts", rows)

    def _compared(self) -> tuple[str, dict[str, int]]:
        """Return the title and the bytes for the last column.

        The bytes come from the estimate, if there is one, or else from the ranks. If the ranks expect different numbers
        of bytes, because they hold different parts of a model, the column is left out.
        """
        if self._estimate:
            known = {_ESTIMATED[name]: nbytes for name, nbytes in self._estimate.items() if name in _ESTIMATED}
            return "estimated", known
        expected = [dict(report.get("expected", {})) for report in self.reports.values()]
        return "expected", expected[0] if expected and all(each == expected[0] for each in expected) else {}

    def _module_table(self) -> Table:
        rows = [["module", "rank", "parameters", "gradients", "optimizer state"]]
        for rank, report in list(self.reports.items())[:1]:
            rows += [[row[0], str(rank), *map(size_text, row[1:])] for row in report["modules"][:MAX_ROWS]]
        return table_of("modules", rows)

    def _variable_table(self) -> Table:
        rows = [["variable", "rank", "function", "bytes"]]
        for rank, report in self.reports.items():
            rows += [
                [name, str(rank), function, size_text(nbytes)] for name, function, nbytes in report["variables"][:5]
            ]
        return table_of("variables", rows)

    def _line_table(self) -> Table:
        rows = [["line", "rank", "bytes", "code"]]
        for rank, peak in self.peaks.items():
            rows += [[line.place, str(rank), size_text(nbytes), line.source[:60]] for line, nbytes in peak.lines[:5]]
        for rank, report in self.reports.items():
            for name, number, nbytes in report["lines"][:5]:
                rows.append(
                    [self._where(FrameInfo(name, number, "", "")), str(rank), size_text(nbytes), "Python's own"]
                )
        return table_of("lines", rows, code=True)

    def _sentences(self) -> list[str]:
        return [
            *self.fits(),
            *(f"rank {rank} was not inspected: {why}" for rank, why in self.missing.items()),
            *(f"the activations of rank {rank} are not known: {why}" for rank, why in self._without_step.items()),
        ]
