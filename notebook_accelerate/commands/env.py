"""``env``: prints versions, devices and the configuration file, for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

from notebook_accelerate import hardware
from notebook_accelerate.commands.parsers import Subparsers, add_config_file, command_parser
from notebook_accelerate.config import config_file
from notebook_accelerate.config.plain_values import hide_credentials, size_text
from notebook_accelerate.hardware.versions import installed_version, torch_build

_PACKAGES = (
    "torch", "numpy", "ipykernel", "ipywidgets", "jupyterlab", "notebook", "accelerate", "transformers", "trl", "peft",
    "diffusers", "datasets", "lightning", "deepspeed", "megatron-core", "torchao", "bitsandbytes", "ray", "torch_tpu",
    "torch_xla",
)  # fmt: skip
_VARIABLES = ("ACCELERATE_", "NOTEBOOK_ACCELERATE_", "CUDA_VISIBLE_DEVICES", "NCCL_", "GLOO_", "OMP_NUM_THREADS")


def env_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``env``, standalone or as one of ``subparsers``."""
    parser = command_parser(subparsers, "env", "Print versions and devices, to paste into an issue.")
    add_config_file(parser, "The configuration file to show instead of the default one.")
    parser.set_defaults(func=env_command)
    return parser


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print the versions and devices, and return them."""
    facts = _facts()
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    path = Path(args.config_file or config_file.default_config_file)
    if path.is_file():
        lines.append(f"- configuration file {path}:")
        lines += [f"    {line}" for line in path.read_text(encoding="utf-8").splitlines()]
    elif args.config_file:
        raise FileNotFoundError(f"the configuration file {path} does not exist")
    else:
        lines.append("- configuration file: none")
    print("\nPaste this into the issue:\n", *lines, "", sep="\n")
    return facts


def _facts() -> dict[str, str]:
    machine = hardware.detect()
    devices = f"{machine.count} x {machine.accelerator}" if machine.count else "none"
    versions = {name: version for name in _PACKAGES if (version := installed_version(name))}
    if build := torch_build().version:
        versions["torch"] = build  # The distribution's version may lack the platform that torch was built for.
    variables = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)}
    variables.pop("NOTEBOOK_ACCELERATE_SECRET", None)
    return {
        "notebook-accelerate": installed_version("notebook-accelerate") or "not installed, from a folder",
        "platform": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        **versions,
        "accelerators": devices,
        "processors": str(machine.cpu_count),
        "memory": size_text(machine.memory_bytes),
        "environment": " ".join(f"{name}={hide_credentials(value)}" for name, value in variables.items())
        or "no variable set",
    }
