"""What ranks spent their time on while they were sampled: lines by time, and a flame graph over ranks."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.launch.report.markup import Markup, element, join, svg_text
from notebook_accelerate.launch.report.tables import LEFT, html_table, text_table
from notebook_accelerate.telemetry.debug_protocol import SampleReply
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.tracebacks import is_user_code

WIDTH, ROW = 900, 18
LEAST_SHARE = 0.003
"""Frames with a smaller share of the time are not drawn."""
DIFFERENT_SHARE = 0.1
"""A frame whose share differs by so much among ranks has another colour."""
MAX_LINES = 15
MAX_DRAWN_DEPTH = 60
_LETTER = 6.2  # pixels of a letter at 11 px
_EQUAL, _DIFFERENT, _USER = "#e3c08a", "#e58a72", "#a9c9ea"
_INK = "#1c1c1c"


@dataclass(frozen=True)
class LineTime:
    """The time of one line: that of the line itself, and of the functions of libraries that it called.

    Attributes:
        place: File and line, as "Cell In[7], line 3".
        function: Its function.
        source: The line's text; "" where it is not known.
        shares: By rank, its share of the time that the rank was sampled, from 0 to 1.
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


class Samples:
    """The stacks of ranks that were sampled; as the last line of a cell, a flame graph and the lines by time.

    Args:
        replies: The reply of each rank, or why there is none.
        name_place: Returns the location of a frame, as "Cell In[7], line 12".

    Attributes:
        seconds: By rank, how long it was sampled.
        missing: By rank, why there are no samples of it.
    """

    def __init__(self, replies: Mapping[int, SampleReply | str], name_place: Callable[[FrameInfo], str]) -> None:
        self._name_place = name_place
        self._replies = {rank: reply for rank, reply in replies.items() if isinstance(reply, SampleReply)}
        self.missing = {rank: reply for rank, reply in replies.items() if isinstance(reply, str)}
        self.seconds = {rank: reply.seconds for rank, reply in self._replies.items()}

    def lines(self) -> list[LineTime]:
        """Return the lines of the user's code by time, the longest first.

        The time of a stack counts for its innermost line outside installed libraries.
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

    # ---- as text and as HTML

    def _rows(self) -> list[list[str]]:
        ranks = list(self._replies)
        rows = [["line", "function", *(f"rank {rank}" for rank in ranks), "code"]]
        for line in self.lines()[:MAX_LINES]:
            shares = [f"{100 * line.shares[rank]:.0f} %" for rank in ranks]
            rows.append([line.place, line.function, *shares, line.source[:60]])
        return rows

    def _sampled(self) -> str:
        seconds = max(self.seconds.values())
        return f"{rank_names(list(self._replies))} sampled for {seconds:.1f} s"

    def _notes(self) -> list[str]:
        return [f"{rank_names([rank])} was not sampled: {why}" for rank, why in self.missing.items()]

    def __repr__(self) -> str:
        table = [self._sampled(), text_table(self._rows(), rule=True)] if self._replies else []
        return "\n".join([*table, *self._notes()])

    def _repr_html_(self) -> str:
        parts: list[str] = [element("p", note) for note in self._notes()]
        if self._replies:
            head, *rows = self._rows()
            columns = [LEFT, LEFT, *[{}] * (len(head) - 3), LEFT]
            legend = f"{self._sampled()} · blue: your code · brown: libraries · red: its share differs among ranks"
            parts = [
                element("p", legend),
                self.flame_graph(),
                *([html_table(head, rows, columns=columns)] if rows else []),
                *parts,
            ]
        return element("div", *parts, class_="notebook-accelerate-samples")

    def flame_graph(self) -> Markup:
        """Return a flame graph as SVG: a bar per frame, as wide as the ranks' mean share, callers above callees.

        Bars of the user's code are blue, those of libraries brown, and those whose share differs by 10 % of the time
        or more among ranks red; each tells its place and shares.
        """
        bars: list[Markup] = []
        depth = self._draw(self._tree(), 0.0, 0, bars)
        height = ROW * max(1, depth)
        return element(
            "svg",
            *bars,
            viewBox=f"0 0 {WIDTH} {height}",
            style=f"width:100%;max-width:{WIDTH}px;font:11px sans-serif;display:block",
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
        """Add the bars of a level and those below; return the depth of the lowest."""
        deepest = depth
        for node in level.values():
            share = sum(node.shares.values()) / len(self._replies)
            if share < LEAST_SHARE:
                continue
            bars.append(self._bar(node, left, share, depth))
            deepest = max(deepest, self._draw(node.children, left, depth + 1, bars), depth + 1)
            left += share
        return deepest

    def _bar(self, node: _Node, left: float, share: float, depth: int) -> Markup:
        x, y, width = WIDTH * left, ROW * depth, WIDTH * share
        differs = max(node.shares.values()) - min(node.shares.values()) >= DIFFERENT_SHARE
        colour = _DIFFERENT if differs else _USER if is_user_code(node.place[0]) else _EQUAL
        shares = ", ".join(f"rank {rank}: {100 * each:.0f} %" for rank, each in node.shares.items())
        named = self._named(node.place)
        source = linecache.getline(node.place[0], node.place[1]).strip()
        title = element("title", "\n".join(filter(None, [f"{node.place[2]} · {named}", source, shares])))
        rectangle = element("rect", title, x=f"{x:.1f}", y=y, width=f"{max(0.5, width - 0.5):.1f}", height=ROW - 1,
                            fill=colour)  # fmt: skip
        text = f"{node.place[2]} · {named}" if is_user_code(node.place[0]) else node.place[2]
        room = int((width - 6) / _LETTER)
        if room < 3:
            return rectangle
        shown = text if len(text) <= room else text[: room - 1] + "…"
        label = svg_text(x + 3, y + 12.5, shown, _INK, pointer_events="none")
        return join([rectangle, label])


def _place(reply: SampleReply, index: int) -> tuple[str, int, str]:
    filename, line, function = reply.frames[index]
    return filename, line, function


__all__ = ["LineTime", "Samples"]
