"""The parts of the debug panel as HTML and as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from notebook_accelerate.debugging.session import Stacks
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.report.node_summary import MANY
from notebook_accelerate.launch.report.rank_rows import short_names
from notebook_accelerate.launch.report.tables import html_table
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets.run_panel_html import state
from notebook_accelerate.widgets.run_summary import duration

if TYPE_CHECKING:
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.run import RankInfo

MAX_HISTORY = 50
"""Commands and replies that are kept."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CODE = "font-family:monospace;white-space:pre-wrap;margin:4px 0"
_NOT_INSPECTED = element("span", "not inspected yet", class_="na-muted")
_AT_BREAKPOINT = element("span", "at a breakpoint", class_="na-muted")


@dataclass(frozen=True)
class Entry:
    """A command and the replies to it.

    Attributes:
        kind: "ask", "cast", "pause" or "resume".
        line: The text of the command.
        answers: The replies as text, by rank.
    """

    kind: str
    line: str
    answers: Mapping[int, str]

    @property
    def text(self) -> str:
        """The entry as plain text; equal replies are listed once."""
        return "\n".join([f"{self.kind}> {self.line}", *(f"  {ranks}: {answer}" for ranks, answer in self.grouped())])

    def grouped(self) -> list[tuple[str, str]]:
        """Return each reply with the ranks that gave it."""
        found: dict[str, list[int]] = {}
        for rank, answer in self.answers.items():
            found.setdefault(_COLOURS.sub("", answer).rstrip(), []).append(rank)
        return [(rank_names(ranks), answer) for answer, ranks in found.items()]


def stacks_of(found: Diagnosis) -> Stacks:
    """Return the stacks in a diagnosis."""
    return Stacks({place.rank: place.frames for place in found.places if place.frames}, found.name_place)


def ranks_html(run: Run, found: Diagnosis | None, stopped: Sequence[int], now: float) -> Markup:
    """Return the table of ranks: state, step, and the location in the latest diagnosis.

    Of many ranks, those with the same state and location share a row, the smallest groups first.
    """
    inspected = {place.rank for place in found.places} if found is not None else set()
    many = len(run.ranks) > MANY
    groups: dict[tuple[str, bool, str, int | None], list[RankInfo]] = {}
    for info in run.ranks:
        location = found.line_of(info.rank) if found is not None and info.rank in inspected else ""
        key = (
            "paused" if info.rank in run.paused else info.state,
            info.rank in stopped,
            location,
            None if many else info.rank,
        )
        groups.setdefault(key, []).append(info)
    rows = []
    for (status, held, location, _), members in sorted(groups.items(), key=lambda group: len(group[1])):
        mark = state(status)
        names = short_names(info.rank for info in members)
        rows.append([
            names,
            *([f"{len(members):,}"] if many else []),
            join([mark, " ", _AT_BREAKPOINT]) if held else mark,
            _steps(members),
            location or _NOT_INSPECTED,
        ])  # fmt: skip
    age = f" ({duration(max(0.0, now - found.time))} ago)" if found is not None else ""
    titles = ["Ranks", "Count"] if many else ["Rank"]
    return html_table([*titles, "State", "Step", f"Location{age}"], rows, class_="na-table na-places")


def _steps(members: Sequence[RankInfo]) -> str:
    steps = [info.last_step for info in members if info.last_step is not None]
    return "–".join(dict.fromkeys(f"{step:,}" for step in (min(steps), max(steps)))) if steps else "–"


def verdict_html(run: Run, found: Diagnosis | None) -> Markup:
    """Return the verdict of the latest diagnosis, and the run's warnings."""
    parts = [element("p", f"⚠ {text}", class_="na-problem") for text in run.warnings]
    if found is not None and found.verdict:
        parts.insert(0, element("p", element("strong", found.verdict), class_="na-verdict", role="status"))
    return join(parts)


def stacks_html(found: Diagnosis | None) -> Markup:
    """Return the stacks behind a fold, equal ones once."""
    if found is None or not (stacks := stacks_of(found)):
        return Markup()
    return element(
        "details", element("summary", "Stacks"), element("pre", repr(stacks), style=_CODE), class_="na-plain"
    )


def history_html(entries: Sequence[Entry]) -> Markup:
    """Return commands and replies, the newest first."""
    blocks = []
    for entry in reversed(entries):
        answers = "\n".join(f"{ranks}: {answer}" for ranks, answer in entry.grouped())
        text = element("pre", element("b", f"{entry.kind}> {entry.line}"), f"\n{answers}", style=_CODE)
        blocks.append(element("div", text, class_="na-entry"))
    return element("div", *blocks, role="log", aria_label="Commands and replies") if blocks else Markup()


def panel_html(
    run: Run, found: Diagnosis | None, stopped: Sequence[int], entries: Sequence[Entry], now: float
) -> Markup:
    """Return the panel as static HTML."""
    parts = [head_html(run), verdict_html(run, found), ranks_html(run, found, stopped, now)]
    return element("div", *parts, stacks_html(found), history_html(entries), class_="na-run na-card")


def head_html(run: Run) -> Markup:
    """Return the title of the panel."""
    return element("div", element("strong", f"Ranks of run {run.id}"), class_="na-head")


def panel_text(run: Run, found: Diagnosis | None, entries: Sequence[Entry]) -> str:
    """Return the panel as plain text."""
    blocks = [f"run {run.id} ({run.function_name}): {run.status}"]
    blocks += [f"⚠ {warning}" for warning in run.warnings]
    if found is not None:
        blocks += [found.text, repr(stacks_of(found))]
    else:
        groups: dict[str, list[int]] = {}
        for info in run.ranks:
            groups.setdefault(info.state, []).append(info.rank)
        blocks.append("\n".join(f"{rank_names(ranks)}: {status}" for status, ranks in groups.items()))
    return "\n\n".join(block for block in [*blocks, *(entry.text for entry in entries)] if block)
