"""docs/architecture.md matches the code: its packages and all the functions in its lists of steps exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
STEPS = sorted(set(re.findall(r"`([\w/]+\.py):(\w+)`", TEXT)))
WALKS = (
    *("A launch", "A launch from the server process", "A run on several machines", "A metric", "Launching detached"),
    *("Attaching", "`prepare` under FSDP2", "A save", "A stop"),
)


def path_of(name: str) -> Path:
    return ROOT / name if name.startswith("widgets/") else ROOT / "notebook_accelerate" / name


def names_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }


@pytest.mark.parametrize(("file", "function"), STEPS, ids=[f"{file}:{function}" for file, function in STEPS])
def test_every_step_of_a_walk_exists(file: str, function: str) -> None:
    assert function in names_in(path_of(file)), f"docs/architecture.md names {file}:{function}, which does not exist"


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_names_its_steps(walk: str) -> None:
    section = TEXT.partition(f"\n## {walk}\n")[2].partition("\n## ")[0]
    numbered = re.findall(r"^\d+\. ", section, re.MULTILINE)
    assert len(numbered) >= 5
    assert len(re.findall(r"`[\w/]+\.py:\w+`", section)) >= len(numbered)


def test_the_packages_of_the_document_match_the_tree() -> None:
    rooms, inside = (part.partition("\n\n")[0] for part in TEXT.partition("## Rooms")[2].split("|---|---|\n")[1:3])
    named = {name.strip("`/") for row in rooms.splitlines() for name in re.findall(r"`[\w/]+`", row.split("|")[1])}
    there = {path.stem for path in (ROOT / "notebook_accelerate").iterdir() if not path.name.startswith(("_", "py."))}
    assert named <= there
    left_out = {"local_sgd", "logging", "memory_utils", "parallelism_config"}
    assert there - named <= left_out, "only these modules may be left to the ellipsis in the last row"
    launch = {name.strip("`/") for row in inside.splitlines() for name in re.findall(r"`[\w/.]+`", row.split("|")[1])}
    assert launch == {path.name for path in (ROOT / "notebook_accelerate/launch").iterdir() if path.name[0] != "_"}
