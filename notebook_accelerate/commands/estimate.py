"""``estimate-memory``: estimates the memory for a model's weights and for training with Adam."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from notebook_accelerate.commands.parsers import Subparsers, command_parser
from notebook_accelerate.config.plain_values import convert_bytes

_SHARES = {"float32": 1.0, "float16": 0.5, "bfloat16": 0.5, "int8": 0.25, "int4": 0.125}
"""The size of weights by dtype, relative to float32."""
_LIBRARIES = ("transformers", "timm")


def estimate_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``estimate-memory``, standalone or as one of ``subparsers``."""
    parser = command_parser(
        subparsers,
        "estimate-memory",
        "Print the memory that a model needs, without loading its weights.",
        "Print the sizes of a model's largest layer and of all its weights, and the memory for training with Adam. "
        "`notebook_accelerate.big_modeling.estimate_memory` also estimates activations and strategies.",
    )
    parser.add_argument("model_name", help="Name on the Hugging Face Hub, or folder with a config.json.")
    parser.add_argument("--library_name", "--library-name", choices=_LIBRARIES, help="The model's library.")
    parser.add_argument(
        "--dtypes", nargs="+", choices=tuple(_SHARES), default=["float32", "float16", "int8", "int4"],
        metavar="DTYPE", help="float32, float16, bfloat16, int8 and int4 (default: all except bfloat16).",
    )  # fmt: skip
    parser.add_argument(
        "--trust_remote_code", "--trust-remote-code", action="store_true",
        help="Run code from the model's repository. Read that code first.",
    )  # fmt: skip
    parser.set_defaults(func=estimate_command)
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print the estimated memory as a table.

    Raises:
        ImportError: The model's library is not installed.
    """
    rows = [
        (dtype, convert_bytes(largest), convert_bytes(total), "-" if training is None else convert_bytes(training))
        for dtype, largest, total, training in gather_data(args)
    ]
    title = f"Memory for `{args.model_name}`"
    print(create_ascii_table(["dtype", "largest layer", "all weights", "training with Adam"], rows, title))


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return a row for each dtype: its name, and the sizes in bytes of the largest layer, all weights and training.

    The size for training is its peak memory, which is None for integer dtypes.
    """
    from notebook_accelerate.big_modeling.module_tree import calculate_maximum_sizes

    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    total, (largest, _) = calculate_maximum_sizes(model)
    rows = []
    for dtype in args.dtypes:
        training = max(estimate_training_usage(total, dtype).values()) if "float" in dtype else None
        rows.append([dtype, largest * _SHARES[dtype], total * _SHARES[dtype], training])
    return rows


def estimate_training_usage(
    bytes: int,
    mixed_precision: str,
    msamp_config: str | None = None,  # noqa: ARG001 - Accelerate's parameter
) -> dict[str, int]:
    """Return the memory in bytes that training with Adam needs at each stage. The largest value is the peak.

    Args:
        bytes: Size of the weights in float32, in bytes.
        mixed_precision: float32, float16, bfloat16 or fp8.
        msamp_config: Not used.
    """
    # Mixed precision keeps the weights in float32, and briefly has gradients in both dtypes.
    half = mixed_precision != "float32"
    gradients = bytes + bytes // 2 if half else bytes
    return {"model": bytes, "optimizer": 2 * bytes, "gradients": gradients, "step": bytes * (2 if half else 4)}


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """Build a model on the meta device.

    Args:
        model_name: Name on the Hub, or a folder.
        library_name: transformers or timm. If None, it is timm if the name starts with "timm/", or else transformers.
        trust_remote_code: Whether to run code from the model's repository.
        access_token: Token for the Hub.

    Raises:
        ImportError: The library is not installed.
    """
    from notebook_accelerate.big_modeling.empty_init import init_empty_weights

    name = library_name or ("timm" if model_name.startswith("timm/") else "transformers")
    try:
        library: Any = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed; run: pip install {name}") from error
    if name == "timm":
        with init_empty_weights(include_buffers=False):
            return library.create_model(model_name.removeprefix("timm/"), pretrained=False)
    options = {"trust_remote_code": trust_remote_code, "token": access_token}
    config = library.AutoConfig.from_pretrained(model_name, **options)
    kind = library.AutoModel
    for entry in getattr(config, "auto_map", {}):  # Remote code may define a model without an AutoModel.
        if entry.startswith("AutoModelFor"):
            kind = getattr(library, entry)
    with init_empty_weights(include_buffers=False):
        return kind.from_config(config, trust_remote_code=trust_remote_code)


def create_ascii_table(headers: Sequence[str], rows: Iterable[Sequence[object]], title: str) -> str:
    """Return a table with borders.

    Args:
        headers: The first row.
        rows: The other rows.
        title: The line above the rows.
    """
    cells = [[str(each) for each in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    inner = max(sum(widths) + len(widths) - 1, len(title) + 2)
    widths[-1] += inner - (sum(widths) + len(widths) - 1)

    def line(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for width in widths) + right

    body = ["│" + "│".join(cell.center(width) for cell, width in zip(row, widths, strict=True)) + "│" for row in cells]
    top = ["┌" + "─" * inner + "┐", "│" + title.center(inner) + "│", line("├", "┬", "┤"), body[0], line("├", "┼", "┤")]
    return "\n".join([*top, *body[1:], line("└", "┴", "┘")])
