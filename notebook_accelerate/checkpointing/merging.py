"""Merges the folder of a sharded model into whole files, in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from notebook_accelerate.big_modeling.remote_paths import AnyPath, path_of
from notebook_accelerate.big_modeling.weight_files import inside, plain_data_only, read_torch
from notebook_accelerate.checkpointing.atomic_files import make_folder
from notebook_accelerate.checkpointing.model_weights import write_weights
from notebook_accelerate.config import constants
from notebook_accelerate.hardware import temporary_folders
from notebook_accelerate.state import PartialState
from notebook_accelerate.strategies.sharding.shard_reader import read_metadata_in

_METADATA = ".metadata"


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a sharded model as whole files, on the main rank.

    Args:
        checkpoint_dir: Folder or URL of pytorch_model_fsdp_0, or of the checkpoint that contains it.
        output_path: Folder or URL for model.safetensors or pytorch_model.bin; created if missing.
        safe_serialization: Write safetensors rather than torch's format.
        remove_checkpoint_dir: Remove the sharded folder afterwards.

    Raises:
        ValueError: The folder contains no sharded model, or several.
        CheckpointError: A store could not be read, its metadata contains more than data, or the files could not be
            written.
    """
    if not PartialState().is_main_process:
        return
    shards, output = _shards_in(path_of(checkpoint_dir)), path_of(output_path)
    make_folder(output)
    # On the disk of the output where it is local: the file is as large as the result.
    scratch: AbstractContextManager[str | Path] = (
        tempfile.TemporaryDirectory(dir=output) if isinstance(output, Path) else temporary_folders.scratch()
    )
    with scratch as temporary, _local_folder(shards) as folder:
        whole = Path(temporary) / "whole.bin"
        _write_whole(folder, whole)
        state = read_torch(whole, map_location="cpu")
        write_weights(state.get("model", state), output, "10GB", safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(shards) if isinstance(shards, Path) else shards.remove_tree()


def _write_whole(folder: Path, whole: Path) -> None:
    """Write the shards of a folder into one file."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    read_metadata_in(folder)
    try:
        with plain_data_only():
            dcp_to_torch_save(folder, whole)
    except CheckpointException as error:  # not an Exception
        raise error.failures[0][0] from error


@contextmanager
def _local_folder(shards: AnyPath) -> Iterator[Path]:
    """Yield a folder on the disk that contains the files: `shards` itself, or a temporary copy of a remote one."""
    if isinstance(shards, Path):
        yield shards
        return
    with temporary_folders.scratch() as folder:
        for name in shards.files():
            (shards / name).download(inside(folder, name))
        yield folder


def _shards_in(folder: AnyPath) -> AnyPath:
    if (folder / _METADATA).is_file():
        return folder
    prefix = f"{constants.FSDP_MODEL_NAME}_"
    entries: list[AnyPath] = sorted(folder.iterdir(), key=str) if folder.is_dir() else []
    inner = [entry for entry in entries if entry.name.startswith(prefix) and (entry / _METADATA).is_file()]
    if len(inner) == 1:
        return inner[0]
    found = ", ".join(path.name for path in inner) or "no sharded model"
    raise ValueError(
        f"{folder} contains {found}; pass the folder of one model, which save_state writes with SHARDED_STATE_DICT: "
        f'merge_fsdp_weights("checkpoint/{constants.FSDP_MODEL_NAME}_0", "merged")'
    )
