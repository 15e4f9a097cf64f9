"""Rendered HTML compared with files: ``snapshot("name", html)`` in a test. ``UPDATE_SNAPSHOTS=1`` writes the files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser
from pathlib import Path

_VARYING = (
    (re.compile(r"\brun \d+"), "run N"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d\b"), "DATE HH:MM"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "HH:MM:SS"),
    (re.compile(r"(data:image/svg\+xml;base64,)[\w+/=]+"), r"\1..."),
    (re.compile(r"<style>.*?</style>", re.DOTALL), "<style>...</style>"),
)
"""Parts that differ each time a view is rendered, or that other tests compare."""
Snapshot = Callable[[str, str], None]
"""The type of the fixture ``snapshot``, which compares HTML (its second argument) with the file named by the first."""
_VOID = frozenset({"br", "hr", "img", "input"})


def compare(file: Path, html: str) -> None:
    """Compare HTML with a snapshot that has one element per line, so that differences are readable.

    Args:
        file: The file of the snapshot.
        html: The rendered HTML.
    """
    for pattern, replacement in _VARYING:
        html = pattern.sub(replacement, html)
    shown = _Lines(html).text()
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown, encoding="utf-8")
    assert file.exists(), f"there is no snapshot {file}; write it with UPDATE_SNAPSHOTS=1, and read it"
    assert shown == file.read_text(encoding="utf-8"), (
        "if the change is intended, run with UPDATE_SNAPSHOTS=1 and read the diff"
    )


class _Lines(HTMLParser):
    """Formats one element per line, indented by depth. An element that contains only text ends on the same line."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self._lines: list[str] = []
        self._open: list[str] = []
        self._is_leaf = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = "".join(f" {name}" if value is None else f' {name}="{escape(value)}"' for name, value in attrs)
        self._lines.append(f"{'  ' * len(self._open)}<{tag}{given}>")
        self._is_leaf = tag not in _VOID
        if self._is_leaf:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)  # An element such as <img /> has no separate end.

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes another element"
        if self._is_leaf:
            self._lines[-1] += f"</{tag}>"
        else:
            self._lines.append(f"{'  ' * len(self._open)}</{tag}>")
        self._is_leaf = False

    def handle_data(self, data: str) -> None:
        text = escape(data, quote=False).replace("\n", "\n" + "  " * len(self._open))
        if self._is_leaf:
            self._lines[-1] += text
        elif text.strip():
            self._lines.append("  " * len(self._open) + text)

    def text(self) -> str:
        """Return the lines."""
        assert not self._open, f"<{self._open[-1]}> is not closed"
        return "".join(f"{line.rstrip()}\n" for line in "\n".join(self._lines).splitlines())
