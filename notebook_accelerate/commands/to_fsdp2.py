"""``to-fsdp2``: converts a configuration file from FSDP 1 to FSDP 2."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from notebook_accelerate.commands.parsers import Subparsers, add_config_file, command_parser
from notebook_accelerate.config.config_file import file_contents
from notebook_accelerate.config.constants import FSDP_SHARDING_STRATEGY
from notebook_accelerate.config.fsdp_plugin import choice

_REMOVED = {
    "fsdp_backward_prefetch": "FSDP 2 prefetches by itself",
    "fsdp_forward_prefetch": "FSDP 2 has no such setting yet",
    "fsdp_sync_module_states": "FSDP 2 always sends the first rank's weights",
    "fsdp_use_orig_params": "FSDP 2 always keeps the model's own parameters",
}


def to_fsdp2_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``to-fsdp2``, standalone or as one of ``subparsers``."""
    parser = command_parser(subparsers, "to-fsdp2", "Convert a configuration file from FSDP 1 to FSDP 2.")
    add_config_file(parser, "The file to convert.", required=True)
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing file.")
    parser.add_argument(
        "--output_file",
        "--output-file",
        metavar="FILE",
        help="The new file; with --overwrite, --config_file is replaced by default.",
    )
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a configuration file.

    Raises:
        FileNotFoundError: The file does not exist.
        FileExistsError: The new file exists, and ``--overwrite`` is not given.
        ValueError: No output file is given, or the configuration is not for FSDP.
    """
    source = Path(args.config_file)
    if not source.is_file():
        raise FileNotFoundError(f"the configuration file {source} does not exist")
    if not args.overwrite and args.output_file is None:
        raise ValueError(
            "no output file is given; pass --output_file FILE, or --overwrite to replace the configuration file"
        )
    target = Path(args.output_file) if args.output_file else source
    if not args.overwrite and target.exists():
        raise FileExistsError(f"{target} exists; pass --overwrite to replace it")
    contents = file_contents(source)
    if (contents.get("fsdp_config") or {}).get("fsdp_version") == 2:
        if target != source:
            target.write_text(yaml.safe_dump(contents), encoding="utf-8")
        print(f"{source} is for FSDP 2 already; its settings are unchanged in {target}")
        return
    target.write_text(yaml.safe_dump(convert_config_to_fsdp2(contents)), encoding="utf-8")
    print(f"{target} is for FSDP 2")


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of a file for FSDP 2, and print a line for each setting without an equivalent.

    Args:
        config: The contents of a file for FSDP 1.

    Raises:
        ValueError: The file has no FSDP settings, or its sharding strategy is unknown.
    """
    section = dict(config.get("fsdp_config") or {})
    if not section:
        raise ValueError("the file has no fsdp_config; write one with `notebook-accelerate config`")
    for name in [name for name in section if name in _REMOVED]:
        print(f"{name} is left out: {_REMOVED[name]}")
        del section[name]
    if "fsdp_sharding_strategy" in section:
        strategy = choice("fsdp_sharding_strategy", str(section.pop("fsdp_sharding_strategy")), FSDP_SHARDING_STRATEGY)
        section["fsdp_reshard_after_forward"] = strategy in ("FULL_SHARD", "HYBRID_SHARD")
        if strategy == "NO_SHARD":
            print("FSDP 2 and the new file always shard parameters; for plain data parallelism, use DDP")
        if strategy.startswith("HYBRID"):
            print("To shard within groups, FSDP 2 needs a ParallelismConfig: set dp_replicate_size and dp_shard_size")
    return {**config, "fsdp_config": {**section, "fsdp_version": 2}}
