"""`save_state`: everything a training needs to go on, in one folder."""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Callable
from importlib import metadata
from typing import Any

from notebook_accelerate.big_modeling.remote_paths import AnyPath, path_of
from notebook_accelerate.checkpointing import checkpoint_layout, numbering
from notebook_accelerate.checkpointing.capture import StateFile, model_files, rank_file, strategy_files, training_files
from notebook_accelerate.checkpointing.checkpoint_stores import store_of
from notebook_accelerate.checkpointing.checkpoint_writer import SaveTarget, Writing
from notebook_accelerate.checkpointing.manifest import Manifest
from notebook_accelerate.checkpointing.process_liveness import ProcessIdentity, this_process
from notebook_accelerate.checkpointing.rank_agreement import agree, exchange, forget_own_group, own_group
from notebook_accelerate.checkpointing.sharded_protocol import layout_of, writes_in_parts, writes_itself
from notebook_accelerate.checkpointing.snapshot import Snapshots
from notebook_accelerate.collectives.collective_watchdog import meet
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state.warn_once import warn_once

_WHAT = "save_state"
_snapshots = Snapshots()
_pending: list[Writing] = []


def _join_pending() -> None:
    """Let a process that ends without `end_training`, or by an exception, still finish the checkpoint."""
    for writing in _pending:
        writing.join()


def _forget() -> None:
    """Leave the parent's checkpoint to the parent, in a process forked from it."""
    _pending.clear()
    _snapshots.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def save_state(
    accelerator: Any,
    output_dir: str | os.PathLike[str] | None = None,
    safe_serialization: bool = True,
    blocking: bool = True,
    **save_model_func_kwargs: Any,
) -> str:
    """Save all that a training needs to go on; every rank must call this.

    That is models, optimizers, schedules, loaders, scaler, random states and registered objects. The folder is complete
    or absent: files are written beside it, a manifest of sizes and checksums last.

    Args:
        accelerator: The Accelerator.
        output_dir: The folder, or a URL that fsspec knows (s3://, gs://, ...): ranks write to their machines' temporary
            files (TMPDIR) and upload from there. None with automatic naming, which decides alone.
        safe_serialization: Write models as safetensors rather than in torch's format.
        blocking: Return when the checkpoint is in its place. Otherwise copy the state and write it in a thread; the
            next save, load or `wait_for_saves` waits for it and raises what went wrong.
        save_model_func_kwargs: More arguments for strategies that write models themselves.

    Returns:
        The folder.

    Raises:
        ValueError: No folder is named, or the automatic name is taken.
        CheckpointError: It could not be written, or the background save before it could not.
    """
    if writes_itself(accelerator.strategy):
        meet(_WHAT)
    wait_for_saves(_WHAT)
    project = accelerator.project_configuration
    place = _open_place(accelerator, numbering.next_target(project, output_dir))
    background = not blocking or accelerator.device.type == "xla"  # XLA's tensors have no memory to write from
    group = own_group() if background and writes_in_parts(accelerator.strategy) else None
    writing = _agreed(
        place, lambda: _captured(accelerator, place, safe_serialization, blocking, background, save_model_func_kwargs)
    )
    if project.automatic_checkpoint_naming:
        project.iteration += 1
    writing.group = group
    _pending.append(writing)
    if background:
        atexit.unregister(_join_pending)
        atexit.register(_join_pending)
        writing.start()
    else:
        _run_here(writing)
    if blocking:
        wait_for_saves(_WHAT)
    return _shown(accelerator, output_dir, place)


def wait_for_saves(what: str = "wait_for_saves", release: bool = False) -> None:
    """Wait until a save in the background is in its place; every rank must call this.

    Args:
        what: The call the user made, for messages.
        release: Also give back the memory that copies of states are made in.

    Raises:
        CheckpointError: The save failed on some rank.
    """
    try:
        while _pending:
            _pending[-1].join()  # an interrupt here leaves it pending: the next call waits again
            agree(_pending.pop().error, what)
    finally:
        if release:
            _snapshots.release()
            forget_own_group()


def _agreed(place: SaveTarget, action: Callable[[], Writing]) -> Writing:
    """Run what may fail on one rank only; every rank goes on or none, and nothing is left of what none goes on with."""
    failure: Exception | None = None
    try:
        writing = action()
    except Exception as error:  # noqa: BLE001 - hooks, strategies and objects raise what they like
        failure = error
    try:
        agree(failure, _WHAT)
    except Exception:
        place.store.discard(place.commits, begun=False)
        raise
    return writing


def _run_here(writing: Writing) -> None:
    """Write in the caller's thread; an interrupted save is over, and not reported again by the next one."""
    try:
        writing.run()
    except BaseException:
        _pending.remove(writing)
        raise


def _shown(accelerator: Any, output_dir: Any, place: SaveTarget) -> str:
    """Return the folder's path as Accelerate does: relative where the user's was."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming:
        return str(path_of(project.project_dir) / checkpoint_layout.CHECKPOINTS_FOLDER / place.target.name)
    return str(os.fspath(output_dir))


def _open_place(accelerator: Any, target: AnyPath) -> SaveTarget:
    """Make room for the checkpoint, and find out which ranks share a place with the main one."""
    main, local_main, rank = accelerator.is_main_process, accelerator.is_local_main_process, accelerator.process_index
    store, token = store_of(target), f".{uuid.uuid4().hex}"
    agree(_failure_of(lambda: store.open(token)) if main else None, _WHAT)
    token = exchange(token, _WHAT)[0]
    seen: list[bool] = []
    failure = _failure_of(lambda: seen.append(store.sees(token)))
    opens = main or (local_main and seen == [False])
    if opens and not main:
        failure = _failure_of(lambda: store.open(token))
    agree(failure, _WHAT)
    views = exchange((seen == [True], local_main, this_process()), _WHAT)
    return SaveTarget(target=target, store=store, rank=rank, commits=opens, group=_group_of(rank, views))


def _failure_of(action: Callable[[], Any]) -> Exception | None:
    """Return what a place raises: where one rank cannot use it, all must know."""
    try:
        action()
    except (CheckpointError, OSError) as error:
        return error
    return None


def _group_of(rank: int, views: list[tuple[bool, bool, ProcessIdentity]]) -> dict[int, ProcessIdentity]:
    """Return the ranks that write where `rank` does: all that see the main rank's folder, or those of its machine.

    Args:
        rank: This rank.
        views: Per rank, whether it sees the main rank's folder, whether it is its machine's first, and its process.
    """
    nodes: list[int] = []
    for _, first, _ in views:
        nodes.append((nodes[-1] + 1 if nodes else 0) if first or not nodes else nodes[-1])
    together = [sees for sees, _, _ in views] if views[rank][0] else [node == nodes[rank] for node in nodes]
    return {other: view[2] for other, view in enumerate(views) if together[other]}


def _collect(
    accelerator: Any, place: SaveTarget, safe: bool, blocking: bool, options: dict[str, Any]
) -> list[StateFile]:
    """Run the hooks and capture this rank's part; copied where it is written later."""
    strategy = accelerator.strategy
    weights = [] if writes_itself(strategy) else [accelerator.get_state_dict(model) for model in accelerator._models]
    for hook in list(accelerator._save_model_state_pre_hook.values()):
        hook(accelerator._models, weights, str(place.staging))
    files = [rank_file(accelerator)]
    if writes_in_parts(strategy):
        files = strategy_files(strategy.state_parts(safe, **options)) + files
    elif writes_itself(strategy):
        if not blocking:
            warn_once(
                f"save_state(blocking=False): the strategy {strategy.name!r} writes models and optimizers itself, in "
                "the foreground; the rest is written in the background."
            )
        strategy.save_state(place.staging, safe_serialization=safe, **options)
    if accelerator.is_main_process or (place.commits and accelerator.project_configuration.save_on_each_node):
        files += model_files(weights, safe)
        files += training_files(accelerator, with_optimizers=not writes_itself(strategy))
    return files


def _captured(
    accelerator: Any, place: SaveTarget, safe: bool, blocking: bool, background: bool, options: dict[str, Any]
) -> Writing:
    """Capture this rank's part of a checkpoint, copied where a thread will write it.

    An optimizer's state, two thirds of what there is with Adam, changes in its step alone: the thread copies it, and
    the next step waits for that. Weights and everything else, which anybody may change, are copied before this returns.
    """
    place.store.begin()
    files = _collect(accelerator, place, safe, blocking, options)
    writing = Writing(place, _manifest(accelerator), files, _after(accelerator, place))
    if background:
        writing.optimizers = [file.optimizer for file in files if file.optimizer is not None]
        later = [file.slow() for file in files if file.optimizer is not None]
        writing.snapshot = _snapshots.take([file.value for file in files], later)
        copies = zip(files, writing.snapshot.values, strict=True)
        writing.state_files = [StateFile(file.name, value, write=file.write) for file, value in copies]
    return writing


def _manifest(accelerator: Any) -> Manifest:
    strategy = accelerator.strategy
    return Manifest(
        world_size=accelerator.num_processes,
        layout=layout_of(strategy),
        strategy=getattr(strategy, "name", type(strategy).__name__),
        producer=f"notebook_accelerate {_version()}",
    )


def _version() -> str:
    try:
        return metadata.version("notebook-accelerate")
    except metadata.PackageNotFoundError:  # read from a folder, not installed
        return "(not installed)"


def _after(accelerator: Any, place: SaveTarget) -> Callable[[], None]:
    """Return what follows the commit: removing the checkpoints above the limit."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        return lambda: None
    return lambda: place.store.prune(numbering.surplus(place.target.parent.parent, project.total_limit))
