"""Reserved names, and the manifest, which commits a checkpoint and lists the sizes and checksums of its files."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from notebook_accelerate.config.constants import MANIFEST_NAME
from notebook_accelerate.errors import BrokenCheckpointError
from notebook_accelerate.files.remote_paths import AnyPath
from notebook_accelerate.files.untrusted_files import MALFORMED, read_json
from notebook_accelerate.files.weight_files import inside

CHECKPOINTS_FOLDER = "checkpoints"
"""The folder in a project that contains automatically named checkpoints."""
STAGING_SUFFIX = ".incomplete"
"""The suffix of the hidden folder that a checkpoint is being written to."""
REMOVED_SUFFIX = ".removed"
"""The suffix of the hidden name of a checkpoint that is being removed."""
COMMITTING_NAME = ".committing"
"""The folder inside an existing checkpoint that holds a complete set of new files until they get their final names."""
LOCK_SUFFIX = ".saving"
"""The suffix of the file that the saving process locks. Inside an existing folder, it is the whole name."""
RESERVED = {MANIFEST_NAME, STAGING_SUFFIX, COMMITTING_NAME, LOCK_SUFFIX}
"""Names that a checkpoint's own files cannot have."""
WHOLE = "whole"
"""The layout if every rank has the complete state, so that one rank writes it to single files."""

_NUMBERED = re.compile(r"checkpoint_(\d{1,18})", re.ASCII)


def is_numbered(name: str) -> bool:
    """Return whether a folder has the name of an automatically named checkpoint."""
    return _NUMBERED.fullmatch(name) is not None


def checkpoint_number(name: str) -> int:
    """Return the number in the name of an automatically named checkpoint."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return int(match[1])


def removal_name(name: str) -> str:
    """Return the hidden name that a checkpoint has while it is being removed."""
    return f".{name}{REMOVED_SUFFIX}"


# ---- the manifest

FORMAT = 1
"""The version of the manifest's format. Manifests with a later version are rejected."""
_CHUNK = 1 << 22
_MAX_SIZE = 1 << 63
_MAX_NAME = 4096
_MAX_LINES = 20
"""The maximum number of damaged files that an error lists."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint."""

    size: int
    """The size in bytes."""
    crc32: str
    """The CRC-32 of the content as eight hexadecimal digits. It detects accidental damage twice as fast as SHA-256."""


@dataclass(kw_only=True)
class Manifest:
    """A list of the files of a complete checkpoint, and facts about the training run that wrote it."""

    world_size: int
    """The number of ranks that wrote the checkpoint."""
    layout: str = WHOLE
    """The layout of models and optimizers: "whole" (a single process, or DDP), or a layout of the strategy."""
    strategy: str = ""
    """The name of the strategy, for messages."""
    producer: str = ""
    """The package and version that wrote the checkpoint."""
    format: int = FORMAT
    """The version of the manifest's format."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    """All files except the manifest, by path relative to the folder."""


def make_record(path: Path) -> FileRecord:
    """Read a file and return its size and checksum.

    Args:
        path: The file to read.
    """
    checksum, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return FileRecord(size=size, crc32=f"{checksum:08x}")


def files_below(folder: Path) -> list[Path]:
    """List all files below a folder in sorted order. Links to folders are not followed."""
    return sorted(Path(root) / name for root, _, names in os.walk(folder) for name in names)


def manifest_json(manifest: Manifest) -> str:
    """Return a manifest as the JSON text of its file."""
    return json.dumps(asdict(manifest), indent=1, sort_keys=True)


def read_manifest(folder: AnyPath) -> Manifest | None:
    """Read a checkpoint's manifest.

    Args:
        folder: The folder of the checkpoint.

    Returns:
        The manifest, or None if there is no manifest because Accelerate wrote the folder.

    Raises:
        BrokenCheckpointError: The manifest cannot be read.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        return _parse(read_json(path), path)
    except FileNotFoundError:  # The file existed just before, so another process is replacing the checkpoint.
        return None
    except MALFORMED as error:
        raise _unreadable(folder, str(error)) from error
    except BrokenCheckpointError as error:
        if error.__cause__ is None:
            raise
        raise _unreadable(folder, str(error.__cause__)) from error


def _unreadable(folder: AnyPath, detail: str) -> BrokenCheckpointError:
    return BrokenCheckpointError(f"Checkpoint {folder} is broken: {MANIFEST_NAME} cannot be read ({detail[:500]}).")


def _parse(content: Any, path: AnyPath) -> Manifest:
    if content["format"] > FORMAT:
        raise BrokenCheckpointError(
            f"{path} has format {content['format']}, but this version reads formats up to {FORMAT}: "
            "pip install -U notebook-accelerate"
        )
    files = {_checked_name(name): FileRecord(**record) for name, record in content.pop("files").items()}
    manifest = Manifest(**content, files=files)
    _check_types(manifest)
    return manifest


def _checked_name(name: str) -> str:
    """Return the name of a file, or raise ValueError if the name is not a path inside the checkpoint."""
    parts = name.split("/")
    if not all(parts) or {".", "..", *RESERVED} & set(parts) or len(name) > _MAX_NAME or "\0" in name:
        raise ValueError(f"{name[:100]!r} is not a path inside a checkpoint")
    return name


def _check_types(manifest: Manifest) -> None:
    sizes = [manifest.world_size, manifest.format, *(record.size for record in manifest.files.values())]
    texts = [manifest.layout, manifest.strategy, manifest.producer, *(each.crc32 for each in manifest.files.values())]
    if not all(isinstance(size, int) and 0 <= size < _MAX_SIZE for size in sizes):
        raise ValueError("a size is not a whole number that a file can have")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a name or checksum is not a string")


def find_damage(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Compare files with the manifest.

    Args:
        folder: The folder of the checkpoint.
        manifest: The manifest of the checkpoint.
        names: The files to compare.

    Returns:
        One line for each file that is missing, truncated, too long or changed. If all files match, the list is empty.

    Raises:
        CheckpointError: The manifest lists a file outside the folder.
    """
    lines = []
    for name in names:
        path, expected = inside(folder, name), manifest.files[name]
        if not path.is_file():
            lines.append(f"{name} is missing")
        elif (size := path.stat().st_size) != expected.size:
            lines.append(f"{name} has {size:,} bytes instead of {expected.size:,}")
        elif (found := make_record(path).crc32) != expected.crc32:
            lines.append(f"{name} has changed since it was written (checksum {found} instead of {expected.crc32})")
    return lines


def broken_checkpoint(folder: AnyPath, lines: Iterable[str]) -> BrokenCheckpointError:
    """Return the error for a checkpoint whose files do not match its manifest."""
    found = list(lines)
    shown = found[:_MAX_LINES] + ([f"and {len(found) - _MAX_LINES:,} more"] if len(found) > _MAX_LINES else [])
    text = "\n".join(f"  - {line}" for line in shown)
    return BrokenCheckpointError(
        f"Checkpoint {folder} is broken and was not loaded:\n{text}\n"
        f"Load an earlier one. (If another program changed files on purpose, remove {MANIFEST_NAME} and load again.)"
    )
