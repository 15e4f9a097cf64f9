"""What is sharded where: the ranks' own words put together, as the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.sharding_events import KINDS, ShardReport, ShardSizes

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run

Ranks = Mapping[int, ShardReport]

CAPTION = "What is sharded where"
MAX_GROUPS = 6
"""More kinds of ranks than this are put together, and their bytes shown from the smallest to the largest."""


def holdings_of(run: Run) -> Ranks:
    """Return what the ranks of a run's latest attempt hold, as far as they have told.

    Args:
        run: The run.
    """
    told = run.store.holdings.copy()
    return {info.rank: told[info.rank] for info in run.ranks if info.rank in told}


@dataclass(frozen=True)
class Group:
    """Ranks that hold the same.

    Attributes:
        ranks: Their numbers.
        holdings: What each of them holds.
    """

    ranks: list[int]
    holdings: list[ShardReport]

    @property
    def first(self) -> ShardReport:
        """What one of them holds."""
        return self.holdings[0]

    def name(self, everybody: int) -> str:
        """Return who they are, as "ranks 0–3 (pp 0)".

        Args:
            everybody: How many ranks there are.
        """
        stages = {one.place.get(one.stages, -1) for one in self.holdings if one.stages}
        stage = f" ({self.first.stages} {stages.pop()})" if len(stages) == 1 else ""
        return f"{'each rank' if 1 < everybody == len(self.ranks) else rank_names(self.ranks)}{stage}"


def _layout(one: ShardReport) -> tuple[object, ...]:
    how = tuple((kind, held.sharded, held.offloaded, held.note) for kind, held in one.held.items())
    return one.strategy, one.variant, tuple(one.axes.items()), how


def _with_stage(one: ShardReport) -> tuple[object, ...]:
    return (*_layout(one), one.place.get(one.stages), one.units, one.unit)


def _exactly(one: ShardReport) -> tuple[object, ...]:
    return (*_with_stage(one), *((held.whole, held.here) for held in one.held.values()))


_ALIKE: tuple[Callable[[ShardReport], tuple[object, ...]], ...] = (_exactly, _with_stage, _layout)


def groups(ranks: Ranks) -> list[Group]:
    """Return the ranks, those together that hold the same; where that is too many, those that share in the same way.

    Args:
        ranks: What each rank holds.
    """
    found: list[Group] = []
    for key in _ALIKE:
        members: dict[tuple[object, ...], list[int]] = {}
        for rank in sorted(ranks):
            members.setdefault(key(ranks[rank]), []).append(rank)
        found = [Group(those, [ranks[rank] for rank in those]) for those in members.values()]
        if len(found) <= MAX_GROUPS:
            break
    return found


def sentence(ranks: Ranks) -> str:
    """Return strategy, mesh and units in a line; "" where no rank has told anything.

    Args:
        ranks: What each rank holds.
    """
    if not ranks:
        return ""
    one = ranks[min(ranks)]
    parts = [" ".join(part for part in (one.strategy, one.variant) if part)]
    parts.append(" × ".join(f"{name} {size}" for name, size in one.axes.items()) or "one rank has everything")
    units = sorted({holdings.units for holdings in ranks.values()})
    if units[0] < units[-1]:
        parts.append(f"{units[0]}–{units[-1]} {one.unit}")
    elif units[-1]:
        name = one.unit.replace("units", "unit").replace("layers", "layer") if units[-1] == 1 else one.unit
        parts.append(f"{units[-1]} {name}")
    return " · ".join(parts)


# ---- the table


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        who: Which ranks; "" where it is those of the line above.
        what: parameters, gradients, optimizer state, or together.
        whole: Bytes of the whole, as text.
        here: Bytes of each of these ranks, as text.
        share: What part of the whole that is, from 0 to 1; None: not known.
        how: Over which axes it is sharded, where it rests.
    """

    who: str
    what: str
    whole: str
    here: str
    share: float | None
    how: str


def table(ranks: Ranks) -> list[Row]:
    """Return the table's lines, three for each group of ranks and one for their sum.

    Args:
        ranks: What each rank holds.
    """
    return [row for group in groups(ranks) for row in _rows(group, len(ranks))]


def _rows(group: Group, everybody: int) -> list[Row]:
    kinds = [kind for kind in KINDS if all(kind in one.held for one in group.holdings)]
    rows = []
    for kind in kinds:
        held = [one.held[kind] for one in group.holdings]
        rows.append(_row(kind, [[one] for one in held], _how(held[0], group.first)))
    together = [[one.held[kind] for kind in kinds] for one in group.holdings]
    rows.append(_row("together", together, ""))
    return [row._replace(who="" if index else group.name(everybody)) for index, row in enumerate(rows)]


def _row(what: str, held: Sequence[Sequence[ShardSizes]], how: str) -> Row:
    whole = [total(one.whole for one in parts) for parts in held]
    here = [total(one.here for one in parts) for parts in held]
    shares = [mine / of for mine, of in zip(here, whole, strict=True) if mine is not None and of]
    share = sum(shares) / len(shares) if shares and len(shares) == len(held) else None
    return Row("", what, _range(whole), _range(here), share, how)


def total(parts: Iterable[int | None]) -> int | None:
    """Return a sum of bytes; None where one of them is not known.

    Args:
        parts: Bytes.
    """
    known = list(parts)
    return None if None in known else sum(part or 0 for part in known)


def _range(counts: Sequence[int | None]) -> str:
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return "–"
    low, high = amount(min(known)), amount(max(known))
    return high if low == high else f"{low} – {high}"


def _how(held: ShardSizes, one: ShardReport) -> str:
    along = [name for name in one.axes if name not in held.sharded and name != one.stages]
    parts = [f"sharded over {_and(held.sharded)}"] if held.sharded else []
    parts += [f"{'the same' if held.sharded else 'whole'} along {_and(along)}"] if along else []
    parts += [f"layers over {one.stages}"] if one.stages else []
    parts += [held.note] if held.note else []
    parts += [f"rests in {_PLACES.get(held.offloaded, held.offloaded)}"] if held.offloaded else []
    return ", ".join(parts)


_PLACES = {"cpu": "main memory (cpu)", "nvme": "files (nvme)"}


def _and(names: Sequence[str]) -> str:
    return " × ".join(names)


def amount(count: int) -> str:
    """Return bytes as "312 B", "2.6 KiB" or "3.4 GiB".

    Args:
        count: Bytes.
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:,.0f} {unit}" if size >= 100 else f"{size:.1f} {unit}"


def percent(share: float | None) -> str:
    """Return a share as "50 %"; "" where it is not known.

    Args:
        share: From 0 to 1, more with padding.
    """
    if share is None:
        return ""
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"


def report_rows(ranks: Ranks) -> list[list[str]]:
    """Return the table as rows of text, the head first; the head alone where nobody has told anything.

    Args:
        ranks: What each rank holds.
    """
    rows = [["ranks", "what", "whole", "each rank", "share", "how"]]
    rows += [[row.who, row.what, row.whole, row.here, percent(row.share), row.how] for row in table(ranks)]
    return rows


__all__ = [
    "CAPTION",
    "Group",
    "Ranks",
    "Row",
    "amount",
    "groups",
    "holdings_of",
    "percent",
    "report_rows",
    "sentence",
    "table",
    "total",
]
