"""The names that other libraries import from `accelerate`; `make client-names` writes them to a table.

    python -m tests.parity.surface.client_names FOLDER   # of downloaded wheels

A name counts if a library imports it (`from accelerate.utils import gather`) or reads it from an imported module
(`accelerate.hooks.CpuOffload`).
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).parent / "client_names.json"
CLIENTS = ("axolotl", "diffusers", "peft", "sentence_transformers", "transformers", "trl")


def names_in(source: str) -> Iterator[str]:
    """Yield the dotted names in `accelerate` that a module's source uses."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_accelerate(node.module):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Import):
            imported = [alias for alias in node.names if _is_accelerate(alias.name)]
            yield from (alias.name for alias in imported)
            modules.update(
                {alias.asname or "accelerate": alias.name if alias.asname else "accelerate" for alias in imported}
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name, *attributes = ast.unparse(node).split(".")
            if name in modules and all(each.isidentifier() for each in attributes):
                yield ".".join([modules[name], *attributes])


def _is_accelerate(module: str | None) -> bool:
    return (module or "").split(".")[0] == "accelerate"


def scan(folder: Path) -> dict[str, dict[str, object]]:
    """Return the version of each library, and the names that it uses, from the wheels in a folder."""
    found: dict[str, dict[str, object]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        library, version = wheel.name.split("-")[:2]
        names: set[str] = set()
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                source = archive.read(member) if member.endswith(".py") else b""
                if b"accelerate" in source:
                    names.update(names_in(source.decode(errors="replace")))
        found[library] = {"version": version, "names": sorted(names)}
    return found


def table() -> dict[str, dict[str, list[str]]]:
    """Return the table that is committed."""
    found: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text())
    return found


def used_by() -> dict[str, list[str]]:
    """Return the libraries that use each name in the table."""
    found: dict[str, list[str]] = defaultdict(list)
    for library, row in table().items():
        for name in row["names"]:
            found[name].append(library)
    return found


if __name__ == "__main__":
    TABLE.write_text(json.dumps(scan(Path(sys.argv[1])), indent=1) + "\n")
