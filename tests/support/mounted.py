"""A disk that is reached through fsspec, like a store: `mounted:///folder`. Importing this module registers it.

All ranks see the same files there, unlike in fsspec's own `memory://`. With `OWN_MACHINES` and
`to_a_machine_of_its_own`, ranks share no other files.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

OWN_MACHINES = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Variables that make each rank appear to be alone on its machine."""


class MountedFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The local disk under another name."""

    protocol = "mounted"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("mounted://")))


fsspec.register_implementation("mounted", MountedFileSystem, clobber=True)


def to_a_machine_of_its_own(place: str) -> None:
    """Give this rank a folder for temporary files that no other rank uses."""
    folder = Path(place) / f"machine_{os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    tempfile.tempdir = str(folder)
