"""Building blocks of reports and panels: HTML elements with escaped texts, SVG drawings, and numbers as text."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from functools import cache
from html import escape


class Markup(str):
    """A piece of HTML or SVG source, which `element` does not escape."""

    __slots__ = ()


_VOID = frozenset({"img", "input"})


def element(name: str, /, *content: str, **attributes: object) -> Markup:
    """Return an element. Strings are escaped, and `Markup` is inserted unchanged.

    Args:
        name: The element's name.
        content: The texts and elements inside the element.
        attributes: The values of attributes, by name. ``aria_label`` is written as ``aria-label``, and ``class_`` as
            ``class``. Floats are rounded to two decimals. None and False omit the attribute, and True writes only the
            name.
    """
    head = start_tag(name, **attributes)
    return Markup(f"{head[:-1]} />" if name in _VOID else f"{head}{join(content)}</{name}>")


def start_tag(name: str, /, **attributes: object) -> Markup:
    """Return the start tag of an element; see `element`."""
    head = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        head += f" {_attribute_name(key)}"
        if value is not True:
            text = f"{round(value, 2):g}" if isinstance(value, float) else str(value)
            head += f'="{escape(text)}"'
    return Markup(f"<{head}>")


def join(content: Iterable[str], separator: str = "") -> Markup:
    """Join texts and elements into one piece of markup.

    Args:
        content: Strings, which are escaped, and `Markup`.
        separator: The markup to insert between them.
    """
    return Markup(separator.join([part if isinstance(part, Markup) else escape(part) for part in content]))


@cache
def _attribute_name(key: str) -> str:
    return key.removesuffix("_").replace("_", "-")


# ---- drawings

FONT = "system-ui, -apple-system, Segoe UI, sans-serif"


def svg_drawing(width: int, height: int, *content: str) -> Markup:
    """Return an SVG drawing.

    Args:
        width: Width in pixels.
        height: Height in pixels.
        content: The elements of the drawing.
    """
    view = f"0 0 {width} {height}"
    attributes = {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "width": width, "height": height}
    return element("svg", *content, **attributes, viewBox=view, font_family=FONT, font_size=11)


def svg_text(x: float, y: float, text: str, fill: str, anchor: str = "start", **attributes: object) -> Markup:
    """Return a ``text`` element for an SVG drawing. Characters that XML does not allow are replaced by U+FFFD.

    Args:
        x: The distance from the left in pixels.
        y: The distance from the top to the baseline in pixels.
        text: The text to draw.
        fill: The colour of the text.
        anchor: The point of the text to put at ``x``: "start", "middle" or "end".
        attributes: More attributes of the element.
    """
    visible = "".join(character if character.isprintable() else "\ufffd" for character in text)
    return element("text", visible, x=float(x), y=float(y), text_anchor=anchor, fill=fill, **attributes)


def svg_image(drawing: str, width: int, height: int, alt: str) -> Markup:
    """Return an ``img`` element that contains a drawing as a data URI, and so needs no file, script or network.

    Args:
        drawing: The SVG source of the drawing.
        width: Width in pixels.
        height: Height in pixels.
        alt: The alternative text for readers who do not see the image.
    """
    data = base64.b64encode(drawing.encode()).decode()
    return element("img", alt=alt, width=width, height=height, src=f"data:image/svg+xml;base64,{data}")


# ---- numbers


def number(value: float, digits: int = 4) -> str:
    """Return a number without trailing zeros.

    Args:
        value: The number, which may be NaN or infinite.
        digits: Maximum number of significant digits.
    """
    if 1e3 <= abs(value) < 1e6:
        whole, _, rest = f"{value:,.{max(0, digits - len(str(int(abs(value)))))}f}".partition(".")
        return f"{whole}.{rest}".rstrip("0").rstrip(".") if rest else whole
    if 1e-3 <= abs(value) < 1e6 or value == 0:
        return f"{value:.{digits}g}"
    if not math.isfinite(value):
        return str(float(value))
    mantissa, _, exponent = f"{value:.{digits - 2}e}".partition("e")
    return f"{float(mantissa):.{digits}g}e{int(exponent)}"


def percent(share: float | None) -> str:
    """Return a share as text, such as "50 %", with two significant digits below 10 %. Return "" for None.

    Args:
        share: The share from 0 to 1, or None if unknown. With padding, it may be larger than 1.
    """
    if share is None:
        return ""
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.2g} %"


def duration(seconds: float) -> str:
    """Return a duration as text, such as "4.2 s", "1:05" or "26:00:05"."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
