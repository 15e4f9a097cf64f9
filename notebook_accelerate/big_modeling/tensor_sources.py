"""Where an offloaded tensor is read from: memory, or a part of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate.big_modeling import file_mapping
from notebook_accelerate.torch_internals import tensor_version

_ALIGNMENT = 64
"""Bytes, as torch's CPU allocator aligns. With 8, as safetensors has, MKL's products of vectors round differently."""


class Source:
    """A tensor that can be read repeatedly.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """

    pinned: torch.Tensor | None = None
    """The tensor in pinned memory."""
    mappable = False
    """Whether `map` is possible, and faster than `read_into`."""
    address: int | None = None
    """The address of a tensor in memory, or None for a tensor in a file."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.nbytes = dtype.itemsize * int(torch.Size(shape).numel())

    def read_into(self, tensor: torch.Tensor) -> None:
        """Fill a tensor of the same shape and dtype on the CPU."""
        raise NotImplementedError

    def read(self) -> torch.Tensor:
        """Return the tensor on the CPU, in new memory."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def version(self) -> Any:
        """Return a value that changes with the tensor, so that what was read before is not used."""
        return None

    def map(self, *, read_ahead: bool = True) -> torch.Tensor:
        """Return the tensor as a mapping of its file.

        Args:
            read_ahead: Read it into memory now, instead of on first access.
        """
        raise NotImplementedError

    def pin(self, known: dict[int, torch.Tensor]) -> None:
        """Move the tensor to pinned memory, where it is in memory.

        Args:
            known: Tensors that are pinned already, by their former address; tied weights are pinned once.

        Raises:
            RuntimeError: The system pins no more memory.
        """

    def load(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on a device, in new memory."""
        return self.read().to(device)


class MemorySource(Source):
    """A tensor in memory.

    Args:
        tensor: The tensor.
        state: The dictionary that contains it; `pin` replaces it there.
        name: Its name in `state`.
    """

    def __init__(self, tensor: torch.Tensor, state: Any, name: str) -> None:
        super().__init__(tuple(tensor.shape), tensor.dtype)
        self._tensor, self._state, self._name = tensor, state, name
        self.address = tensor.data_ptr()

    def version(self) -> Any:
        """Return the tensor's identity and version, after taking over one that has replaced it in its dictionary."""
        found = self._state.get(self._name) if isinstance(self._state, dict) else None
        if found is not None and found is not self._tensor:
            super().__init__(tuple(found.shape), found.dtype)
            self._tensor, self.pinned, self.address = found, None, found.data_ptr()
        return id(self._tensor), tensor_version(self._tensor)

    def read_into(self, tensor: torch.Tensor) -> None:
        """Copy the tensor."""
        tensor.data.copy_(self._tensor.detach())

    def pin(self, known: dict[int, torch.Tensor]) -> None:
        """Pin the tensor, and replace it in its dictionary, so that memory does not double."""
        self.version()
        if self.pinned is not None:
            return
        own = self._tensor.detach()
        other = known.get(own.data_ptr())
        if other is None or (other.shape, other.stride(), other.dtype) != (own.shape, own.stride(), own.dtype):
            other = own.contiguous().pin_memory()
            if own.is_contiguous() and own.data_ptr():  # tensors that wrap others have no memory: all have address 0
                known[own.data_ptr()] = other
        self.pinned = self._tensor = other
        if isinstance(self._state, dict) and self._name in self._state:
            self._state[self._name] = other

    def load(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on a device."""
        self.version()
        return self._tensor.detach().to(device)


class FileSource(Source):
    """A tensor in a file.

    Args:
        path: The file.
        offset: The tensor's first byte.
        shape: Its shape.
        dtype: Its dtype.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.path, self.offset = path, offset
        self._is_aligned = offset % _ALIGNMENT == 0  # kernels choose by alignment, and their last bits with them
        large = self.nbytes >= file_mapping.MIN_BYTES
        self.mappable = large and self._is_aligned and file_mapping.can_read_ahead()

    def read_into(self, tensor: torch.Tensor) -> None:
        """Read the tensor; the interpreter is free meanwhile."""
        if not self.nbytes:
            return
        # .data: the tensor may be a parameter's memory, and nothing computes with it now.
        flat: Any = tensor.data.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(flat)
        done = 0
        with file_mapping.opened(self.path) as descriptor:
            while done < self.nbytes:
                count = os.preadv(descriptor, [view[done:]], self.offset + done)
                if not count:
                    raise file_mapping.too_short(self.path)
                done += count

    def map(self, *, read_ahead: bool = True) -> torch.Tensor:
        """Return the tensor as a mapping of its file; see `Source.map`."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        data = file_mapping.map_file(self.path, self.offset, self.nbytes, read_ahead=read_ahead)
        return data.view(self.dtype).view(self.shape)

    def load(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on a device; on the CPU as a mapping of its file, where kernels see no difference."""
        return self.map(read_ahead=False) if device.type == "cpu" and self._is_aligned else super().load(device)
