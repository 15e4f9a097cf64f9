"""Rules for the code's structure. `python -m tests.architecture.test_structure` prints figures that have no limits."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "notebook_accelerate"
DOORS = ("__init__.py",)
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
PRIVATE_OF_OTHERS = frozenset(
    {
        # Libraries that use Accelerate read these attributes, even though their names look private.
        "_models", "_optimizers", "_schedulers", "_dataloaders", "_shared_state", "_reset_state", "_custom_objects",
        "_is_accelerate_prepared", "_add_dataloader", "_remove_dataloader",
        "_load_model_state_pre_hook", "_save_model_state_pre_hook",
        # torch's tensors, modules and process groups.
        "_version", "_parameters", "_buffers", "_modules", "_world", "_mesh",
        # IPython's protocol for exceptions that render themselves.
        "_render_traceback_",
        # Methods of named tuples.
        "_replace", "_asdict", "_fields", "_make",
    }
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Return the modules of the product by dotted name."""
    found = {}
    for folder, prefix in ((ROOT / PACKAGE, PACKAGE), (ROOT / "widgets", f"{PACKAGE}.widgets")):
        for path in sorted(folder.rglob("*.py")):
            if folder.name == PACKAGE and "widgets" in path.relative_to(folder).parts:
                continue  # Skip the link to the top-level folder.
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([prefix, *(part for part in parts if part != "__init__")])
            found[name] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported(name: str) -> set[str]:
    """Return the product's modules that a module imports at the top, in functions, or only for type checkers."""
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
    """Return the groups of modules that import one another (Tarjan's algorithm), largest first."""
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
    """Yield the uses of private attributes that no class in the same module defines."""
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
    """Yield the parameters annotated with `Any`."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                for argument in arguments:
                    if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Any":
                        yield f"{name}:{node.lineno} {node.name}({argument.arg})"


def repeated_names() -> dict[str, int]:
    """Return the file names that occur several times, except where re-exports need the names that Accelerate uses."""
    names = [
        path.name
        for name, path in MODULES.items()
        if not name.startswith((f"{PACKAGE}.utils", f"{PACKAGE}.commands")) and path.name not in DOORS
    ]
    return {name: count for name, count in Counter(names).items() if count > 1}


def lines_of_code() -> int:
    return sum(len(code_lines(path.read_text()) - docstring_lines(path.read_text())) for path in MODULES.values())


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that contain code or docstrings, but not comments or blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def docstring_lines(source: str) -> set[int]:
    strings = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def function_lengths() -> dict[str, int]:
    """Return the length of each function's body in lines of code, without its docstring and signature."""
    found = {}
    for name, tree in TREES.items():
        code = code_lines(MODULES[name].read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
                lines = {line for part in body for line in range(part.lineno, (part.end_lineno or 0) + 1)}
                found[f"{name}:{node.lineno} {node.name}"] = len(lines & code)
    return found


GRAPH = {name: imported(name) for name in MODULES}
KNOWN_CIRCLES = [
    {"hardware.device_counts", "hardware.device_table"},
    {"data_loader.prepared_loader", "data_loader.stateful_loaders"},
    {"strategies.megatron.megatron_engine", "strategies.megatron.megatron_generation"},
]
"""Groups of modules that must import one another, which they do inside functions. Each group needs a reason."""
KNOWN_ACCESSES = {"_clear", "_clipping_given", "_config", "_micro_batches_given", "_parent", "_unselect"}
"""Private attributes whose names a class of the product defines as well, but which belong to other libraries' objects,
or to a sibling in the same package."""


def test_no_modules_import_one_another_except_the_known_ones() -> None:
    known = [{f"{PACKAGE}.{name}" for name in names} for names in KNOWN_CIRCLES]
    assert [found for found in circles(GRAPH) if not any(set(found) <= names for names in known)] == []


def test_no_two_modules_define_classes_of_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
            homes.setdefault(name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_module_reads_a_private_attribute_of_another() -> None:
    assert [place for place in private_accesses() if place.partition(" .")[2] not in KNOWN_ACCESSES] == []


def test_no_accelerator_parameter_is_annotated_with_any() -> None:
    assert [place for place in any_parameters() if place.endswith("(accelerator)")] == []


def figures() -> Iterator[tuple[str, int]]:
    lengths = function_lengths()
    yield "files", len(MODULES)
    yield "lines of code", lines_of_code()
    yield "functions", len(lengths)
    yield "function length, 95th percentile", sorted(lengths.values())[int(0.95 * (len(lengths) - 1))]
    yield "functions of more than 60 lines", sum(length > 60 for length in lengths.values())
    yield "parameters annotated Any", len(list(any_parameters()))


if __name__ == "__main__":
    for title, figure in figures():
        print(f"{title:<50} {figure:>7,}")
    print(*circles(GRAPH), *private_accesses(), repeated_names(), sep="\n")
