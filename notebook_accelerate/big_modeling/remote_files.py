"""Weights behind a URL, on the disk of a machine: downloaded once, for all its ranks, and kept."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from notebook_accelerate.big_modeling.remote_paths import AnyPath, RemotePath
from notebook_accelerate.big_modeling.weight_files import inside
from notebook_accelerate.config.config_file import cache_folder
from notebook_accelerate.errors import BrokenCheckpointError


def weights_on_disk(file: AnyPath) -> Path:
    """Return where a file of weights, or an index with its files, is on this machine's disk.

    What is behind a URL goes to ``$HF_HOME/accelerate/remote`` (or ``~/.cache/huggingface/accelerate/remote``) and
    stays there: models map it and read from it while they are in use. A file that has changed in its store is
    downloaded anew.

    Args:
        file: The file; the other files of an ``.index.json`` are beside it.

    Raises:
        CheckpointError: The store cannot be read, or the index names files outside its folder.
        BrokenCheckpointError: It is no index.
    """
    if isinstance(file, Path):
        return file
    home = cache_folder() / "remote"
    home.mkdir(parents=True, exist_ok=True)
    with _alone(home / f"{_short(str(file))}.lock"):
        names = _names_with(file, home)
        versions = {name: _version(file.parent / name) for name in names}
        folder = home / f"{file.parent.name or 'weights'}-{_short(str(file.parent), json.dumps(versions))}"
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            for name in names:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # whoever reads the index says what is missing
                    (file.parent / name).download(partial / name)
            partial.rename(folder)
    return folder / file.name


def _names_with(file: RemotePath, home: Path) -> list[str]:
    """Return the name of a file and, where it is an index, those of its files; all within its folder."""
    if file.suffix != ".json":
        return [file.name]
    try:
        names = sorted(set(json.loads(file.read_text())["weight_map"].values()))
        for name in names:
            inside(home / "index", name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpointError(f"{file} is broken: it holds no weight_map ({error}).") from error
    return [file.name, *names]


def _version(file: RemotePath) -> str:
    try:
        return file.version()
    except FileNotFoundError:
        return ""


def _short(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let one process of the machine at a time in; the others find what it has brought."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


__all__ = ["weights_on_disk"]
