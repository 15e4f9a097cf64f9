"""The metadata of the distribution ``accelerate`` that this package stands for; imported on first use."""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path
from typing import Any

from notebook_accelerate.integrations.accelerate_alias import ALIAS, VERSION

_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {ALIAS}\nVersion: {VERSION}\nSummary: notebook_accelerate\n",
    "top_level.txt": f"{ALIAS}\n",
    "INSTALLER": "notebook_accelerate\n",
}


class AccelerateDistribution(Distribution):
    """A distribution without files of its own."""

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """Return a metadata file; None if there is no such file."""
        return _FILES.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Return a path relative to the folder with this package."""
        return Path(__file__).resolve().parents[2] / path
