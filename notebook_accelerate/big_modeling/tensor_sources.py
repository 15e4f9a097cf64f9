"""Where an offloaded tensor is: in memory, or at a place in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from notebook_accelerate.big_modeling import file_mapping
from notebook_accelerate.big_modeling.offload_folder import OffloadedWeightsLoader, PrefixedDataset
from notebook_accelerate.big_modeling.weight_files import inside, safetensors_layout
from notebook_accelerate.errors import BrokenCheckpointError

_ALIGNMENT = 64
"""Bytes: what torch's CPU allocator gives. With 8, as safetensors has, MKL's products of vectors round differently."""


class Source:
    """A tensor that can be read again and again.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """

    pinned: torch.Tensor | None = None
    """Where it is in pinned memory."""
    offset = 0
    """Where it begins in its file, in bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.nbytes = dtype.itemsize * int(torch.Size(shape).numel())

    def read_into(self, tensor: torch.Tensor) -> None:
        """Fill a tensor of the same shape and dtype on the CPU."""
        raise NotImplementedError

    def pin(self, known: dict[int, torch.Tensor]) -> None:
        """Bring it to pinned memory, where it is in memory.

        Args:
            known: What is pinned already, by the address it had before; tied weights are pinned once.

        Raises:
            RuntimeError: The system pins no more memory.
        """

    def load(self, device: torch.device) -> torch.Tensor:
        """Return it on a device, in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor.to(device)


class MemorySource(Source):
    """A tensor in memory.

    Args:
        tensor: The tensor.
        state: The dictionary that has it, which gets the pinned one in its place.
        name: Its name there.
    """

    def __init__(self, tensor: torch.Tensor, state: Any, name: str) -> None:
        super().__init__(tuple(tensor.shape), tensor.dtype)
        self._tensor, self._state, self._name = tensor.detach(), state, name

    def read_into(self, tensor: torch.Tensor) -> None:
        """Copy it."""
        tensor.copy_(self._tensor)

    def pin(self, known: dict[int, torch.Tensor]) -> None:
        """Pin it; the dictionary that had it gets the pinned one, so that memory does not double."""
        if self.pinned is not None:
            return
        address = self._tensor.data_ptr()
        other = known.get(address)
        if other is None or other.shape != self._tensor.shape or other.dtype != self.dtype:
            other = known[address] = self._tensor.contiguous().pin_memory()
        self.pinned = self._tensor = other
        if isinstance(self._state, dict) and self._name in self._state:
            self._state[self._name] = other

    def load(self, device: torch.device) -> torch.Tensor:
        """Return it on a device."""
        return self._tensor.to(device)


class FileSource(Source):
    """A tensor at a place in a file.

    Args:
        path: The file.
        offset: Where it begins, in bytes.
        shape: Its shape.
        dtype: Its dtype.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.path, self.offset = path, offset

    def read_into(self, tensor: torch.Tensor) -> None:
        """Read it; the interpreter is free meanwhile."""
        if not self.nbytes:
            return
        # .data: the tensor may be a parameter's memory, and nobody computes with it now.
        flat: Any = tensor.data.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(flat)
        done = 0
        # Opened each time: a descriptor that is kept would outlive the model, and miss that the file was replaced.
        with self.path.open("rb", buffering=0) as file:
            while done < self.nbytes:
                count = os.preadv(file.fileno(), [view[done:]], self.offset + done)
                if not count:
                    raise BrokenCheckpointError(f"{self.path} ends too early: it changed since it was offloaded.")
                done += count

    def load(self, device: torch.device) -> torch.Tensor:
        """Return it on a device; on the CPU as a map of the file, where kernels see no difference."""
        return self.mapped() if device.type == "cpu" and self.aligned else super().load(device)

    @property
    def aligned(self) -> bool:
        """Whether it begins in its file as memory does: kernels choose by that, and their last bits with them."""
        return self.offset % _ALIGNMENT == 0

    def mapped(self) -> torch.Tensor:
        """Return it mapped into memory: read when it is used, copied when it is written to."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        pages = np.memmap(self.path, dtype=np.uint8, mode="c", offset=self.offset, shape=(self.nbytes,))
        return torch.from_numpy(pages).view(self.dtype).reshape(self.shape)


def source_of(weights: Mapping[str, Any], name: str) -> Source | None:
    """Return where a tensor of an offloaded model is.

    Args:
        weights: What a hook has as its weights.
        name: The tensor's name there.

    Returns:
        The source; None where this kind of mapping must be asked anew each time.
    """
    weights, name = _unprefixed(weights, name)
    if not isinstance(weights, OffloadedWeightsLoader):
        return None
    if name in weights.state_dict:
        return MemorySource(weights.state_dict[name], weights.state_dict, name)
    info = weights.index[name]
    if info.get("safetensors_file") is not None:
        return _in_safetensors(Path(info["safetensors_file"]), info.get("weight_name", name), info)
    shape = tuple(info["shape"])
    path = inside(Path(weights.save_folder or "."), f"{name}.dat")
    source = FileSource(path, 0, shape, getattr(torch, info["dtype"]))
    found = path.stat().st_size if path.is_file() else -1
    if found != source.nbytes:
        raise BrokenCheckpointError(f"{path} has {found:,} bytes instead of {source.nbytes:,}: offload again.")
    return source


def _unprefixed(weights: Any, name: str) -> tuple[Any, str]:
    while isinstance(weights, PrefixedDataset):
        name = weights.prefix + name
        weights = weights.dataset
    return weights, name


def _in_safetensors(path: Path, name: str, info: Mapping[str, Any]) -> Source | None:
    place = safetensors_layout(path).get(name)
    if place is None:
        raise BrokenCheckpointError(f"{path} holds no tensor {name!r}")
    if "dtype" in info and getattr(torch, info["dtype"]) != place.dtype:
        return None  # it is converted each time
    return FileSource(path, place.offset, place.shape, place.dtype)


def loader_of(weights: Any) -> OffloadedWeightsLoader | None:
    """Return the loader at the bottom of prefixed views; None where there is none."""
    weights, _ = _unprefixed(weights, "")
    return weights if isinstance(weights, OffloadedWeightsLoader) else None


def in_memory(weights: Any, name: str) -> bool:
    """Tell whether a mapping has a tensor in memory, rather than mapping its file anew each time it is asked.

    Args:
        weights: What a hook has as its weights.
        name: The tensor's name there.
    """
    weights, name = _unprefixed(weights, name)
    return name in weights.state_dict if isinstance(weights, OffloadedWeightsLoader) else isinstance(weights, dict)


def mapped_in_place(source: Source | None, device: torch.device) -> bool:
    """Tell whether a tensor's part of its file is best mapped into the arena: large, aligned, on the CPU.

    Args:
        source: Where the tensor is.
        device: Where it is computed with.
    """
    if device.type != "cpu" or not isinstance(source, FileSource):
        return False
    return source.nbytes >= file_mapping.LEAST and source.aligned and file_mapping.supported()
