"""Rules on the structure. `python -m tests.architecture.test_structure` prints these figures, and the sizes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.architecture.test_house_style import code_lines, functions_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "notebook_accelerate"
DOORS = ("__init__.py",)
PRIVATE_OF_OTHERS = frozenset(
    {
        # Attributes that Accelerate's clients use, which its names keep private.
        "_models", "_optimizers", "_schedulers", "_dataloaders", "_shared_state", "_reset_state", "_custom_objects",
        "_is_accelerate_prepared", "_add_dataloader", "_remove_dataloader",
        "_load_model_state_pre_hook", "_save_model_state_pre_hook",
        # torch's tensors, modules and process groups.
        "_version", "_parameters", "_buffers", "_modules", "_world", "_mesh",
        # Named tuples' own methods.
        "_replace", "_asdict", "_fields", "_make",
    }
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Return the product's modules by dotted name."""
    found = {}
    for folder, prefix in ((ROOT / PACKAGE, PACKAGE), (ROOT / "widgets", f"{PACKAGE}.widgets")):
        for path in sorted(folder.rglob("*.py")):
            if folder.name == PACKAGE and "widgets" in path.relative_to(folder).parts:
                continue  # the link to the top-level folder
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([prefix, *(part for part in parts if part != "__init__")])
            found[name] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported(name: str) -> set[str]:
    """Return the product's modules that a module imports: at the top, in functions, or for type checkers only."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
    return (found & set(MODULES)) - {name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another (Tarjan's algorithm), the largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found, key=len, reverse=True)


def private_accesses() -> Iterator[str]:
    """Yield the places that reach for a private attribute of an object that no class of their module defines."""
    for name, tree in TREES.items():
        own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_self(node.value)}
        own |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        own |= {node.target.id for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and named(node.target)}
        project = {alias.asname or alias.name for node in ast.walk(tree) if is_ours(node) for alias in node.names}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            foreign = node.attr in DEFINED - own - PRIVATE_OF_OTHERS
            if foreign and (not is_self(node.value) or root_name(node.value) in project):
                yield f"{name}:{node.lineno} .{node.attr}"


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def named(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def is_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and bool(node.module) and str(node.module).startswith(PACKAGE)


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


DEFINED = {
    node.attr
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and is_self(node.value) and isinstance(node.ctx, ast.Store)
} | {
    method.name
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
    for method in node.body
    if isinstance(method, ast.FunctionDef)
}
"""Every attribute and method that a class of the product defines."""


def any_parameters() -> Iterator[str]:
    """Yield the parameters that are annotated `Any`."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                for argument in arguments:
                    if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Any":
                        yield f"{name}:{node.lineno} {node.name}({argument.arg})"


def accelerator_parameters() -> list[str]:
    return [place for place in any_parameters() if place.endswith("(accelerator)")]


def repeated_names() -> dict[str, int]:
    """Return the file names that several files have; the doors under Accelerate's paths have to."""
    names = [
        path.name
        for name, path in MODULES.items()
        if not name.startswith((f"{PACKAGE}.utils", f"{PACKAGE}.commands")) and path.name not in DOORS
    ]
    return {name: count for name, count in Counter(names).items() if count > 1}


def lines_of_code() -> int:
    return sum(len(code_lines(path.read_text(), docstrings=False)) for path in MODULES.values())


def p95(values: list[int]) -> int:
    return sorted(values)[int(0.95 * (len(values) - 1))]


GRAPH = {name: imported(name) for name in MODULES}
FIGURES: dict[str, tuple[Callable[[], int], int]] = {
    "function length, 95th percentile": (
        lambda: p95([length.lines for path in MODULES.values() for length in functions_of(path)]),
        17,
    ),
    "modules in import circles": (lambda: sum(map(len, circles(GRAPH))), 11),
    "largest import circle": (lambda: max(map(len, circles(GRAPH)), default=0), 3),
    "accesses to private attributes of other modules": (lambda: len(list(private_accesses())), 10),
    "accelerator parameters annotated Any": (lambda: len(accelerator_parameters()), 0),
}
"""What is counted, and its limit. Sizes have none: a limit just above today's size freezes the tree as it is."""
SIZES: dict[str, Callable[[], int]] = {
    "files": lambda: len(MODULES),
    "lines of code": lines_of_code,
    "parameters annotated Any": lambda: len(list(any_parameters())),
    "file names used more than once": lambda: len(repeated_names()),
}


@pytest.mark.parametrize("title", FIGURES)
def test_a_figure_of_the_structure_stays_below_its_ceiling(title: str) -> None:
    figure, ceiling = FIGURES[title]
    value = figure()
    print(f"\n{title:<50} {value:>7,} of {ceiling:,}")
    assert value <= ceiling


if __name__ == "__main__":
    for title, size in {**SIZES, **{title: figure for title, (figure, _) in FIGURES.items()}}.items():
        print(f"{title:<50} {size():>7,}")
    print(*circles(GRAPH), *private_accesses(), repeated_names(), sep="\n")
