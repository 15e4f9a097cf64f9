"""`save_state`, which writes a complete training state to a folder."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate import telemetry
from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.checkpointing import rank_agreement, state_files
from notebook_accelerate.checkpointing.checkpoint_writer import PendingSave, SaveTarget
from notebook_accelerate.checkpointing.commit import CheckpointStore
from notebook_accelerate.checkpointing.disk_store import DiskStore
from notebook_accelerate.checkpointing.manifest import CHECKPOINTS_FOLDER, Manifest, checkpoint_number, is_numbered
from notebook_accelerate.checkpointing.rank_agreement import gather_results, raise_on_all_ranks, raising_on_all_ranks
from notebook_accelerate.checkpointing.snapshot import SnapshotBuffers
from notebook_accelerate.checkpointing.state_files import (
    SavesOwnState,
    StateFile,
    has_own_layout,
    returns_state_parts,
    saves_own_state,
)
from notebook_accelerate.collectives.communicator import wait_for_all_ranks
from notebook_accelerate.config.kwargs_handlers import ProjectConfiguration
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.files.remote_paths import AnyPath, path_of
from notebook_accelerate.files.untrusted_files import unreadable_classes
from notebook_accelerate.hardware.process_liveness import ProcessIdentity, this_process
from notebook_accelerate.hardware.versions import installed_version
from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.telemetry import CheckpointEvent, steady_time
from notebook_accelerate.torch_internals import compiled_name

if TYPE_CHECKING:
    from torch import nn

    from notebook_accelerate.strategies.accelerator_properties import AcceleratorProperties

_LOG = accelerate_logger("accelerator")
_CALL = "save_state"
_View = tuple[bool, bool, ProcessIdentity]
"""Whether a rank sees the main rank's folder, whether the rank is the first one on its machine, and its process."""
_buffers = SnapshotBuffers()
_pending: list[PendingSave] = []


def _forget_parents_save() -> None:
    """Forget the parent's checkpoint in a forked process, because only the parent writes it."""
    _pending.clear()
    _buffers.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_save)


def save_state(
    accelerator: AcceleratorProperties,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,
    blocking: bool = True,
    **save_model_func_kwargs: Any,
) -> str:
    """Save the complete training state; every rank must call this.

    The state consists of models, optimizers, schedulers, loaders, the scaler, random states and registered objects. The
    checkpoint is either complete or absent: files are written under a temporary name, and a manifest of sizes and
    checksums is written last.

    Args:
        accelerator: The Accelerator whose state is saved.
        output_dir: The folder, or a URL that fsspec supports (s3://, gs://, ...). For a URL, ranks write to the
            temporary folders of their machines (TMPDIR) and upload from there. With automatic naming, and only then,
            the argument is ignored and may be None.
        safe_serialization: Whether to write models as safetensors instead of torch's format.
        blocking: Whether to return only when the checkpoint is complete. If False, the state is copied, and a thread
            writes the copy. The next save, load or `wait_for_saves` waits for the thread, and raises its error. The
            copy takes up as much CPU memory as the files that this rank writes take up on disk. The memory is kept for
            later saves, until `end_training`.
        save_model_func_kwargs: Further arguments for strategies that write models themselves.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: No folder was passed, or the next automatic name is already taken.
        CheckpointError: This checkpoint, or an earlier one that a thread was writing, could not be written.
    """
    if has_own_layout(accelerator.strategy):
        wait_for_all_ranks(_CALL)
    wait_for_saves(_CALL)
    _warn_of_accumulated_gradients(accelerator)
    project = accelerator.project_configuration
    target = _open_target(accelerator, next_target(project, output_dir))
    began = steady_time.now()
    telemetry.send_soon()  # A run that resumes from this checkpoint needs everything that was logged before it.
    background = not blocking or accelerator.device.type == "xla"  # XLA tensors have no memory to write from.
    group = rank_agreement.background_group() if background and returns_state_parts(accelerator.strategy) else None

    def capture() -> PendingSave:
        weights = _weights_after_hooks(accelerator, target)
        if saves_own_state(accelerator.strategy):
            _write_engine_state(accelerator.strategy, target, safe_serialization, blocking, save_model_func_kwargs)
        files = _collect_files(accelerator, target, weights, safe_serialization, save_model_func_kwargs)
        return _prepare_save(accelerator, target, files, background, began)

    save = _capture_on_all_ranks(target, capture)
    project.iteration += 1
    save.process_group = group
    _pending.append(save)
    if background:
        atexit.unregister(_join_pending)
        atexit.register(_join_pending)
        save.start()
    else:
        _run_in_foreground(save)
    if blocking:
        wait_for_saves(_CALL)
    return _path_for_user(accelerator, output_dir, target)


def _join_pending() -> None:
    """Finish the checkpoint if the process exits without calling `end_training`, or because of an exception."""
    for save in _pending:
        save.join()


def _warn_of_accumulated_gradients(accelerator: AcceleratorProperties) -> None:
    """Warn that a checkpoint does not contain the gradients of an incomplete accumulation window."""
    if accelerator.gradient_state.sync_gradients:
        return
    if any(parameter.grad is not None for model in accelerator._models for parameter in model.parameters()):
        warn_once(
            "save_state() was called inside a window of gradient accumulation: the gradients accumulated so far are "
            "not saved, so resumed training will differ. Save after a step: if accelerator.sync_gradients: "
            "accelerator.save_state(...)"
        )


def wait_for_saves(call: str = "wait_for_saves", release: bool = False) -> None:
    """Wait until the background save is complete; every rank must call this.

    Args:
        call: The name of the function that the user called, for messages.
        release: Whether to also free the memory that is kept for copies of states.

    Raises:
        CheckpointError: The save failed on at least one rank.
    """
    try:
        while _pending:
            _pending[-1].join()  # If the wait is interrupted, the save stays pending, so the next call waits again.
            raise_on_all_ranks(_pending.pop().error, call)
    finally:
        if release:
            _buffers.release()
            rank_agreement.release_background_group()


def _capture_on_all_ranks(target: SaveTarget, capture: Callable[[], PendingSave]) -> PendingSave:
    """Capture the state. If this fails on any rank, discard the save, and raise on all ranks."""
    try:
        with raising_on_all_ranks(_CALL, Exception):  # Hooks, strategies and objects may raise anything.
            save = capture()
    except Exception:
        target.store.discard(target.commits, delivering=False)
        raise
    return save


def _run_in_foreground(save: PendingSave) -> None:
    """Write the files in the caller's thread. The next call does not raise the error of a save that was interrupted."""
    try:
        save.run()
    except BaseException:
        _pending.remove(save)
        raise


def _path_for_user(accelerator: AcceleratorProperties, output_dir: Any, target: SaveTarget) -> str:
    """Return the path to the folder as Accelerate does: relative if the user passed a relative path."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        return str(path_of(project.project_dir or "") / CHECKPOINTS_FOLDER / target.folder.name)
    return str(os.fspath(output_dir))


def _open_target(accelerator: AcceleratorProperties, folder: AnyPath) -> SaveTarget:
    """Open the destination of the checkpoint, and find out which ranks share it with the main rank."""
    main, local_main, rank = accelerator.is_main_process, accelerator.is_local_main_process, accelerator.process_index
    store = store_for(folder)

    def open_on_main() -> str:
        token = f".{uuid.uuid4().hex}"
        if main:
            store.open(token)
        return token

    token = gather_results(open_on_main, _CALL, CheckpointError, OSError)[0]

    def open_own_disk() -> _View:
        visible = store.can_see(token)
        if local_main and not (main or visible):
            store.open(token)
        return visible, local_main, this_process()

    try:
        views = gather_results(open_own_disk, _CALL, CheckpointError, OSError)
    except Exception:
        store.discard(main, delivering=False)
        raise
    commits = main or (local_main and not views[rank][0])
    return SaveTarget(folder=folder, store=store, rank=rank, commits=commits, peers=_peers_of(rank, views))


def _peers_of(rank: int, views: list[_View]) -> dict[int, ProcessIdentity]:
    """Return the ranks that write to the same folder as this rank.

    These are all ranks that see the main rank's folder, or else those on this rank's machine.

    Args:
        rank: This process's rank.
        views: The views of all ranks, by rank.
    """
    nodes = list(itertools.accumulate(first for _, first, _ in views))  # The ranks on a machine are consecutive.
    together = [sees for sees, _, _ in views] if views[rank][0] else [node == nodes[rank] for node in nodes]
    return {other: view[2] for other, view in enumerate(views) if together[other]}


def _named_as_given(accelerator: AcceleratorProperties, model: nn.Module) -> dict[str, Any]:
    """Return a model's state with the names that Accelerate writes: the names in the model that `prepare` was given."""
    state = accelerator.get_state_dict(model)
    compiled = model in accelerator.strategy.compiled_models
    return {compiled_name(name): tensor for name, tensor in state.items()} if compiled else state


def _weights_after_hooks(accelerator: AcceleratorProperties, target: SaveTarget) -> list[dict[str, Any]]:
    """Return the state of each model, after the user's hooks, which may change the list or write files themselves."""
    own_layout = has_own_layout(accelerator.strategy)
    weights = [] if own_layout else [_named_as_given(accelerator, model) for model in accelerator._models]
    for hook in list(accelerator._save_model_state_pre_hook.values()):
        hook(accelerator._models, weights, str(target.staging))
    return weights


def _write_engine_state(
    strategy: SavesOwnState, target: SaveTarget, safe: bool, blocking: bool, options: dict[str, Any]
) -> None:
    """Have the strategy's engine write models and optimizers, and wait until they are written."""
    if not blocking:
        warn_once(
            f"save_state(blocking=False): the strategy {strategy.name!r} writes models and optimizers itself, in "
            "the foreground; the rest is written in the background."
        )
    strategy.save_state(target.staging, safe_serialization=safe, **options)


def _collect_files(
    accelerator: AcceleratorProperties,
    target: SaveTarget,
    weights: list[dict[str, Any]],
    safe: bool,
    options: dict[str, Any],
) -> list[StateFile]:
    """Return the files that this rank must write, with their values."""
    strategy = accelerator.strategy
    files = [state_files.rank_file(accelerator)]
    if returns_state_parts(strategy):
        files = state_files.strategy_files(strategy.state_parts(safe, **options)) + files
    if accelerator.is_main_process or (target.commits and accelerator.project_configuration.save_on_each_node):
        files += state_files.model_files(weights, safe)
        files += state_files.training_files(accelerator, with_optimizers=not has_own_layout(strategy))
    for file in files:
        _warn_of_unreadable_values(file)
    return files


def _warn_of_unreadable_values(file: StateFile) -> None:
    """Warn about values that `load_state` would reject, while the user can still change the training."""
    if found := unreadable_classes(file.value):
        names = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in found))
        warn_once(
            f"The state in {file.name} contains objects of type {names}. load_state reads only plain data, because "
            "other objects can run code: convert them in state_dict(), or, for folders that you trust, load with "
            'accelerator.load_state(folder, load_kwargs={"weights_only": False}).'
        )


def _prepare_save(
    accelerator: AcceleratorProperties, target: SaveTarget, files: list[StateFile], background: bool, began: float
) -> PendingSave:
    """Return this rank's part of a checkpoint, with copies of the state if a thread will write it.

    Only an optimizer's own step changes its state, which makes up two thirds of all bytes with Adam. The thread
    therefore copies this state, and the next step waits for the copy. Weights and other values, which any code may
    change, are copied before this function returns.
    """
    save = PendingSave(target, _manifest_of(accelerator), files, _after_commit(accelerator, target, began))
    if background:
        save.optimizers = [file.optimizer for file in files if file.optimizer is not None]
        deferred = [file.optimizer_state() for file in files if file.optimizer is not None]
        save.snapshot = _buffers.take([file.value for file in files], deferred)
        copies = zip(files, save.snapshot.values, strict=True)
        save.state_files = [StateFile(file.name, value, write=file.write) for file, value in copies]
    return save


def _manifest_of(accelerator: AcceleratorProperties) -> Manifest:
    return Manifest(
        world_size=accelerator.num_processes,
        layout=accelerator.strategy.checkpoint_layout,
        strategy=accelerator.strategy.name,
        producer=_producer(),
    )


@functools.cache  # Reading the version takes 2 ms.
def _producer() -> str:
    # The package may be imported from a folder without being installed.
    version = installed_version("notebook-accelerate") or "(not installed)"
    return f"notebook_accelerate {version}"


def _after_commit(accelerator: AcceleratorProperties, target: SaveTarget, began: float) -> Callable[[], None]:
    """Return a function to call after the commit. It reports the checkpoint, and removes old ones above the limit."""
    project, main = accelerator.project_configuration, accelerator.is_main_process

    def committed() -> None:
        if main:
            telemetry.emit(CheckpointEvent(str(target.folder), began))
        if project.automatic_checkpoint_naming:
            old = checkpoints_above_limit(target.folder.parent.parent, project.total_limit)
            if old and main:
                _LOG.warning("Deleting %d checkpoints to keep %d: total_limit", len(old), project.total_limit)
            target.store.remove_checkpoints(old)

    return committed


# ---- the stores that contain checkpoints


def store_for(target: AnyPath) -> CheckpointStore:
    """Return the store of a checkpoint.

    Args:
        target: The folder of the checkpoint.
    """
    if isinstance(target, Path):
        return DiskStore(target)
    from notebook_accelerate.checkpointing.object_store import ObjectStore

    return ObjectStore(target)


# ---- automatically named checkpoints, which are checkpoints/checkpoint_0, checkpoint_1, ... in a project's folder


def automatic_checkpoints(project_dir: AnyPath) -> list[AnyPath]:
    """List the automatically named checkpoints of a project, oldest first."""
    return [folder for folder in _numbered_folders(project_dir) if store_for(folder).is_checkpoint()]


def _numbered_folders(project_dir: AnyPath) -> list[AnyPath]:
    folder = project_dir / CHECKPOINTS_FOLDER
    found = [path for path in folder.iterdir() if is_numbered(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: checkpoint_number(path.name))


def next_target(project: ProjectConfiguration, output_dir: str | os.PathLike[str] | None) -> AnyPath:
    """Return the folder of the next checkpoint.

    Args:
        project: The settings of the project. With `automatic_checkpoint_naming`, `output_dir` is ignored, as in
            Accelerate.
        output_dir: The folder that the user passed, or None.

    Returns:
        The absolute path to the folder.

    Raises:
        ValueError: No folder was passed, or the next automatic name is already taken.
    """
    if not project.automatic_checkpoint_naming:
        if output_dir is None:
            raise ValueError(
                'save_state() got no output_dir. Pass one: save_state("my_checkpoint"), or use automatic names: '
                'Accelerator(project_config=ProjectConfiguration(project_dir="runs", automatic_checkpoint_naming=True))'
            )
        return path_of(output_dir).absolute()
    project_dir = project_directory(project)
    target = project_dir / CHECKPOINTS_FOLDER / f"checkpoint_{project.iteration}"
    if store_for(target).is_occupied():
        newest = checkpoint_number(_numbered_folders(project_dir)[-1].name)
        raise ValueError(
            f"Checkpoint {target} already exists. Resume from the newest one with accelerator.load_state(), which "
            f"also sets the number, or start numbering after it: ProjectConfiguration(..., iteration={newest + 1})."
        )
    return target


def project_directory(project: ProjectConfiguration) -> AnyPath:
    """Return the absolute path to the folder of a project with automatically named checkpoints.

    Args:
        project: The settings of the project.

    Raises:
        ValueError: The project has no folder.
    """
    if project.project_dir is None:
        raise ValueError(
            "automatic_checkpoint_naming=True needs a project_dir: "
            'ProjectConfiguration(project_dir="runs", automatic_checkpoint_naming=True)'
        )
    return path_of(project.project_dir).absolute()


def checkpoints_above_limit(project_dir: AnyPath, total_limit: int | None) -> list[AnyPath]:
    """List the oldest automatically named checkpoints above the limit.

    Args:
        project_dir: The folder of the project.
        total_limit: The number of checkpoints to keep. If None, all are kept.
    """
    if total_limit is None:
        return []
    found = automatic_checkpoints(project_dir)
    return found[: max(len(found) - total_limit, 0)]


def newest_automatic_checkpoint(project: ProjectConfiguration) -> AnyPath:
    """Return the newest automatically named checkpoint of a project.

    Args:
        project: The settings of the project.

    Raises:
        ValueError: There is no checkpoint yet, or checkpoints are not named automatically.
    """
    if not project.automatic_checkpoint_naming:
        raise ValueError(
            "No input_dir provided and automatic checkpoint naming is disabled. Pass the folder: "
            'accelerator.load_state("my_checkpoint")'
        )
    project_dir = project_directory(project)
    found = automatic_checkpoints(project_dir)
    if not found:
        raise ValueError(
            f"There is no checkpoint in {project_dir / CHECKPOINTS_FOLDER} yet: call accelerator.save_state() first"
        )
    return found[-1]


def continue_numbering(project: ProjectConfiguration, loaded: AnyPath) -> None:
    """Continue numbering after the newest checkpoint, if an automatically named one was loaded.

    Args:
        project: The settings of the project.
        loaded: The checkpoint that was loaded.
    """
    if project.automatic_checkpoint_naming and loaded.parent.name == CHECKPOINTS_FOLDER:
        found = automatic_checkpoints(project_directory(project))
        if loaded in found:
            project.iteration = checkpoint_number(found[-1].name) + 1
