"""`load_state`: go on where a checkpoint was made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate.big_modeling.remote_paths import AnyPath, path_of
from notebook_accelerate.checkpointing import capture, checkpoint_layout, numbering
from notebook_accelerate.checkpointing.checkpoint_stores import Reading, store_of
from notebook_accelerate.checkpointing.manifest import Manifest, broken, faults, read_manifest
from notebook_accelerate.checkpointing.rank_agreement import agree
from notebook_accelerate.checkpointing.rng_states import restore_rng_state
from notebook_accelerate.checkpointing.sharded_protocol import WHOLE, layout_of, schedules_to_save, writes_itself
from notebook_accelerate.checkpointing.state_saving import wait_for_saves
from notebook_accelerate.checkpointing.tensor_files import read
from notebook_accelerate.checkpointing.tied_tensors import add_tied_names
from notebook_accelerate.collectives.collective_watchdog import meet
from notebook_accelerate.config import constants
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError, CheckpointMismatchError
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.state.world import world_from_environ
from notebook_accelerate.strategies import extract_model_from_parallel

_WHAT = "load_state"


def load_state(
    accelerator: Any,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    elastic: bool = False,
    **load_model_func_kwargs: Any,
) -> None:
    """Load what `save_state` saved, here or in Accelerate, into the same prepared objects; every rank must call this.

    Args:
        accelerator: The Accelerator.
        input_dir: The folder, or a URL that fsspec knows: its files come to each machine's temporary files first, once
            per machine. None takes the newest automatically named checkpoint.
        load_kwargs: More arguments of torch.load, for instance ``{"weights_only": False}`` for a folder you trust.
        elastic: Take a checkpoint of another number of ranks too; ranks beyond its own keep their random states.
        load_model_func_kwargs: More arguments of ``model.load_state_dict``, for instance ``strict=False``.

    Raises:
        ValueError: There is no such folder, or none is named.
        BrokenCheckpointError: It was never finished, or files are damaged.
        CheckpointMismatchError: It belongs to another world size, strategy or set of registered objects.
    """
    if writes_itself(accelerator.strategy):
        meet(_WHAT)
    wait_for_saves(_WHAT)
    where = _find(accelerator, None if input_dir is None else path_of(input_dir).absolute())
    with store_of(where).reading(accelerator.local_process_index) as reading:
        manifest = _checked(where, reading)
        folder = reading.folder
        agree(_mismatch(accelerator, where, manifest, elastic), _WHAT)
        models = list(accelerator._models)
        for hook in list(accelerator._load_model_state_pre_hook.values()):
            hook(models, str(folder))
        try:
            _load_all(accelerator, models, folder, manifest, load_kwargs or {}, load_model_func_kwargs)
        except Exception as error:
            agree(error, _WHAT)
            raise
        agree(None, _WHAT)
    _continue_numbering(accelerator, where)


def _find(accelerator: Any, input_dir: AnyPath | None) -> AnyPath:
    """Return the folder to load; unfinished moves in it are finished first."""
    failure: Exception | None = None
    folder: AnyPath = Path()
    try:
        folder = _named(input_dir) if input_dir is not None else _newest(accelerator)
        store_of(folder).finish(accelerator.is_main_process, accelerator.is_local_main_process)
    except (ValueError, CheckpointError, OSError) as error:
        failure = error
    agree(failure, _WHAT)
    return folder


def _named(folder: AnyPath) -> AnyPath:
    if folder.is_dir():
        return folder
    _refuse_unfinished(folder)
    raise ValueError(f"Tried to find {folder} but folder does not exist")


def _refuse_unfinished(folder: AnyPath) -> None:
    if (left := store_of(folder).unfinished()) is not None:
        raise BrokenCheckpointError(
            f"Checkpoint {folder} was never finished: its process ended while writing, what is there is in {left}. "
            "Load an earlier one."
        )


def _newest(accelerator: Any) -> AnyPath:
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        raise ValueError(
            "No input_dir provided and automatic checkpoint naming is disabled. Name the folder: "
            'load_state("my_checkpoint")'
        )
    root = numbering.project_directory(project)
    found = numbering.automatic_checkpoints(root)
    if not found:
        raise ValueError(
            f"There is no checkpoint in {root / checkpoint_layout.CHECKPOINTS_FOLDER} yet: call save_state() first"
        )
    return found[-1]


def _checked(where: AnyPath, reading: Reading) -> Manifest | None:
    """Read the manifest, and bring this rank's share of the files to its machine and compare it with the manifest."""
    manifest, failure = None, None
    try:
        manifest = read_manifest(where)
        if manifest is None:
            _refuse_unfinished(where)
        share = store_of(where).fetch(None if manifest is None else sorted(manifest.files), reading)
        if manifest is not None and (lines := faults(reading.folder, manifest, share)):
            raise broken(where, lines)
    except (CheckpointError, OSError) as error:
        failure = error
    agree(failure, _WHAT)
    return manifest


def _mismatch(accelerator: Any, folder: AnyPath, manifest: Manifest | None, elastic: bool) -> CheckpointError | None:
    """Compare what made the checkpoint with what is here."""
    here = accelerator.num_processes
    names = capture.names_in(folder, None if manifest is None else list(manifest.files))
    want = layout_of(accelerator.strategy)
    found = manifest.layout if manifest is not None else _guessed_layout(names)
    if found != want:
        return CheckpointMismatchError(
            f"Checkpoint {folder} was written by the strategy {found!r}, this run's layout is {want!r}. "
            "Load it with the strategy that wrote it, or load a model saved by accelerator.save_model."
        )
    ranks = {manifest.world_size} if manifest is not None else _world_sizes(names)
    if ranks and here not in ranks and not elastic:
        return CheckpointMismatchError(
            f"Checkpoint {folder} was written by {min(ranks)} ranks, this run has {here}. Start {min(ranks)} ranks, "
            "or take it as it is: accelerator.load_state(folder, elastic=True); ranks without a file in it then "
            "keep their random state."
        )
    return _custom_mismatch(accelerator, folder, names)


def _guessed_layout(names: list[str]) -> str:
    """Guess which strategy wrote a folder that has no manifest."""
    if any(name.startswith(constants.FSDP_MODEL_NAME) for name in names):
        return "fsdp"
    if any(name in {"latest", "zero_to_fp32.py"} for name in names):
        return "deepspeed"
    return WHOLE


def _world_sizes(names: list[str]) -> set[int]:
    """Return the world sizes that a folder without a manifest may come from.

    On machines with disks of their own a folder holds the random states of its machine's ranks only.
    """
    count = capture.count_files(names, constants.RNG_STATE_NAME + r"_\d+\.pkl")
    world = world_from_environ()
    return {count, world.size} if count == world.local_size else {count} - {0}


def _custom_mismatch(accelerator: Any, folder: AnyPath, names: list[str]) -> CheckpointError | None:
    count = capture.count_files(names, checkpoint_layout.CUSTOM_OBJECT_NAME + r"_\d+\.pkl")
    registered = len(accelerator._custom_objects)
    if count == registered:
        return None
    return CheckpointMismatchError(
        f"Number of custom checkpoints in folder {folder} does not match the number of registered objects:\n"
        f"  found checkpoints: {count}\n  registered objects: {registered}\n"
        "Call accelerator.register_for_checkpointing with the same objects as before saving."
    )


def _load_all(
    accelerator: Any,
    models: list[torch.nn.Module],
    folder: Path,
    manifest: Manifest | None,
    options: dict[str, Any],
    model_options: dict[str, Any],
) -> None:
    names = capture.names_in(folder, None if manifest is None else list(manifest.files))
    if writes_itself(accelerator.strategy):
        accelerator.strategy.load_state(folder, models=models, **model_options)
    else:
        for index, model in enumerate(models):
            load_model(model, _model_path(folder, index, names), model_options)
        _load_each(folder, constants.OPTIMIZER_NAME, accelerator._optimizers, options)
    _load_each(folder, constants.SCHEDULER_NAME, schedules_to_save(accelerator._schedulers), options)
    _load_loaders(accelerator, folder, names, options)
    if accelerator.scaler is not None and constants.SCALER_NAME in names:
        accelerator.scaler.load_state_dict(read(folder / constants.SCALER_NAME, **options))
    for index, custom in enumerate(accelerator._custom_objects):
        custom.load_state_dict(read(folder / capture.custom_file(index), **options))
    _load_rank(accelerator, folder, names, options)


def load_model(model: torch.nn.Module, path: Path, options: dict[str, Any]) -> None:
    """Load a file of weights into a model, prepared or not.

    Args:
        model: The model; a wrapper's inner module is loaded.
        path: Its file.
        options: More arguments of ``load_state_dict``.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    inner.load_state_dict(add_tied_names(dict(read(path)), inner), **options)


def _model_path(folder: Path, index: int, names: list[str]) -> Path:
    for name in (capture.model_file(index, safe=True), capture.model_file(index, safe=False)):
        if name in names:
            return folder / name
    raise CheckpointMismatchError(
        f"Checkpoint {folder} holds no weights of model number {index}: neither {capture.model_file(index, safe=True)} "
        f"nor {capture.model_file(index, safe=False)}. Prepare the same models in the same order as before saving."
    )


def _load_each(folder: Path, name: str, objects: list[Any], options: dict[str, Any]) -> None:
    for index, item in enumerate(objects):
        path = folder / checkpoint_layout.numbered(name, index, ".bin")
        if not path.is_file():
            raise CheckpointMismatchError(
                f"Checkpoint {folder} has no {path.name}, but {len(objects)} {name}(s) are prepared. Prepare the same "
                "objects in the same order as before saving."
            )
        item.load_state_dict(read(path, **options))


def _load_loaders(accelerator: Any, folder: Path, names: list[str], options: dict[str, Any]) -> None:
    for index, loader in enumerate(accelerator._dataloaders):
        sampler = checkpoint_layout.numbered(constants.SAMPLER_NAME, index, ".bin")
        if sampler in names:
            _load_sampler(loader, folder / sampler, options)
        position = checkpoint_layout.numbered(checkpoint_layout.DATALOADER_STATE_NAME, index, ".bin")
        if position in names and getattr(loader, "use_stateful_dataloader", False):
            loader.load_state_dict(read(folder / position, **options))


def _load_sampler(loader: Any, path: Path, options: dict[str, Any]) -> None:
    try:
        state = read(path, **options)
    except CheckpointError:
        state = None  # Accelerate pickles the sampler object itself, which weights_only loading refuses
    if isinstance(state, dict) and "iteration" in state:
        capture.restore_sampler(loader, state)
    else:
        warn_once(
            f"{path} holds a pickled sampler and was left out: the order of samples starts from the first epoch's."
        )


def _load_rank(accelerator: Any, folder: Path, names: list[str], options: dict[str, Any]) -> None:
    name = capture.rng_file(accelerator.process_index)
    if name not in names:
        warn_once(f"{folder} has no {name}: the random state of rank {accelerator.process_index} stays as it is.")
        return
    state = read(folder / name, **options)
    accelerator.step = state.get("step", accelerator.step)
    restore_rng_state(state, accelerator.device.type)


def _continue_numbering(accelerator: Any, folder: AnyPath) -> None:
    """Let automatic names go on after the checkpoint that was loaded."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming and folder.parent.name == checkpoint_layout.CHECKPOINTS_FOLDER:
        found = numbering.automatic_checkpoints(numbering.project_directory(project))
        if folder in found:
            project.iteration = checkpoint_layout.number_of(found[-1].name) + 1
