"""Making whole files of a sharded model's folder, in one process."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from notebook_accelerate.big_modeling.files import read_torch
from notebook_accelerate.checkpointing.model import write_weights
from notebook_accelerate.config import constants
from notebook_accelerate.state import PartialState

_METADATA = ".metadata"


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the weights of a sharded model as whole files, on the main rank.

    Args:
        checkpoint_dir: The folder pytorch_model_fsdp_0, or the checkpoint that it is in.
        output_path: The folder for model.safetensors, or pytorch_model.bin; made where it does not exist.
        safe_serialization: Write safetensors rather than torch's format.
        remove_checkpoint_dir: Remove the sharded folder afterwards.

    Raises:
        ValueError: There is no sharded model.
    """
    if not PartialState().is_main_process:
        return
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    shards = _shards_in(Path(checkpoint_dir))
    output = Path(output_path)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as scratch:
        whole = Path(scratch) / "whole.bin"
        dcp_to_torch_save(shards, whole)
        state = read_torch(whole, map_location="cpu")
        write_weights(state.get("model", state), output, "10GB", safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(shards)


def _shards_in(folder: Path) -> Path:
    inner = sorted(folder.glob(f"{constants.FSDP_MODEL_NAME}_*/{_METADATA}")) if folder.is_dir() else []
    if (folder / _METADATA).is_file():
        return folder
    if len(inner) == 1:
        return inner[0].parent
    found = ", ".join(path.parent.name for path in inner) or "no sharded model"
    raise ValueError(
        f"{folder} holds {found}; pass the folder of one, as save_state writes it for "
        f'SHARDED_STATE_DICT: merge_fsdp_weights("checkpoint/{constants.FSDP_MODEL_NAME}_0", "merged")'
    )
