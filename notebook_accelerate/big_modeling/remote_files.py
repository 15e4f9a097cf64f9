"""Downloads weights from URLs, once per machine for all its ranks, and keeps them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from notebook_accelerate.big_modeling.remote_paths import AnyPath, RemotePath
from notebook_accelerate.big_modeling.weight_files import indexed_files
from notebook_accelerate.config.config_file import cache_folder


def weights_on_disk(file: AnyPath) -> Path:
    """Return the path of a file of weights, or an index with its files, on this machine's disk.

    Files from URLs are kept in ``$HF_HOME/accelerate/remote`` (or ``~/.cache/huggingface/accelerate/remote``), because
    models in use map them and read from them. A file that changed in its store is downloaded again.

    Args:
        file: The file; the files that an ``.index.json`` lists are in its folder.

    Raises:
        CheckpointError: The store cannot be read, or the index lists files outside its folder.
        BrokenCheckpointError: The index is broken.
    """
    if isinstance(file, Path):
        return file
    home = cache_folder() / "remote"
    home.mkdir(parents=True, exist_ok=True)
    with _locked(home / f"{_digest(str(file))}.lock"):
        names = [file.name]
        if file.suffix == ".json":
            listed = home / "index"
            names += sorted({str(each.relative_to(listed)) for each in indexed_files(file, listed).values()})
        versions = {name: _version(file.parent / name) for name in names}
        folder = home / f"{file.parent.name or 'weights'}-{_digest(str(file.parent), json.dumps(versions))}"
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            for name in names:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # `read_index` reports missing files
                    (file.parent / name).download(partial / name)
            partial.rename(folder)
    return folder / file.name


def _version(file: RemotePath) -> str:
    try:
        return file.version()
    except FileNotFoundError:
        return ""


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Exclude the other processes of the machine, which wait for the lock and then find the files downloaded."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
