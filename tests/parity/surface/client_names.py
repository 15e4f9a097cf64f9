"""The names and attributes of `accelerate` that other libraries use; `make client-names` writes them to a table.

    python -m tests.parity.surface.client_names FOLDER   # of downloaded wheels

A name counts if a library imports it (`from accelerate.utils import gather`) or reads it from an imported module
(`accelerate.hooks.CpuOffload`). An attribute counts if a library reads or sets it on an object whose name is that of
one of Accelerate's (`trainer.accelerator.is_main_process`, `PartialState().device`), or names it in `getattr` or
`hasattr`.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "client_names.json"
CLIENTS = (
    "axolotl", "compressed_tensors", "diffusers", "fastai", "llamafactory", "lm_eval", "ms_swift", "optimum", "peft",
    "pytorch_accelerated", "sentence_transformers", "torchkeras", "transformers", "trl", "unsloth", "unsloth_zoo",
)  # fmt: skip
OBJECTS = {
    "accelerator": "Accelerator",
    "accelerator.gradient_state": "GradientState",
    "accelerator.state": "AcceleratorState",
    "accelerator_state": "AcceleratorState",
    "deepspeed_plugin": "DeepSpeedPlugin",
    "fsdp_plugin": "FullyShardedDataParallelPlugin",
    "gradient_state": "GradientState",
    "parallelism_config": "ParallelismConfig",
    "partial_state": "PartialState",
}
"""The classes of objects by the last part of the expressions with which libraries refer to them."""


def names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the dotted names in `accelerate` that a module uses."""
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


def attributes_in(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the attributes of Accelerate's objects that a module uses, each with whether the module sets it."""
    foreign = _other_objects(tree)
    for node in ast.walk(tree):
        owner, name = _owner_and_name(node)
        kind = _kind(owner, foreign) if owner is not None else None
        if kind is not None and name.isidentifier():
            yield f"{kind}.{name}", isinstance(getattr(node, "ctx", None), ast.Store)


def _owner_and_name(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Return the object and the attribute of ``object.attribute``, and of `getattr` or `hasattr` with a literal."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        match node.args:
            case [owner, ast.Constant(value=str(name)), *_]:
                return owner, name
    return None, ""


def _kind(owner: ast.expr, foreign: set[str]) -> str | None:
    """Return the class in Accelerate of the object that an expression refers to, or None for other objects."""
    if isinstance(owner, ast.Call):
        name = ast.unparse(owner.func).rpartition(".")[2]
        return name if name in OBJECTS.values() else None
    if not isinstance(owner, (ast.Name, ast.Attribute)):
        return None
    parts = ast.unparse(owner).split(".")
    if parts[0] in {"accelerate", "torch", *foreign}:  # accelerate.accelerator and torch.accelerator are modules.
        return None
    two, one = (".".join(parts[-count:]).replace("_accelerator", "accelerator") for count in (2, 1))
    return OBJECTS.get(two) or OBJECTS.get(one)


def _other_objects(tree: ast.Module) -> set[str]:
    """Return the names like ``accelerator`` that a module imports, or assigns from torch's module of that name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and "torch" in ast.unparse(node.value):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in found if name.lstrip("_") in OBJECTS}


def scan(folder: Path) -> dict[str, dict[str, Any]]:
    """Return for each library its version, and the names and attributes that it uses, from the wheels in a folder."""
    found: dict[str, dict[str, Any]] = {}
    for wheel in sorted(folder.glob("*.whl")):
        library, version = wheel.name.split("-")[:2]
        names: set[str] = set()
        attributes: dict[bool, set[str]] = {False: set(), True: set()}
        for tree in _modules(wheel):
            names.update(names_in(tree))
            for name, is_set in attributes_in(tree):
                attributes[is_set].add(name)
        found[library] = {"version": version, "names": sorted(names), "read": sorted(attributes[False])}
        found[library]["set"] = sorted(attributes[True])
    return found


def _modules(wheel: Path) -> Iterator[ast.Module]:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            source = archive.read(member) if member.endswith(".py") else b""
            if b"accelerat" in source or b"PartialState" in source:
                yield ast.parse(source.decode(errors="replace"))


def table() -> dict[str, dict[str, list[str]]]:
    """Return the table that is committed."""
    found: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text())
    return found


def used_by(column: str = "names") -> dict[str, list[str]]:
    """Return the libraries that use each entry of a column of the table: "names", "read" or "set"."""
    found: dict[str, list[str]] = defaultdict(list)
    for library, row in table().items():
        for name in row[column]:
            found[name].append(library)
    return found


if __name__ == "__main__":
    TABLE.write_text(json.dumps(scan(Path(sys.argv[1])), indent=1) + "\n")
