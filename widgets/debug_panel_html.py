"""The parts of the debug panel as HTML and as text; every word that came from elsewhere is escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from notebook_accelerate.debug.session import Stacks
from notebook_accelerate.launch.report.node_summary import MANY
from notebook_accelerate.launch.report.rank_rows import short_names
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.widgets.run_panel_html import state
from notebook_accelerate.widgets.run_summary import duration

if TYPE_CHECKING:
    from notebook_accelerate.debug.diagnosis import Diagnosis, RankPlace
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.run import RankInfo

MAX_HISTORY = 50
"""Questions and answers that are kept."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CODE = ' style="font-family:monospace;white-space:pre-wrap;margin:4px 0"'


@dataclass(frozen=True)
class Entry:
    """A line that was typed and what came back.

    Attributes:
        kind: "ask" or "cast".
        line: What was typed.
        answers: By rank, as they look.
    """

    kind: str
    line: str
    answers: Mapping[int, str]

    @property
    def text(self) -> str:
        """The entry as plain text; equal answers stand once."""
        rows = [f"  {who}: {answer}" for who, answer in self.folded()]
        return "\n".join([f"{self.kind}> {self.line}", *rows])

    def folded(self) -> list[tuple[str, str]]:
        """Return the answers, each with the ranks that gave it."""
        found: dict[str, list[int]] = {}
        for rank, answer in self.answers.items():
            found.setdefault(_COLOURS.sub("", answer).rstrip(), []).append(rank)
        return [(rank_names(ranks), answer) for answer, ranks in found.items()]


def stacks_of(found: Diagnosis) -> Stacks:
    """Return the stacks that a diagnosis has seen."""
    return Stacks({place.rank: place.frames for place in found.places if place.frames}, found.name_place)


def place_text(place: RankPlace | None, found: Diagnosis | None) -> str:
    """Return where a rank was seen; "" where nobody has looked."""
    return found.line_of(place.rank) if place is not None and found is not None else ""


def ranks_html(run: Run, found: Diagnosis | None, stopped: Sequence[int], now: float) -> str:
    """Return the table of ranks: state, and the place where each was seen last."""
    places = {place.rank: place for place in found.places} if found is not None else {}
    seen = f" ({duration(max(0.0, now - found.time))} ago)" if found is not None else ""
    if len(run.ranks) > MANY:
        return _many_html(run, found, stopped, f"Place{seen}")
    rows = []
    for info in run.ranks:
        where = escape(place_text(places.get(info.rank), found)) or '<span class="na-muted">not looked at yet</span>'
        mark = ' <span class="na-muted">at a breakpoint</span>' if info.rank in stopped else ""
        step = "–" if info.last_step is None else f"{info.last_step:,}"
        cells = f"<th scope='row'>{info.rank}</th><td>{state(info.state)}{mark}</td><td>{step}</td><td>{where}</td>"
        rows.append(f"<tr>{cells}</tr>")
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Rank", "State", "Step", f"Place{seen}"))
    return f'<table class="na-table"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _many_html(run: Run, found: Diagnosis | None, stopped: Sequence[int], place: str) -> str:
    """Return the table of many ranks: those that are at one place in a row, the smallest groups first."""
    places = {place.rank: place for place in found.places} if found is not None else {}
    groups: dict[tuple[str, bool, str], list[RankInfo]] = {}
    for info in run.ranks:
        where = place_text(places.get(info.rank), found)
        groups.setdefault((info.state, info.rank in stopped, where), []).append(info)
    rows = []
    for (status, held, where), members in sorted(groups.items(), key=lambda group: len(group[1])):
        steps = sorted({info.last_step for info in members if info.last_step is not None})
        step = "–".join(dict.fromkeys(f"{steps[end]:,}" for end in (0, -1))) if steps else "–"
        mark = ' <span class="na-muted">at a breakpoint</span>' if held else ""
        spot = escape(where) or '<span class="na-muted">not looked at yet</span>'
        who = escape(short_names(info.rank for info in members))
        rows.append(
            f"<tr><th scope='row'>{who}</th><td>{len(members):,}</td><td>{state(status)}{mark}</td><td>{step}</td>"
            f"<td>{spot}</td></tr>"
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("Ranks", "How many", "State", "Step", place))
    return f'<table class="na-table"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def verdict_html(run: Run, found: Diagnosis | None) -> str:
    """Return the verdict, and the warnings of the usual mistakes."""
    sentence = f"<strong>{escape(found.verdict)}</strong>" if found is not None else ""
    said = f'<p class="na-verdict" role="status">{sentence}</p>' if sentence else ""
    return said + "".join(f'<p class="na-problem">⚠ {escape(text)}</p>' for text in run.warnings)


def stacks_html(found: Diagnosis | None) -> str:
    """Return the stacks, equal ones once, folded until somebody wants them."""
    if found is None or not (stacks := stacks_of(found)):
        return ""
    return f"<details class='na-plain'><summary>Stacks</summary><pre{_CODE}>{escape(repr(stacks))}</pre></details>"


def history_html(entries: Sequence[Entry]) -> str:
    """Return questions and answers, the newest first."""
    blocks = []
    for entry in reversed(entries):
        answers = "\n".join(f"{who}: {answer}" for who, answer in entry.folded())
        line = f"<b>{escape(entry.kind)}&gt; {escape(entry.line)}</b>"
        blocks.append(f"<div class='na-entry'><pre{_CODE}>{line}\n{escape(answers)}</pre></div>")
    return f'<div role="log" aria-label="Questions and answers">{"".join(blocks)}</div>' if blocks else ""


def text(run: Run, found: Diagnosis | None, entries: Sequence[Entry]) -> str:
    """Return the whole panel as plain text."""
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


__all__ = [
    "MAX_HISTORY",
    "Entry",
    "history_html",
    "place_text",
    "ranks_html",
    "stacks_html",
    "stacks_of",
    "text",
    "verdict_html",
]
