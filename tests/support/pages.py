"""Pages of the documentation: their code blocks, links and headings.

A comment in front of a block contains settings that readers do not need::

    <!-- block: raises=WorkerError -->     the block must raise
    <!-- block: types=p loss; c -->        lines that the user types at its prompts, in order
    <!-- block: skip=needs two GPUs -->    the block is not executed, for this reason
    <!-- block: needs=lightning -->        the block is executed only if this package is installed
    <!-- block: numbers=any -->            numbers with a decimal point differ from machine to machine

``<!-- page: needs=transformers, trl -->`` skips a page if these packages are not installed. A block with the
language ``output`` contains lines of the previous block's output, with ``...`` for any text.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
DOCS, README = ROOT / "docs", ROOT / "README.md"
EXECUTED = ("python", "ipython3")
"""The languages of blocks that a kernel executes."""
_COMMENT = re.compile(r"<!--\s*(page|block):\s*(\w+)=(.*?)\s*-->", re.DOTALL)
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass
class Block:
    """One block of code.

    Args:
        line: The number of the code's first line in the page, from 1.
        language: The word after the fence.
        source: The code.
        options: The settings in the comment before the block.
        output: The expected lines of the output.
    """

    line: int
    language: str
    source: str
    options: dict[str, str] = field(default_factory=dict)
    output: list[str] = field(default_factory=list)

    def missing_from(self, shown: str) -> list[str]:
        """Return the lines of ``output`` that are missing from ``shown``."""
        lines = [line.rstrip() for line in shown.splitlines()]
        patterns = [(line, re.compile(self._pattern(line.strip()))) for line in self.output]
        return [line for line, pattern in patterns if not any(pattern.search(each) for each in lines)]

    @property
    def is_executed(self) -> bool:
        """Whether the block is executed on this machine and in this environment."""
        return "skip" not in self.options and not missing_packages(self.options.get("needs", ""))

    def _pattern(self, line: str) -> str:
        pattern = re.escape(line).replace(r"\.\.\.", ".*")
        return re.sub(r"\d+\\\.\d+", r"\\d+\\.\\d+", pattern) if self.options.get("numbers") == "any" else pattern


def pages() -> list[Path]:
    """Return all pages of the site, in order."""
    return sorted(DOCS.rglob("*.md"))


def first_cell() -> str:
    """Return the first cell of the README, which a new user pastes into a notebook."""
    return next(block.source for block in blocks(README.read_text()) if block.language == "python")


def packages_needed(text: str) -> str:
    """Return the packages that a page needs, separated by commas."""
    return ", ".join(value for kind, name, value in _COMMENT.findall(text) if (kind, name) == ("page", "needs"))


def missing_packages(names: str) -> list[str]:
    """Return the packages in a comma-separated list that are not installed."""
    return [name for each in names.split(",") if (name := each.strip()) and importlib.util.find_spec(name) is None]


def blocks(text: str) -> list[Block]:
    """Return the executable blocks of a page, with their outputs."""
    found: list[Block] = []
    options: dict[str, str] = {}
    previous: Block | None = None
    for token in _PARSER.parse(text):
        if token.type == "html_block":
            options.update({name: value for kind, name, value in _COMMENT.findall(token.content) if kind == "block"})
        elif token.type == "fence" and token.level == 0:
            language = token.info.strip()
            if language == "output":
                assert previous is not None, "an output block needs a code block before it"
                previous.output += token.content.splitlines()
                previous = None
                continue
            previous = Block((token.map or [0])[0] + 2, language, token.content, options)
            options = {}
            if language in EXECUTED:
                found.append(previous)
        elif token.type not in ("fence", "paragraph_open", "paragraph_close", "inline"):
            previous = None
    return found


def links(text: str) -> Iterator[str]:
    """Yield the targets of a page's links and images."""
    for token in _PARSER.parse(text):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                yield str(target)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, in the form that code hosts generate."""
    tokens = _PARSER.parse(text)
    titles = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    found: set[str] = set()
    for title in titles:
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower())
        slug = base = plain.strip().replace(" ", "-")
        number = 0
        while slug in found:
            number += 1
            slug = f"{base}-{number}"
        found.add(slug)
    return found
