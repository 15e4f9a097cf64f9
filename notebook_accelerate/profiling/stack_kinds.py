"""What a sampled stack of the main thread does, by the files and functions in it."""

from __future__ import annotations

from notebook_accelerate.errors import FrameInfo


def is_logging(frames: list[FrameInfo]) -> bool:
    """Whether a stack is in printing or logging."""
    for frame in frames:
        name = frame.filename.replace("\\", "/")
        if name.endswith("/tqdm/std.py") and not frame.function.endswith("__iter__"):  # which waits for the next batch
            return True
        if name.endswith(("/logging/__init__.py", "notebook_accelerate/worker/console.py")):
            return True
        if "notebook_accelerate/tracking/" in name:
            return True
    return bool(frames) and frames[-1].source.lstrip().startswith("print(")


def is_waiting_for_batch(frames: list[FrameInfo]) -> bool:
    """Whether a stack waits for a batch of a DataLoader's worker processes."""
    return any(
        frame.filename.replace("\\", "/").endswith("torch/utils/data/dataloader.py")
        and frame.function.endswith("_get_data")
        for frame in reversed(frames)
    )


def is_saving(frames: list[FrameInfo]) -> bool:
    """Whether a stack is in saving a checkpoint."""
    for frame in frames:
        name = frame.filename.replace("\\", "/")
        if "torch/serialization.py" in name and "save" in frame.function:
            return True
        if "notebook_accelerate/checkpointing/" in name and "load" not in frame.function:
            return True
        if "safetensors" in name and "save" in frame.function:
            return True
    return False


__all__ = ["is_logging", "is_saving", "is_waiting_for_batch"]
