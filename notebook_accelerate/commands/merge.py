"""``merge-weights``: merges FSDP's sharded weights into whole files."""

from __future__ import annotations

import argparse

from notebook_accelerate.commands.parsers import Subparsers, command_parser


def merge_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``merge-weights``, standalone or as one of ``subparsers``."""
    parser = command_parser(
        subparsers,
        "merge-weights",
        "Merge the sharded weights of a checkpoint into whole files.",
        "Merge the sharded weights of an FSDP checkpoint (SHARDED_STATE_DICT) into whole files. The whole model must "
        "fit into memory.",
    )
    parser.add_argument(
        "checkpoint_directory", help="The folder pytorch_model_fsdp_0, or the checkpoint that contains it."
    )
    parser.add_argument("output_path", help="Folder for the merged files.")
    parser.add_argument(
        "--unsafe_serialization", "--unsafe-serialization", action="store_true",
        help="Write pytorch_model.bin instead of model.safetensors.",
    )  # fmt: skip
    parser.add_argument(
        "--remove_checkpoint_dir", "--remove-checkpoint-dir", action="store_true",
        help="Remove the sharded weights after merging.",
    )  # fmt: skip
    parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge the sharded weights in a folder."""
    from notebook_accelerate.checkpointing.model_weights import merge_fsdp_weights

    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )
    print(f"the merged weights are in {args.output_path}")
