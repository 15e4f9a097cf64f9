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
_OFFLOADED = "repeating-linear-gradient(45deg, #9498a0 0 4px, #b9bcc2 4px 8px)"
_UNITS = ("B", "KB", "MB", "GB", "TB")


class Estimate(Protocol):
    """What `estimate_memory` gives."""

    training: dict[str, int]
    inference: dict[str, int]
    assumptions: tuple[str, ...]


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
    rows = "".join(
        _bar(what, parts, longest, available)
        for what, parts in (("training", estimate.training), ("inference", estimate.inference))
    )
    notes = "".join(f"<li>{escape(line)}</li>" for line in estimate.assumptions)
    return f'<div class="na-memory" style="font:13px sans-serif;max-width:720px">{rows}<ul>{notes}</ul></div>'


def _bar(what: str, parts: Mapping[str, int], longest: int, available: int | None) -> str:
    total = sum(parts.values())
    pieces = "".join(
        f'<span title="{escape(name)}: {human(size)}" style="display:inline-block;height:18px;'
        f'width:{100 * size / longest:.2f}%;background:{_COLOURS.get(name, "#97bbf5")}"></span>'
        for name, size in parts.items()
        if size
    )
    words = ", ".join(f"{escape(name)} {human(size)}" for name, size in parts.items() if size)
    verdict = ""
    if available is not None:
        fits = "fits" if total <= available else f"does not fit: {human(total - available)} too much"
        verdict = f" – {fits} in {human(available)}"
    return (
        f"<p style='margin:6px 0 2px'><b>{what}: {human(total)} per rank</b>{verdict}</p>"
        f'<div style="white-space:nowrap;font-size:0" role="img" aria-label="{words}">{pieces}</div>'
        f'<p style="margin:2px 0 8px">{words}</p>'
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
    return (
        f'<div class="na-memory" style="font:13px sans-serif;max-width:720px">{rows}'
        f"<p>{human(placed.moves)} move to the computing device on each forward (hatched).</p></div>"
    )


def _device_row(device: str, total: int, longest: int, placed: Placed) -> str:
    pieces = "".join(
        f'<span title="{escape(block.name or "the whole model")}: {human(block.size)}" '
        f'style="display:inline-block;box-sizing:border-box;height:22px;border-right:1px solid #fff;'
        f'width:{100 * block.size / longest:.2f}%;background:{_OFFLOADED if block.moves else _COLOURS["weights"]}">'
        "</span>"
        for block in placed.blocks
        if block.device == device
    )
    limit = placed.limits.get(device)
    words = human(total) if limit is None else f"{human(total)} of {human(limit)}"
    over = " – <b>more than it holds</b>" if limit is not None and total > limit else ""
    return (
        f'<p style="margin:6px 0 2px"><b>{escape(device)}</b>: {words}{over}</p>'
        f'<div style="white-space:nowrap;font-size:0">{pieces}</div>'
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
