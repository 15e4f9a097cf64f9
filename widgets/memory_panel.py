"""The estimated memory of a run by part, and the device of each module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ipywidgets

from notebook_accelerate.launch.report.markup import Markup, element, join

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
"""The longest bar, in pixels."""
_BOX = f"font:13px sans-serif;max-width:{_WIDTH}px"
_TRACK = "position:relative;white-space:nowrap;font-size:0;background:rgba(128,128,128,.15)"
_NOTES = "margin:4px 0 12px;padding-left:18px;opacity:.75"
_PIECE = "display:inline-block;height:18px"
_SWATCH = "display:inline-block;width:10px;height:10px;margin-right:5px"
_ENTRY = "margin-right:14px;white-space:nowrap"
_MARK = "position:absolute;top:-4px;bottom:-4px;width:2px;background:currentColor"
_BLOCK = (
    "display:inline-block;box-sizing:border-box;height:22px;line-height:22px;vertical-align:top;overflow:hidden;"
    "text-align:center;font-size:11px;border-right:1px solid #fff"
)
_UNITS = ("B", "KB", "MB", "GB", "TB")


class Estimate(Protocol):
    """The result of `estimate_memory`."""

    training: dict[str, int]
    inference: dict[str, int]
    assumptions: tuple[str, ...]
    main_memory: dict[str, int]


class SizedDeviceMap(Protocol):
    """A device map with sizes, as `big_modeling.estimate.placed` returns it."""

    blocks: Sequence[Any]
    limits: Mapping[str, int]
    moves: int


def human(size: float) -> str:
    """Return bytes as text, in decimal units."""
    for unit in _UNITS[:-1]:
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {_UNITS[-1]}"


def estimate_html(estimate: Estimate, available: int | None = None) -> Markup:
    """Return an estimate as two bars with a legend, for a saved notebook.

    Args:
        estimate: The bytes by part.
        available: Bytes of the device; None: no comparison.
    """
    bars = {"training": estimate.training, "inference": estimate.inference}
    limits = dict.fromkeys(bars, available)
    if estimate.main_memory:
        bars["training, in main memory"] = estimate.main_memory
    longest = max([*(sum(parts.values()) for parts in bars.values()), available or 0, 1])
    rows = [_bar(title, parts, longest, limits.get(title)) for title, parts in bars.items()]
    notes = element("ul", *(element("li", line) for line in estimate.assumptions), style=_NOTES)
    return element("div", *rows, notes, class_="na-memory", style=_BOX)


def _bar(title: str, parts: Mapping[str, int], longest: int, available: int | None) -> Markup:
    total = sum(parts.values())
    pieces, legend, label = [], [], []
    for name, size in parts.items():
        if not size:
            continue
        text, colour = f"{name} {human(size)}", f"background:{_COLOURS.get(name, '#97bbf5')}"
        width = f"width:{100 * size / longest:.2f}%"
        pieces.append(element("span", title=f"{name}: {human(size)}", style=f"{_PIECE};{width};{colour}"))
        legend.append(element("span", element("span", style=f"{_SWATCH};{colour}"), text, style=_ENTRY))
        label.append(text)
    verdict: list[str] = []
    if available is not None:
        too_much = [element("b", "does not fit"), f": {human(total - available)} too much"]
        verdict = [" – ", *(["fits"] if total <= available else too_much), f" in {human(available)}"]
    heading = [element("b", f"{title}: {human(total)} per rank"), *verdict]
    track = _track(heading, ", ".join(label), pieces, available, longest)
    return join([track, element("p", *legend, style="margin:4px 0 12px")])


def _track(heading: Sequence[str], label: str, pieces: Sequence[str], limit: int | None, longest: int) -> Markup:
    """Return a bar below its heading, with a line at the limit."""
    mark = Markup()
    if limit is not None:
        position = f"left:calc({100 * limit / longest:.2f}% - 1px)"
        mark = element("span", title=human(limit), style=f"{_MARK};{position}")
    bar = element("div", *pieces, mark, style=_TRACK, role="img", aria_label=label)
    return join([element("p", *heading, style="margin:8px 0 4px"), bar])


def device_map_html(placed: SizedDeviceMap) -> Markup:
    """Return a device map: modules as blocks on their devices, with widths by size; hatched if they move.

    Args:
        placed: The map with sizes.
    """
    devices = list(dict.fromkeys(block.device for block in placed.blocks))
    totals = {device: sum(b.size for b in placed.blocks if b.device == device) for device in devices}
    longest = max([*totals.values(), *placed.limits.values(), 1])
    rows = [_device_row(device, totals[device], longest, placed) for device in devices]
    swatch = element("span", style=f"{_SWATCH};width:22px;background:{_OFFLOADED}")
    moves = [swatch, f"{human(placed.moves)} move to the computing device on each forward"]
    note = element("p", *(moves if placed.moves else ["Nothing moves."]), style="margin:4px 0")
    return element("div", *rows, note, class_="na-memory", style=_BOX)


def _device_row(device: str, total: int, longest: int, placed: SizedDeviceMap) -> Markup:
    blocks = [block for block in placed.blocks if block.device == device]
    limit = placed.limits.get(device)
    size = human(total) if limit is None else f"{human(total)} of {human(limit)}"
    heading = [
        element("b", f"device {device}" if device.isdigit() else device),
        f": {size}, {len(blocks)} module{'s' * (len(blocks) != 1)}",
    ]
    if limit is not None and total > limit:
        heading += [" – ", element("b", "more than it holds")]
    label = ", ".join(f"{_module_name(block)} {human(block.size)}" for block in blocks)
    return _track(
        heading, label, [_module_block(block, 100 * block.size / longest) for block in blocks], limit, longest
    )


def _module_name(block: Any) -> str:
    return block.name or "the whole model"


def _module_block(block: Any, percent: float) -> Markup:
    """Return a module's block, with its name if there is room."""
    name = _module_name(block)
    room = percent / 100 * _WIDTH - 6
    colours = f"background:{_OFFLOADED};color:#222" if block.moves else f"background:{_COLOURS['weights']};color:#fff"
    style = f"{_BLOCK};width:{percent:.2f}%;{colours}"
    return element("span", name if len(name) * 7 <= room else "", title=f"{name}: {human(block.size)}", style=style)


class MemoryPanel:
    """Shows an estimate and, if given, a device map.

    Args:
        estimate: The bytes by part.
        placed: The device map with sizes.
        available: Bytes of the device.
    """

    def __init__(self, estimate: Estimate, placed: SizedDeviceMap | None = None, available: int | None = None) -> None:
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
