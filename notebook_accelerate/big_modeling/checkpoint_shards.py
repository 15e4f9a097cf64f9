"""Find the files of a checkpoint on the disk or at a URL, and the tensors in them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from notebook_accelerate.big_modeling.module_tree import fit_compiled_names
from notebook_accelerate.config import constants
from notebook_accelerate.config.config_file import cache_folder
from notebook_accelerate.errors import BrokenCheckpointError
from notebook_accelerate.files.remote_paths import AnyPath, RemotePath, path_of
from notebook_accelerate.files.tensor_sources import MemorySource, TensorSource
from notebook_accelerate.files.weight_files import indexed_files, read_index, read_torch, safetensors_sources


@dataclass
class Shard:
    """A file of a checkpoint.

    Attributes:
        path: The path to the file.
        names: The names in the file of the tensors to load. If None, all tensors are loaded.
        wanted: The names in the model. If only prefixes of `torch.compile` make a name differ, the tensor gets the
            model's name.
    """

    path: Path
    names: set[str] | None = None
    wanted: frozenset[str] = frozenset()

    def sources(self) -> dict[str, TensorSource]:
        """Return the source of each tensor. Only the header is read if the file has the safetensors format.

        Raises:
            CheckpointError: The file is corrupt, lacks tensors that the index lists, or contains more than plain data.
        """
        found = self._all()
        if self.names is None:
            return {new: found[name] for name, new in self.renamed(found).items()}
        if missing := sorted(self.names - found.keys()):
            raise BrokenCheckpointError(
                f"{self.path} lacks {', '.join(missing[:5])}, which its index lists; download it again"
            )
        return {new: found[name] for name, new in self.renamed(name for name in found if name in self.names).items()}

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Return the name in the model for each name in the file."""
        return fit_compiled_names(names, self.wanted)

    def _all(self) -> dict[str, TensorSource]:
        return dict(safetensors_sources(self.path)) if self.path.suffix == ".safetensors" else self._torch()

    def _torch(self) -> dict[str, TensorSource]:
        state = read_torch(self.path, mmap=True) if _is_zip(self.path) else read_torch(self.path)
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            raise BrokenCheckpointError(f"{self.path} is broken: it contains no named tensors.")
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        return {name: MemorySource(value, tensors, name) for name, value in tensors.items()}


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def find_shards(checkpoint: str | os.PathLike[str], wanted: Iterable[str] = ()) -> list[Shard]:
    """Find the files of a checkpoint.

    Args:
        checkpoint: A file of weights, an ``.index.json``, or a folder that contains one of them. URLs of these are
            downloaded first (see `weights_on_disk`).
        wanted: The names in the model (see `Shard`).

    Raises:
        ValueError: The checkpoint contains no weights.
        CheckpointError: The index lists files that are missing or outside its folder.
    """
    location = path_of(checkpoint)
    if location.is_dir():
        location = _weights_in(location)
    elif not location.is_file():
        raise ValueError(
            "`checkpoint` should be the path to a file containing a whole state dict, or the index of a sharded "
            "checkpoint, or a folder containing a sharded checkpoint or the whole state dict, but got "
            f"{checkpoint}."
        )
    path = weights_on_disk(location)
    if path.suffix != ".json":
        return [Shard(path, None, frozenset(wanted))]
    names: dict[Path, set[str]] = {}
    for name, file in read_index(path).items():
        names.setdefault(file, set()).add(name)
    return [Shard(file, names[file], frozenset(wanted)) for file in sorted(names)]


def _weights_in(folder: AnyPath) -> AnyPath:
    for name in (constants.WEIGHTS_NAME, constants.SAFE_WEIGHTS_NAME):
        if (folder / name).is_file():
            return folder / name
    indexes = [path for path in folder.iterdir() if path.name.endswith(".index.json")]
    if len(indexes) == 1:
        return indexes[0]
    if indexes:
        raise ValueError(
            f"{folder} contains more than one `.index.json` file; delete all but one of them: "
            + ", ".join(sorted(index.name for index in indexes))
        )
    raise ValueError(
        f"{folder} is not a folder containing a `.index.json` file or a pytorch_model.bin or a model.safetensors file"
    )


def tensor_names(shards: Iterable[Shard]) -> set[str]:
    """Return the names of all tensors in a checkpoint, from its index and headers if possible.

    Args:
        shards: The files of the checkpoint.
    """
    return {
        name
        for shard in shards
        for name in (shard.sources() if shard.names is None else shard.renamed(shard.names).values())
    }


# ---- downloads, once per machine for all ranks


def weights_on_disk(file: AnyPath) -> Path:
    """Return the path on this machine's disk of a file of weights, or of an index and the files that it lists.

    Files from URLs are kept in ``$HF_HOME/accelerate/remote`` (or ``~/.cache/huggingface/accelerate/remote``), because
    models may map them and read from them while in use. A file that has changed in its store is downloaded again.

    Args:
        file: The file of weights, or an ``.index.json``. The files that it lists are in the same folder.

    Raises:
        CheckpointError: The store cannot be read, or the index lists files outside its folder.
        BrokenCheckpointError: The index is corrupt.
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
                with suppress(FileNotFoundError):  # `read_index` reports missing files.
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
    """Hold a lock while downloading. Other processes on the machine wait for the lock, and then find the files."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
