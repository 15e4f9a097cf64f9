"""`load_state`, which restores the training state from a checkpoint."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from notebook_accelerate.big_modeling.module_tree import fit_compiled_names
from notebook_accelerate.checkpointing import state_files
from notebook_accelerate.checkpointing.commit import ReadLocation
from notebook_accelerate.checkpointing.manifest import WHOLE, Manifest, broken_checkpoint, find_damage, read_manifest
from notebook_accelerate.checkpointing.rank_agreement import gather_results, raise_on_all_ranks, raising_on_all_ranks
from notebook_accelerate.checkpointing.single_files import add_tied_names, read_file
from notebook_accelerate.checkpointing.state_saving import (
    continue_numbering,
    newest_automatic_checkpoint,
    store_for,
    wait_for_saves,
)
from notebook_accelerate.collectives.communicator import wait_for_all_ranks
from notebook_accelerate.config import constants, environ
from notebook_accelerate.data_loader.stateful_loaders import LoaderState
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError, CheckpointMismatchError
from notebook_accelerate.files.remote_paths import AnyPath, path_of
from notebook_accelerate.files.untrusted_files import MALFORMED, naming_file
from notebook_accelerate.files.weight_files import plain_data_only, trusted_files
from notebook_accelerate.state.process_group import world_from_environ
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.module_queries import extract_model_from_parallel

if TYPE_CHECKING:
    from notebook_accelerate.strategies.accelerator_properties import AcceleratorProperties

_CALL = "load_state"
_STRUCTURE = (*(kind for kind in MALFORMED if kind is not ValueError), UnicodeError)
"""The errors that show that a state is malformed. ValueError is left out: torch raises it if parameters differ."""
_UNREADABLE = (LookupError, UnicodeError, RecursionError, EOFError, pickle.UnpicklingError)
_ATTEMPTS = 10
"""The maximum number of attempts to read a checkpoint that another process is replacing."""


def load_state(
    accelerator: AcceleratorProperties,
    input_dir: str | os.PathLike[str] | None = None,
    load_kwargs: dict[str, Any] | None = None,
    elastic: bool = False,
    **load_model_func_kwargs: Any,
) -> None:
    """Load a checkpoint from `save_state` or Accelerate into the same prepared objects; every rank must call this.

    Args:
        accelerator: The Accelerator whose objects are loaded.
        input_dir: The folder, or a URL that fsspec supports. Files at a URL are first downloaded to a temporary folder,
            once per machine. If None, the newest automatically named checkpoint is loaded.
        load_kwargs: Arguments for `torch.load`, such as ``{"weights_only": False}`` for a folder that you trust.
        elastic: Whether to accept a checkpoint that was saved by a different number of ranks. Ranks without a file in
            the checkpoint keep their random states.
        load_model_func_kwargs: Arguments for ``model.load_state_dict``, such as ``strict=False``, and ``map_location``,
            which may be "cpu" or "on_device" but has no effect, because weights are read into the model's memory.

    Raises:
        TypeError: ``map_location`` has any other value.
        ValueError: The folder does not exist, or no folder was passed.
        BrokenCheckpointError: The checkpoint was never finished, or its files are damaged.
        CheckpointMismatchError: The checkpoint was saved with a different number of ranks, strategy or set of
            registered objects.
    """
    _check_map_location(load_model_func_kwargs.pop("map_location", None))
    if state_files.has_own_layout(accelerator.strategy):
        wait_for_all_ranks(_CALL)
    wait_for_saves(_CALL)
    folder = None if input_dir is None else path_of(input_dir).absolute()
    for attempt in itertools.count(1):
        reading = _LoadAttempt(_find_checkpoint(accelerator, folder))
        failure = None
        try:
            _load_checkpoint(accelerator, reading, elastic, load_kwargs or {}, load_model_func_kwargs)
        except Exception as error:  # noqa: BLE001 - raised below, unless the files were changing
            failure = error
        if not any(gather_results(reading.has_changed, _CALL, CheckpointError, OSError)):
            break
        if attempt == _ATTEMPTS:
            raise CheckpointError(_changing_error(reading.checkpoint)) from failure
    if failure is not None:
        raise failure
    continue_numbering(accelerator.project_configuration, reading.checkpoint)


class _LoadAttempt:
    """One attempt to read a checkpoint that another process may be replacing.

    Args:
        checkpoint: The folder of the checkpoint.
    """

    def __init__(self, checkpoint: AnyPath) -> None:
        self.checkpoint = checkpoint
        self.store = store_for(checkpoint)
        self._generation: Any = None

    def begin(self) -> None:
        """Record which save the folder contains. Ranks call this before they read the manifest."""
        self._generation = self.store.generation()

    def has_changed(self) -> bool:
        """Return whether another save has replaced files. Ranks call this once all have read their files."""
        return self._generation is not None and self.store.generation() != self._generation


def _changing_error(checkpoint: AnyPath) -> str:
    return (
        f"Checkpoint {checkpoint} was not loaded: another process saved to it each of the {_ATTEMPTS} times that it "
        "was read. The objects may now contain a mixture of several saves: load again when that run has finished, or "
        "load a checkpoint that is not being replaced."
    )


def _load_checkpoint(
    accelerator: AcceleratorProperties,
    reading: _LoadAttempt,
    elastic: bool,
    load_kwargs: dict[str, Any],
    model_options: dict[str, Any],
) -> None:
    """Verify and load a checkpoint. If one rank raises, every rank raises."""
    checkpoint = reading.checkpoint
    with reading.store.open_for_reading(accelerator.local_process_index) as location:
        manifest = _fetch_and_verify(reading, location)
        names = _names_in(location.folder) if manifest is None else list(manifest.files)
        files = _Files(location.folder, names, load_kwargs, verified=manifest is not None)
        raise_on_all_ranks(_find_mismatch(accelerator, checkpoint, names, manifest, elastic), _CALL)
        models = list(accelerator._models)
        with raising_on_all_ranks(_CALL, Exception):
            for hook in list(accelerator._load_model_state_pre_hook.values()):
                hook(models, str(files.folder))
            _load_all(accelerator, models, files, model_options)
            _load_custom(accelerator, files)
            _load_rank(accelerator, files)


@dataclass(frozen=True)
class _Files:
    """The files of a checkpoint on this machine's disk.

    Attributes:
        folder: The folder that contains the files.
        names: The names of the files.
        options: The arguments for `torch.load`.
        verified: Whether the files match a manifest. If so, the object is to blame for an error in its
            `load_state_dict`.
    """

    folder: Path
    names: Sequence[str]
    options: dict[str, Any]
    verified: bool

    def read(self, name: str) -> Any:
        """Return the content of a file."""
        return read_file(self.folder / name, **self.options)


def _names_in(folder: Path) -> list[str]:
    """List the files and folders in a folder. Pipes and devices, which could block a reader forever, are left out."""
    return [path.name for path in folder.iterdir() if path.is_file() or path.is_dir()]


def _check_map_location(given: object) -> None:
    if given not in (None, "cpu", "on_device"):
        raise TypeError(f'map_location={given!r} is not allowed; pass "cpu" or "on_device", or leave it out')


def _find_checkpoint(accelerator: AcceleratorProperties, input_dir: AnyPath | None) -> AnyPath:
    """Return the folder to load, after finishing an interrupted commit to it."""
    with raising_on_all_ranks(_CALL, ValueError, CheckpointError, OSError):
        project = accelerator.project_configuration
        folder = _existing_folder(input_dir) if input_dir is not None else newest_automatic_checkpoint(project)
        if accelerator.is_local_main_process:
            store_for(folder).finish_commit()
    return folder


def _existing_folder(folder: AnyPath) -> AnyPath:
    if folder.is_dir():
        return folder
    _reject_unfinished(folder)
    raise ValueError(
        f"Tried to find {folder} but folder does not exist; pass the folder that save_state returned: "
        'accelerator.load_state("my_checkpoint")'
    )


def _reject_unfinished(folder: AnyPath) -> None:
    if (left := store_for(folder).unfinished_save()) is not None:
        raise BrokenCheckpointError(
            f"Checkpoint {folder} was never finished: its process died while writing. Its partial files are in {left}. "
            "Load an earlier checkpoint."
        )


def _fetch_and_verify(reading: _LoadAttempt, location: ReadLocation) -> Manifest | None:
    """Read the manifest, fetch this rank's share of the files, and compare the share with the manifest."""
    checkpoint = reading.checkpoint
    with raising_on_all_ranks(_CALL, CheckpointError, OSError):
        reading.begin()
        manifest = read_manifest(reading.store.source())
        if manifest is None:
            _reject_unfinished(checkpoint)
        share = reading.store.fetch(None if manifest is None else sorted(manifest.files), location)
        if manifest is not None and (lines := find_damage(location.folder, manifest, share)):
            raise broken_checkpoint(checkpoint, lines)
    return manifest


def _find_mismatch(
    accelerator: AcceleratorProperties,
    checkpoint: AnyPath,
    names: Sequence[str],
    manifest: Manifest | None,
    elastic: bool,
) -> CheckpointError | None:
    """Compare this training run with the one that wrote the checkpoint. Return an error if they do not match."""
    here, layout = accelerator.num_processes, accelerator.strategy.checkpoint_layout
    found = manifest.layout if manifest is not None else _guess_layout(names)
    if found != layout:
        return CheckpointMismatchError(
            f"Checkpoint {checkpoint} was written by the strategy {found!r}, but this run's layout is {layout!r}. "
            "Load it with the strategy that wrote it, or load a model saved by accelerator.save_model."
        )
    sizes = {manifest.world_size} if manifest is not None else _possible_world_sizes(names)
    if sizes and here not in sizes and not elastic:
        return CheckpointMismatchError(
            f"Checkpoint {checkpoint} was written by {min(sizes)} ranks, but this run has {here}. Start {min(sizes)} "
            "ranks, or accept the difference: accelerator.load_state(folder, elastic=True). Ranks that have no file in "
            "the checkpoint then keep their random state."
        )
    return _custom_mismatch(accelerator, checkpoint, names)


def _guess_layout(names: Sequence[str]) -> str:
    """Return the layout of a folder without a manifest, based on the names of its files."""
    if any(name.startswith(constants.FSDP_MODEL_NAME) for name in names):
        return "fsdp"
    if any(name in {"latest", "zero_to_fp32.py"} for name in names):
        return "deepspeed"
    return WHOLE


def _possible_world_sizes(names: Sequence[str]) -> set[int]:
    """Return the numbers of ranks that may have written a folder without a manifest.

    If machines have separate disks, a folder only contains the random states of the ranks on its machine.
    """
    count = state_files.count_files(names, constants.RNG_STATE_NAME + r"_\d+\.pkl")
    world = world_from_environ()
    return {count, world.size} if count == world.local_size else {count} - {0}


def _custom_mismatch(
    accelerator: AcceleratorProperties, folder: AnyPath, names: Sequence[str]
) -> CheckpointError | None:
    count = state_files.count_files(names, state_files.CUSTOM_OBJECT_NAME + r"_\d+\.pkl")
    registered = len(accelerator._custom_objects)
    if count == registered:
        return None
    return CheckpointMismatchError(
        f"Number of custom checkpoints in folder {folder} does not match the number of registered objects:\n"
        f"  found checkpoints: {count}\n  registered objects: {registered}\n"
        "Register the same objects as before saving: accelerator.register_for_checkpointing(...)."
    )


def _load_all(
    accelerator: AcceleratorProperties, models: list[torch.nn.Module], files: _Files, model_options: dict[str, Any]
) -> None:
    strategy = accelerator.strategy
    if not state_files.has_own_layout(strategy):
        _load_models(accelerator, models, files, model_options)
    else:
        trusted = files.options.get("weights_only") is False
        with trusted_files() if trusted else plain_data_only(), naming_file(files.folder, _UNREADABLE):
            strategy.load_state(files.folder, models=models, **model_options)
    _load_rest(accelerator, state_files.schedulers_to_save(accelerator._schedulers), files)


def load_files(
    accelerator: AcceleratorProperties,
    models: Sequence[torch.nn.Module],
    folder: Path,
    map_location: Any,
    options: dict[str, Any],
    model_options: dict[str, Any],
) -> None:
    """Load a folder of single files into objects, without comparing the files with a manifest.

    Args:
        accelerator: The Accelerator, or an object with its lists of prepared objects. Its `step` is set.
        models: The models to load.
        folder: The folder that contains the files.
        map_location: See `load_state`.
        options: The arguments for `torch.load`.
        model_options: The arguments for ``model.load_state_dict``.
    """
    _check_map_location(map_location)
    files = _Files(folder, _names_in(folder), options, verified=False)
    _load_models(accelerator, models, files, model_options)
    _load_rest(accelerator, accelerator._schedulers, files)
    _load_rank(accelerator, files)


def _load_models(
    accelerator: AcceleratorProperties, models: Sequence[torch.nn.Module], files: _Files, model_options: dict[str, Any]
) -> None:
    """Load models and optimizers, each from one file."""
    for index, model in enumerate(models):
        load_model(model, _model_path(files, index), model_options)
    _load_each(files, constants.OPTIMIZER_NAME, accelerator._optimizers)


def _load_rest(accelerator: AcceleratorProperties, schedulers: Sequence[Any], files: _Files) -> None:
    """Load schedulers, loaders and the scaler."""
    _load_each(files, constants.SCHEDULER_NAME, schedulers)
    _load_loaders(accelerator, files)
    if accelerator.scaler is not None and constants.SCALER_NAME in files.names:
        with naming_file(files.folder / constants.SCALER_NAME):
            accelerator.scaler.load_state_dict(files.read(constants.SCALER_NAME))


def load_model(model: torch.nn.Module, path: Path, options: dict[str, Any]) -> None:
    """Load a file of weights into a model, prepared or not.

    Args:
        model: The model to load. If it is wrapped, the inner module is loaded.
        path: The file with the weights.
        options: Further arguments for ``load_state_dict``.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    with naming_file(path, _STRUCTURE if not options else (LookupError, AttributeError)):
        state = _fitted(read_file(path), inner)
        inner.load_state_dict(add_tied_names(state, inner), **options)


def _fitted(state: Mapping[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Return a state whose names fit the model, even if either the saved model or this one is compiled."""
    wanted = model.state_dict(keep_vars=True)
    if state.keys() == wanted.keys():
        return dict(state)
    names = fit_compiled_names(state, wanted)
    return {names[name]: value for name, value in state.items()}


def _model_path(files: _Files, index: int) -> Path:
    candidates = [state_files.model_file(index, safe) for safe in (True, False)]
    for name in candidates:
        if name in files.names:
            return files.folder / name
    raise CheckpointMismatchError(
        f"Checkpoint {files.folder} has no weights of model number {index}: neither {candidates[0]} nor "
        f"{candidates[1]} exists. Prepare the same models in the same order as before saving."
    )


def _load_each(files: _Files, name: str, objects: Sequence[Any]) -> None:
    for index, item in enumerate(objects):
        path = files.folder / state_files.numbered(name, index, ".bin")
        if not path.is_file():
            raise CheckpointMismatchError(
                f"Checkpoint {files.folder} has no {path.name}, but {len(objects)} {name}(s) are prepared. Prepare the "
                "same objects in the same order as before saving."
            )
        with naming_file(path, _STRUCTURE):
            state = _checked(files.read(path.name), path, name)
        with naming_file(path, () if files.verified else _STRUCTURE):
            item.load_state_dict(state)


def _checked(state: Any, path: Path, kind: str) -> Any:
    """Return a state, after checking that it has the form of an optimizer's or scheduler's state."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    correct = isinstance(state, Mapping)
    if kind == constants.OPTIMIZER_NAME and groups is not None:
        correct = isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)
        correct = correct and isinstance(state.get("state"), Mapping)
    if not correct:
        raise BrokenCheckpointError(f"{path} is broken: it does not contain the state of {kind}s.")
    return state


def _load_loaders(accelerator: AcceleratorProperties, files: _Files) -> None:
    loaders: Sequence[Any] = accelerator._dataloaders
    for index, loader in enumerate(loaders):
        sampler = state_files.numbered(constants.SAMPLER_NAME, index, ".bin")
        own = _load_sampler(loader, files, sampler) if sampler in files.names else {}
        position = state_files.numbered(state_files.DATALOADER_STATE_NAME, index, ".bin")
        if position in files.names and getattr(loader, "use_stateful_dataloader", False):
            with naming_file(files.folder / position):
                loader.load_state_dict(LoaderState(files.read(position), own))


def _load_sampler(loader: Any, files: _Files, name: str) -> dict[str, Any]:
    """Restore a loader's epoch and sampler, and return the additional values that a stateful loader needs."""
    try:
        state = files.read(name)
    except CheckpointError as error:
        if isinstance(error, BrokenCheckpointError) and not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        state = None  # Accelerate pickles the sampler object itself, which weights_only loading rejects.
    path = files.folder / name
    if isinstance(state, dict) and "iteration" in state:
        with naming_file(path, (*MALFORMED, RuntimeError)):
            state_files.restore_sampler(loader, state)
            return dict(state.get("position", {}))
    warn_once(f"{path} contains a pickled sampler and was not loaded: samples have the order of the first epoch again.")
    return {}


def _load_custom(accelerator: AcceleratorProperties, files: _Files) -> None:
    for index, custom in enumerate(accelerator._custom_objects):
        name = state_files.custom_file(index)
        state = files.read(name)
        with naming_file(files.folder / name, () if files.verified else MALFORMED):
            if isinstance(custom, torch.nn.Module) and isinstance(state, dict):
                state = _fitted(state, custom)
            custom.load_state_dict(state)


def _load_rank(accelerator: AcceleratorProperties, files: _Files) -> None:
    name = state_files.rng_file(accelerator.process_index)
    if name not in files.names:
        warn_once(f"{files.folder} has no {name}: the random state of rank {accelerator.process_index} is unchanged.")
        return
    state = files.read(name)
    with naming_file(files.folder / name, (*MALFORMED, RuntimeError)):
        accelerator.step = int(state["step"]) if "step" in state else accelerator.step
        state_files.restore_rng_state(state, accelerator.device.type)


def resumed_checkpoint() -> str | None:
    """Return the checkpoint that this run continues from, or None if the launch starts a new training run.

    Call this in the launched function. The result is the same on all ranks, because ``notebook_launcher(...,
    resume=run)`` chooses the newest complete checkpoint of the earlier run.

    Returns:
        The absolute path or the URL. Pass it to ``accelerator.load_state`` or
        ``Trainer.train(resume_from_checkpoint=...)``.
    """
    return environ.text(environ.RESUMED)
