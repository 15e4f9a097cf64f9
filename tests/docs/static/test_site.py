"""The site is complete: an entry for every public name, a page for every exception, and no broken link."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest

import notebook_accelerate
from notebook_accelerate import _lazy, errors
from notebook_accelerate.config.settings import help_texts
from notebook_accelerate.widgets.panel_elements import GUIDES
from tests.parity.behaviour.known_differences import KNOWN_DIFFERENCES
from tests.parity.random_programs.plans import APART
from tests.parity.surface import compare
from tests.support import pages, settings_page

REFERENCE = "\n".join(path.read_text() for path in sorted((pages.DOCS / "api").glob("*.md")))
ENTRIES = set(re.findall(r"^\.\. auto(?:class|function|data):: ([\w.]+)$", REFERENCE, re.MULTILINE))
ALIASES = set(re.findall(r"^\| `([\w.]+)` \|", REFERENCE, re.MULTILINE))
NAMES = [f"{compare.PACKAGE}.{module}.{name}".replace("..", ".") for module, name, _ in compare.rows(compare.AREAS)]
EXCEPTIONS = sorted(
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
)


def test_every_name_of_the_interface_has_an_entry() -> None:
    assert len(NAMES) == 365
    assert sorted(set(NAMES) - ENTRIES - ALIASES) == []


def test_every_name_of_the_package_root_has_an_entry() -> None:
    entries = {entry.rpartition(".")[2] for entry in ENTRIES} | set(EXCEPTIONS)
    assert sorted(set(_lazy.exports("notebook_accelerate").homes) - entries) == []


def test_no_name_has_two_entries() -> None:
    assert not ENTRIES & ALIASES


def test_every_field_of_a_public_dataclass_is_documented() -> None:
    missing = {}
    for entry in sorted(ENTRIES):
        module, _, name = entry.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            fields = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
            missing[entry] = sorted(fields - {name for name, text in help_texts(kind).items() if text})
    assert len(missing) > 30
    assert {entry: fields for entry, fields in missing.items() if fields} == {}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_exception_has_a_page(name: str) -> None:
    page = pages.DOCS / "errors" / f"{name}.md"
    assert page.exists()
    text = page.read_text()
    assert text.startswith(f"# {name}\n")
    for section in ("What it means", "Causes"):
        assert f"\n## {section}\n" in text


def test_the_tree_on_the_page_of_errors_is_the_tree_of_classes() -> None:
    text = (pages.DOCS / "errors" / "index.md").read_text()
    listed = re.findall(r"^( *)- \[(\w+)\]\(\2\.md\)", text, re.MULTILINE)
    parents: list[str] = []
    for indentation, name in listed:
        depth = len(indentation) // 2
        parents = [*parents[:depth], name]
        kind = getattr(errors, name)
        assert depth == 0 or kind.__base__.__name__ == parents[depth - 1]
    assert {name for _, name in listed} == {*EXCEPTIONS} - {"RunInterrupted"}


@pytest.mark.parametrize("address", GUIDES.values())
def test_the_link_of_a_panel_leads_to_a_section(address: str) -> None:
    page, _, anchor = address.partition("#")
    text = (pages.DOCS / page).with_suffix(".md").read_text()
    assert not anchor or anchor in pages.anchors(text)


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: str(path.relative_to(pages.DOCS)))
def test_links_inside_the_repository_have_targets(path: Path) -> None:
    wrong = []
    for target in pages.links(path.read_text()):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if not other.exists() or (anchor and anchor not in pages.anchors(other.read_text())):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: str(path.relative_to(pages.DOCS)))
def test_blocks_have_a_language_and_skipped_ones_a_reason(path: Path) -> None:
    for block in pages.blocks(path.read_text()):
        assert block.language in pages.EXECUTED
        assert set(block.options) <= {"raises", "types", "skip", "needs", "numbers"}
        assert block.options.get("skip") != ""


def test_executed_blocks_and_their_output_are_found() -> None:
    text = "<!-- block: raises=KeyError -->\n```python\n1 / 0\n```\n\n```output\na ... c\nd\n```\n\n```bash\nls\n```\n"
    (block,) = pages.blocks(text)
    assert (block.line, block.source, block.options) == (3, "1 / 0\n", {"raises": "KeyError"})
    assert block.missing_from("a b c\nx\n") == ["d"]
    assert block.missing_from("d\n[rank 0] a 17 c") == []


def test_the_documented_differences_from_accelerate_are_the_tested_ones() -> None:
    text = (pages.DOCS / "from_accelerate.md").read_text()
    table = text.partition("<!-- differences: begin -->")[2].partition("<!-- differences: end -->")[0]
    listed = [line.split("|")[2].strip() for line in table.strip().splitlines()[2:]]
    reasons = {*KNOWN_DIFFERENCES.values(), *(each.reason for each in APART)}
    tested = {reason[0].upper() + reason[1:] for reason in reasons}
    assert sorted(listed) == sorted(tested)


def test_the_guide_of_launches_lists_every_option() -> None:
    guide = (pages.DOCS / "guides" / "launch.md").read_text()
    options = {*inspect.signature(notebook_accelerate.notebook_launcher).parameters} - {"function"}
    options |= {field.name for field in dataclasses.fields(notebook_accelerate.LaunchConfig)}
    assert [name for name in sorted(options) if f"`{name}`" not in guide] == []


def test_the_page_of_settings_is_generated_from_their_table() -> None:
    assert settings_page.PAGE.read_text() == settings_page.text(), "run: python -m tests.support.settings_page"


def test_numbers_of_other_machines_count_as_equal_output() -> None:
    (block,) = pages.blocks("<!-- block: numbers=any -->\n```python\nx\n```\n\n```output\nloss 0.25 (3)\n```\n")
    assert block.missing_from("[rank 0] loss 0.3391 (3)") == []
    assert block.missing_from("loss 0.3391 (4)") == ["loss 0.25 (3)"]
