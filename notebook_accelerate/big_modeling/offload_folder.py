"""Read and write Accelerate's offload folders, which contain one ``.dat`` file per tensor and an ``index.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.files.tensor_sources import FileSource, MemorySource, TensorSource
from notebook_accelerate.files.untrusted_files import read_json
from notebook_accelerate.files.weight_files import inside, safetensors_sources

INDEX_NAME = "index.json"


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write a tensor to a file.

    Args:
        weight: The tensor to write.
        weight_name: The name of the tensor, which is written to ``{weight_name}.dat``.
        offload_folder: The folder to write to.
        index: The index to add the dtype and shape to. If None, a new one is created.

    Returns:
        The index, which `save_offload_index` writes.

    Raises:
        CheckpointError: The file could not be written, for example because the disk is full.
    """
    index = {} if index is None else index
    dtype = str(weight.dtype).removeprefix("torch.")
    flat = weight.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) if weight.numel() else None
    path = Path(offload_folder) / f"{weight_name}.dat"
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            if flat is not None:
                file.write(flat.numpy().data)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{weight_name} ({weight.nbytes:,} bytes) could not be offloaded to {offload_folder}: {error.strerror}. "
            "The file was removed; pass an offload folder that exists, with enough free space."
        ) from error
    index[weight_name] = {"dtype": dtype, "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Map a tensor's file into memory.

    Values are read on first access, and writing to the tensor does not change the file.

    Args:
        weight_file: The ``.dat`` file.
        weight_info: The "dtype" and "shape" of the tensor.

    Raises:
        BrokenCheckpointError: The file is missing, or does not have the expected size.
    """
    return _dat_source(Path(weight_file), weight_info).map(read_ahead=False)


def _dat_source(path: Path, info: Mapping[str, Any]) -> FileSource:
    source = FileSource(path, 0, tuple(info["shape"]), getattr(torch, info["dtype"]))
    found = path.stat().st_size if path.is_file() else None
    if found != source.nbytes:
        problem = "is missing" if found is None else f"has {found:,} bytes instead of {source.nbytes:,}"
        raise BrokenCheckpointError(f"{path} {problem}. Offload the model again.")
    return source


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Add tensors to the index of a folder.

    Args:
        index: The dtype and shape of each tensor by name. If it is empty, nothing is written.
        offload_folder: The folder that contains the tensors.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    known = read_json(path) if path.is_file() else {}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps({**known, **index}, indent=2), encoding="utf-8")
    partial.replace(path)


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors to a folder, each to a separate file, and write the index.

    Args:
        save_dir: The offload folder, which is created if it does not exist.
        state_dict: The tensors, by name.

    Raises:
        CheckpointError: A file could not be written.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        index = offload_weight(tensor, name, save_dir, index=index)
    save_offload_index(index, save_dir)


class PrefixedDataset(Mapping[str, Any]):
    """A view of a mapping for one module, without the module's prefix in the names.

    Args:
        dataset: The mapping whose names include the prefix.
        prefix: The name of the module, followed by a dot.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """A mapping of named tensors that may be in memory, in an offload folder, or in safetensors files.

    Args:
        state_dict: The tensors that are in memory.
        save_folder: An offload folder with its ``index.json``.
        index: An index to use instead of the folder's. An entry with "safetensors_file" refers to a safetensors file.
        device: The device to put tensors from safetensors files on. If None, they are put on the CPU.

    Raises:
        ValueError: None of the first three arguments is given.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "Need either a `state_dict`, a `save_folder` or an `index` containing offloaded weights: "
                'OffloadedWeightsLoader(save_folder="a_folder")'
            )
        self.state_dict: Any = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = read_json(Path(save_folder) / INDEX_NAME)
        self.index: Mapping[str, Any] = {} if index is None else index
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self.device = device
        self.prefetchers: dict[torch.device, Any] = {}
        """The prefetcher for each device."""

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            tensor: torch.Tensor = self.state_dict[key]
            return tensor
        info, source = self.index[key], self._file_source(key)
        if info.get("safetensors_file") is None:
            return source.map(read_ahead=False)
        tensor = source.load(torch.device(self.device or "cpu"))
        return tensor.to(getattr(torch, info["dtype"])) if "dtype" in info else tensor

    def source(self, key: str) -> TensorSource:
        """Return the source of a tensor. The source keeps the dtype that the tensor has in its file.

        Args:
            key: The name of the tensor.

        Raises:
            BrokenCheckpointError: The tensor's file is missing, or does not have the expected size.
            CheckpointError: The name refers to a file outside of the folder.
        """
        if key in self.state_dict:
            return MemorySource(self.state_dict[key], self.state_dict, key)
        return self._file_source(key)

    def _file_source(self, key: str) -> FileSource:
        info = self.index[key]
        if info.get("safetensors_file") is None:
            return _dat_source(inside(Path(self.save_folder or "."), f"{key}.dat"), info)
        path, name = Path(info["safetensors_file"]), info.get("weight_name", key)
        source = safetensors_sources(path).get(name)
        if source is None:
            raise BrokenCheckpointError(f"{path} contains no tensor {name!r}. Offload the model again.")
        return source

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def unprefixed(weights: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, str]:
    """Return the mapping inside nested prefixed views, and the prefix that the views remove."""
    prefix = ""
    while isinstance(weights, PrefixedDataset):
        prefix = weights.prefix + prefix
        weights = weights.dataset
    return weights, prefix


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: list[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors that belong to some modules.

    Args:
        state_dict: Named tensors.
        submodule_names: The names of modules or tensors.
    """
    found: dict[str, torch.Tensor] = {}
    for outer in submodule_names:
        prefix = f"{outer}." if outer else ""
        found.update({name: value for name, value in state_dict.items() if name == outer or name.startswith(prefix)})
    return found
