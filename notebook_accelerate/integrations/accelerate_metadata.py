"""The metadata of a distribution that this package stands for; imported on first use, as importlib.metadata is."""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path
from typing import Any


class AliasDistribution(Distribution):
    """A distribution without files of its own.

    Args:
        name: Its name, and that of its only module.
        version: Its version.
    """

    def __init__(self, name: str, version: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: notebook_accelerate\n",
            "top_level.txt": f"{name}\n",
            "INSTALLER": "notebook_accelerate\n",
        }

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """Return a metadata file; None if there is no such file."""
        return self._files.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Return a path relative to the folder with this package."""
        return Path(__file__).resolve().parents[2] / path
