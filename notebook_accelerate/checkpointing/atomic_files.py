"""Writes single files so that each is complete or unchanged, on the disk or behind a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.checkpointing import staging
from notebook_accelerate.hardware import temporary_folders

if TYPE_CHECKING:
    from notebook_accelerate.strategies.accelerator_protocol import RankControl

_PARTIAL = ".partial"


@contextmanager
def atomic_write(path: AnyPath) -> Iterator[Path]:
    """Yield a temporary file on the disk that replaces `path` when the block ends; on failure `path` is unchanged.

    Args:
        path: The destination; a URL is uploaded to.

    Raises:
        CheckpointError: The file could not be written or uploaded.
    """
    if not isinstance(path, Path):
        with temporary_folders.scratch() as folder:
            with _as_checkpoint_error(folder):
                yield folder / path.name
            path.upload(folder / path.name)
        return
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with _as_checkpoint_error(path):
            yield partial
            staging.sync_file(partial)
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, AttributeError, TypeError):  # caused by the object, not by the disk
        raise
    except Exception as error:
        raise staging.write_error(path, error) from error


@contextmanager
def local_copy(path: AnyPath) -> Iterator[Path]:
    """Yield a file on the disk to read: `path` itself, or a temporary copy of a remote file.

    Args:
        path: The file.
    """
    if isinstance(path, Path):
        yield path
        return
    with temporary_folders.scratch() as folder:
        path.download(folder / path.name)
        yield folder / path.name


def make_folder(folder: AnyPath) -> None:
    """Create a folder if it is missing; object stores have no folders to create.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: It cannot be created.
    """
    if isinstance(folder, Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise staging.write_error(folder, error) from error


def is_writer(path: AnyPath, state: RankControl, each_node: bool) -> bool:
    """Tell whether this rank writes a file that one rank writes for all others.

    Args:
        path: The destination; all machines see the same object store, so its writer is the main rank.
        state: The state of the world, or the Accelerator.
        each_node: Whether the first rank of every machine writes, for machines with disks of their own.
    """
    return state.is_local_main_process if each_node and isinstance(path, Path) else state.is_main_process
