"""Two network namespaces joined by a virtual cable: the closest thing to two machines on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.213.77.1", "10.213.77.2")
"""The addresses of the two namespaces."""


def ip(*arguments: str) -> None:
    """Run the command ``ip`` with these arguments."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextmanager
def two_namespaces(label: str) -> Iterator[list[str]]:
    """Create two namespaces and yield their names. Skip the test if this machine does not allow it.

    Args:
        label: A few letters for the names. Each file uses its own.
    """
    names = [f"nb{label}{os.getpid()}x{index}" for index in range(2)]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            _connect(names, label)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces cannot be created here: {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def _connect(names: list[str], label: str) -> None:
    ends = [f"nb{label}{os.getpid() % 100000}e{index}" for index in range(2)]
    ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
    for name, end, address in zip(names, ends, ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        ip("-n", name, "link", "set", end, "up")
        ip("-n", name, "link", "set", "lo", "up")


__all__ = ["ADDRESSES", "ip", "two_namespaces"]
