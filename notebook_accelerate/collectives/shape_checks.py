"""Debug mode: compares the arguments of a collective over ranks before the collective runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notebook_accelerate.collectives.communicator import COMMUNICATORS
from notebook_accelerate.collectives.layouts import children_of, is_torch_tensor, recursively_apply
from notebook_accelerate.errors import DistributedOperationException
from notebook_accelerate.state import PartialState
from notebook_accelerate.state.warn_once import user_frame


def check(operation: str, data: Any, state: PartialState, free_dim: int | None = None) -> None:
    """Compare an operation and its tensors over ranks; every rank must call this.

    Args:
        operation: Name of the collective.
        data: This rank's argument.
        state: The world.
        free_dim: A dimension whose size may differ between ranks.

    Raises:
        DistributedOperationException: Ranks disagree; the message shows what each passed, and where.
    """
    mine = (operation, describe(data), describe(data, free_dim), caller_line())
    reports = COMMUNICATORS[state.communicator].all_gather_object(mine, state.num_processes)
    if all((name, compared) == (operation, mine[2]) for name, _, compared, _ in reports):
        return
    rows = [(f"rank {rank}", name, shown, where) for rank, (name, shown, _, where) in enumerate(reports)]
    raise DistributedOperationException(
        f"ranks passed different tensors to {operation!r}; they must have the same structure, shapes and dtypes on "
        f"every rank (pad_across_processes makes sizes equal):\n{_table(('rank', 'operation', 'passed', 'at'), rows)}"
    )


def describe(data: Any, free_dim: int | None = None) -> str:
    """Describe the shapes and dtypes of a nested structure.

    Args:
        data: Nested containers of tensors.
        free_dim: A dimension that is shown as "*".

    Returns:
        For example ``{'x': float32[2, 4]}``.
    """

    def format_tensor(tensor: Any) -> _Unquoted:
        sizes = [str(size) for size in tensor.shape]
        if free_dim is not None and -len(sizes) <= free_dim < len(sizes):
            sizes[free_dim] = "*"
        return _Unquoted(f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]")

    if not is_torch_tensor(data) and not list(children_of(data)):
        return repr(data)
    return repr(recursively_apply(format_tensor, data))


class _Unquoted(str):
    """A string whose representation has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def caller_line() -> str:
    """Return file, line and source of the innermost frame outside of this package; notebook cells have file names."""
    import linecache

    _, frame = user_frame()
    name, line = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(name, line, frame.f_globals).strip()
    return f"{name}, line {line}{f': {source}' if source else ''}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
