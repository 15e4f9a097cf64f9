"""Memory before a run: what each part needs, and which module is on which device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Protocol

import ipywidgets

_COLOURS = {
    "weights": "#4269d0",
    "gradients": "#efb118",
    "optimizer": "#ff725c",
    "activations": "#6cc5b0",
    "buffers": "#9c6b4e",
    "strategy": "#9498a0",
}
_OFFLOADED = "repeating-linear-gradient(45deg, #b4b8bf 0 4px, #d0d3d8 4px 8px)"
_WIDTH = 720
"""Pixels: the widest that bars become."""
_BOX = f"font:13px sans-serif;max-width:{_WIDTH}px"
_TRACK = "position:relative;white-space:nowrap;font-size:0;background:rgba(128,128,128,.15)"
_NOTES = "margin:4px 0 12px;padding-left:18px;opacity:.75"
_UNITS = ("B", "KB", "MB", "GB", "TB")


class Estimate(Protocol):
    """What `estimate_memory` gives."""

    training: dict[str, int]
    inference: dict[str, int]
    assumptions: tuple[str, ...]
    main_memory: dict[str, int]


class Placed(Protocol):
    """A device map with sizes, as `big_modeling.estimate.placed` gives it."""

    blocks: Sequence[Any]
    limits: Mapping[str, int]
    moves: int


def human(size: float) -> str:
    """Write a number of bytes for people."""
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"


def estimate_html(estimate: Estimate, available: int | None = None) -> str:
    """Draw an estimate as two bars with a legend; a form that stays in a saved notebook.

    Args:
        estimate: The bytes by part.
        available: Bytes of the device; None: not known, and nothing is compared.
    """
    longest = max(sum(estimate.training.values()), sum(estimate.inference.values()), available or 0, 1)
    longest = max(longest, sum(estimate.main_memory.values()))
    rows = "".join(
        _bar(what, parts, longest, available)
        for what, parts in (("training", estimate.training), ("inference", estimate.inference))
    )
    if estimate.main_memory:
        rows += _bar("training, in main memory", estimate.main_memory, longest, None)
    notes = "".join(f"<li>{escape(line)}</li>" for line in estimate.assumptions)
    return f'<div class="na-memory" style="{_BOX}">{rows}<ul style="{_NOTES}">{notes}</ul></div>'


def _bar(what: str, parts: Mapping[str, int], longest: int, available: int | None) -> str:
    total = sum(parts.values())
    pieces = "".join(
        f'<span title="{escape(name)}: {human(size)}" style="display:inline-block;height:18px;'
        f'width:{100 * size / longest:.2f}%;background:{_colour(name)}"></span>'
        for name, size in parts.items()
        if size
    )
    words = ", ".join(f"{escape(name)} {human(size)}" for name, size in parts.items() if size)
    verdict = mark = ""
    if available is not None:
        fits = "fits" if total <= available else f"<b>does not fit</b>: {human(total - available)} too much"
        verdict = f" – {fits} in {human(available)}"
        mark = _mark(available, longest)
    return (
        f'<p style="margin:8px 0 4px"><b>{what}: {human(total)} per rank</b>{verdict}</p>'
        f'<div style="{_TRACK}" role="img" aria-label="{words}">{pieces}{mark}</div>{_legend(parts)}'
    )


def _colour(name: str) -> str:
    return _COLOURS.get(name, "#97bbf5")


def _legend(parts: Mapping[str, int]) -> str:
    entries = "".join(
        f'<span style="margin-right:14px;white-space:nowrap"><span style="display:inline-block;width:10px;height:10px;'
        f'margin-right:5px;background:{_colour(name)}"></span>{escape(name)} {human(size)}</span>'
        for name, size in parts.items()
        if size
    )
    return f'<p style="margin:4px 0 12px">{entries}</p>'


def _mark(limit: int, longest: int) -> str:
    """Return a line where a limit is."""
    return (
        f'<span title="{human(limit)}" style="position:absolute;top:-4px;bottom:-4px;width:2px;'
        f'left:calc({100 * limit / longest:.2f}% - 1px);background:currentColor"></span>'
    )


def device_map_html(placed: Placed) -> str:
    """Draw a device map: modules as blocks on their devices, as wide as they are large; hatched where they move.

    Args:
        placed: The map with sizes.
    """
    devices = list(dict.fromkeys(block.device for block in placed.blocks))
    totals = {device: sum(b.size for b in placed.blocks if b.device == device) for device in devices}
    longest = max([*totals.values(), *placed.limits.values(), 1])
    rows = "".join(_device_row(device, totals[device], longest, placed) for device in devices)
    swatch = (
        f'<span style="display:inline-block;width:22px;height:10px;margin-right:5px;background:{_OFFLOADED}"></span>'
    )
    moves = f"{swatch}{human(placed.moves)} move to the computing device on each forward"
    moves = moves if placed.moves else "Nothing moves."
    return f'<div class="na-memory" style="{_BOX}">{rows}<p style="margin:4px 0">{moves}</p></div>'


def _device_row(device: str, total: int, longest: int, placed: Placed) -> str:
    blocks = [block for block in placed.blocks if block.device == device]
    pieces = "".join(_piece(block, 100 * block.size / longest) for block in blocks)
    limit = placed.limits.get(device)
    words = human(total) if limit is None else f"{human(total)} of {human(limit)}"
    over = " – <b>more than it holds</b>" if limit is not None and total > limit else ""
    count = f", {len(blocks)} module{'s' * (len(blocks) != 1)}"
    names = escape(", ".join(f"{block.name or 'the whole model'} {human(block.size)}" for block in blocks))
    mark = _mark(limit, longest) if limit is not None else ""
    title = escape(f"device {device}" if device.isdigit() else device)
    return (
        f'<p style="margin:8px 0 4px"><b>{title}</b>: {words}{count}{over}</p>'
        f'<div style="{_TRACK}" role="img" aria-label="{names}">{pieces}{mark}</div>'
    )


def _piece(block: Any, percent: float) -> str:
    """Return a module's block, with its name where there is room for it."""
    name = block.name or "the whole model"
    room = percent / 100 * _WIDTH - 6
    label = escape(name) if len(name) * 7 <= room else ""
    colours = f"background:{_OFFLOADED};color:#222" if block.moves else f"background:{_COLOURS['weights']};color:#fff"
    return (
        f'<span title="{escape(name)}: {human(block.size)}" style="display:inline-block;box-sizing:border-box;'
        f"height:22px;line-height:22px;vertical-align:top;overflow:hidden;text-align:center;font-size:11px;"
        f'border-right:1px solid #fff;width:{percent:.2f}%;{colours}">{label}</span>'
    )


class MemoryPanel:
    """Shows an estimate, and a device map where there is one.

    Args:
        estimate: The bytes by part.
        placed: The device map with sizes.
        available: Bytes of the device.
    """

    def __init__(self, estimate: Estimate, placed: Placed | None = None, available: int | None = None) -> None:
        self.estimate, self.placed, self.available = estimate, placed, available
        self.widget = ipywidgets.HTML(self.html())

    def html(self) -> str:
        """Return the static form."""
        drawing = device_map_html(self.placed) if self.placed is not None else ""
        return estimate_html(self.estimate, self.available) + drawing

    def text(self) -> str:
        """Return the plain-text form."""
        return "\n".join(str(part) for part in (self.estimate, self.placed) if part is not None)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.text()}
