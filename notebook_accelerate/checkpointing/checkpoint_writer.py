"""Writes one captured checkpoint to its place: the files of every rank, then the manifest, then the commit.

The ranks report through small files in the staging folder rather than through collectives, which a thread must not use
while training does. Only for sharded states, which torch's distributed checkpoints write, the threads have a process
group of their own. One rank per file system commits: the main one, or the first of a machine with disks of its own.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from notebook_accelerate.big_modeling.remote_paths import AnyPath
from notebook_accelerate.big_modeling.untrusted_files import MALFORMED, broken_file
from notebook_accelerate.big_modeling.weight_files import read_torch
from notebook_accelerate.checkpointing.checkpoint_layout import FileRecord, Manifest, make_record
from notebook_accelerate.checkpointing.checkpoint_stores import FileRecords, Store
from notebook_accelerate.checkpointing.rank_agreement import gather_failures
from notebook_accelerate.checkpointing.snapshot import Snapshot, is_plain_tensor
from notebook_accelerate.checkpointing.state_files import StateFile
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.hardware import device_table
from notebook_accelerate.hardware.process_liveness import ProcessIdentity
from notebook_accelerate.state.warn_once import warn_once

_SILENCE_LIMIT = 600.0
"""Seconds without any change in the staging folder after which a silent rank counts as dead."""
_EXIT_GRACE = 2.0
"""Seconds to wait for a process to end after its connections were closed, before it counts as alive."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SaveTarget:
    """The destination of a checkpoint, as one rank sees it."""

    folder: AnyPath
    """The checkpoint's folder."""
    store: Store
    """Its store."""
    rank: int
    """This rank."""
    commits: bool
    """Whether this rank commits."""
    peers: dict[int, ProcessIdentity] = field(default_factory=dict)
    """The ranks that write to this file system, and their processes."""

    @property
    def staging(self) -> Path:
        """The folder that this rank writes its files to first."""
        return self.store.folder


@dataclass
class PendingSave:
    """One rank's work on one checkpoint after its state was captured.

    Attributes:
        after_commit: Called once the checkpoint is committed.
        snapshot: The copies to write; None if the training's own tensors are written.
        optimizers: Optimizers whose next step must wait until the snapshot is filled.
        step_hooks: The hooks that make them wait.
        process_group: Process group of the ranks' threads; None for torch's default one, in the caller's thread.
        thread: The thread that runs it; None if it runs in the caller.
        error: The reason of its failure, or None.
    """

    target: SaveTarget
    manifest: Manifest
    state_files: list[StateFile]
    after_commit: Callable[[], None]
    snapshot: Snapshot | None = None
    optimizers: list[Any] = field(default_factory=list)
    step_hooks: list[Any] = field(default_factory=list)
    process_group: Any = None
    thread: threading.Thread | None = None
    error: BaseException | None = None
    _finished: threading.Event = field(default_factory=threading.Event)
    _records: FileRecords = field(default_factory=dict)
    _failure_shared: bool = False

    def start(self) -> None:
        """Run in a thread. It is not a daemon: the interpreter does not exit before the checkpoint is written."""
        if self.snapshot is not None:
            copied = self.snapshot.copied
            self.step_hooks = [
                optimizer.register_step_pre_hook(lambda *_: copied.wait() and None) for optimizer in self.optimizers
            ]
        self.thread = threading.Thread(target=self.run, name=f"save_state {self.target.folder.name}")
        try:
            self.thread.start()
        except RuntimeError as error:  # a limit on threads, or the interpreter is shutting down
            self.thread = None
            self.run()
            warn_once(f"save_state(blocking=False) wrote the checkpoint in the foreground: {error}.")

    def join(self) -> None:
        """Wait for the thread, if there is one; after an interrupt the caller can call this again."""
        if self.thread is not None:
            self._finished.wait()  # before Python 3.13 a thread whose join was interrupted counts as ended (gh-90882)
            self.thread.join()
        for hook in self.step_hooks:  # in the caller's thread: an optimizer may be running its hooks in another
            hook.remove()

    def run(self) -> None:
        """Write this rank's files, report, and commit if this rank commits; errors are stored in `error`."""
        try:
            if self.thread is not None:
                device_table.select_again()
            self._fill_snapshot()
            self._write_files()
            delivered = self.target.store.deliver(self.target.rank, self._records)
            files = {name: asdict(record) for name, record in delivered.items()}
            self.target.store.write_report(self.target.rank, {"files": files})
            if self.target.commits:
                self._commit()
        except BaseException as error:  # noqa: BLE001 - any error of a writer is this checkpoint's failure
            self._record_failure(error)
            own = getattr(error, "failures", {}).get(self.target.rank, error)
            if not isinstance(own, Exception):  # an interrupt, wrapped where the ranks agree on errors
                raise own from None
        finally:
            self.state_files, self.snapshot = [], None  # they may refer to gigabytes
            self._finished.set()

    def _fill_snapshot(self) -> None:
        """Fill the deferred copies; ranks that write together either all continue or all raise."""
        failure: CheckpointError | None = None
        try:
            if self.snapshot is not None:
                self.snapshot.finish()
        except Exception as error:  # noqa: BLE001 - reported to the other ranks first
            failure = self._checkpoint_error(error)
        if self.process_group is not None:
            failures = gather_failures(self.process_group, "" if failure is None else str(failure))
            self._failure_shared = bool(failures)
            if failures and failure is None:
                raise CheckpointError("; ".join(f"Rank {rank}: {text}" for rank, text in failures.items()))
        if failure is not None:
            raise failure

    def _write_files(self) -> None:
        for file in self.state_files:
            path = self.target.staging / file.name
            if file.write is not None:
                for name, (size, crc) in file.write(file.value, path, self.process_group).items():
                    self._records[f"{file.name}/{name}"] = FileRecord(size=size, crc32=f"{crc:08x}")
            else:
                if path.parent != self.target.staging:
                    path.parent.mkdir(parents=True, exist_ok=True)
                write(file.value, path)
                self._records[file.name] = make_record(path)
                self.target.store.sync(path)
            file.value = None

    def _record_failure(self, error: BaseException) -> None:
        self.error = self._checkpoint_error(error)
        if self.thread is not None:
            _log.error("%s", self.error)  # training continues: log it now, raise it at the next save or the end
        # The committing rank may know of the failure already, and be removing the staging folder.
        shared = self._failure_shared or hasattr(error, "failures")
        if not (shared or self.target.commits):
            with contextlib.suppress(CheckpointError):  # if the store cannot be reached, the committing rank fails too
                self.target.store.write_report(self.target.rank, {"error": str(self.error)})
        self.target.store.discard(self.target.commits)

    def _checkpoint_error(self, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        explained = self._dead_peer_error(error) or self._other_rank_error(error)
        if explained is None and not self.target.commits and not self.target.staging.is_dir():
            explained = CheckpointError(f"The checkpoint {self.target.folder} was not written: another rank failed.")
        explained = explained or self.target.store.write_error(error)
        explained.__cause__ = error
        return explained

    def _dead_peer_error(self, error: BaseException) -> CheckpointError | None:
        """Return the error that names the ended rank, if that is why a collective of the threads failed."""
        if self.process_group is None or not isinstance(error, RuntimeError) or hasattr(error, "failures"):
            return None
        deadline = time.monotonic() + _EXIT_GRACE
        while True:  # a process closes its connections before it has ended
            for rank, peer in self.target.peers.items():
                if peer.has_ended():
                    return self._unfinished_error(rank, f"its process {peer.pid} has ended")
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    def _unfinished_error(self, rank: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {self.target.folder} was not written: rank {rank} did not finish its part, {reason}."
        )

    def _other_rank_error(self, error: BaseException) -> CheckpointError | None:
        """Return the error of the rank that failed, if ranks write together and therefore all raise."""
        failures = getattr(error, "failures", {})
        if not failures:
            return None
        rank = self.target.rank if self.target.rank in failures else min(failures)
        explained = self.target.store.write_error(failures[rank])
        return explained if rank == self.target.rank else CheckpointError(f"Rank {rank}: {explained}")

    def _commit(self) -> None:
        parts = [self._wait_for_report(rank, peer) for rank, peer in self.target.peers.items()]
        self.target.store.commit(self.manifest, parts)
        try:
            self.after_commit()
        except (CheckpointError, OSError) as error:  # old checkpoints may be in use, or removed already
            written = f"{self.target.folder} is written"
            warn_once(f"{written}, but checkpoints above total_limit could not be removed: {error}")

    def _wait_for_report(self, rank: int, peer: ProcessIdentity) -> FileRecords:
        store = self.target.store
        watch = _PeerWatch(store, rank, peer)
        while (content := store.read_report(rank)) is None:
            if reason := watch.death_reason():
                if (content := store.read_report(rank)) is not None:  # it may have reported just before it ended
                    break
                raise self._unfinished_error(rank, reason)
            time.sleep(store.poll_interval)
        if "error" in content:
            raise CheckpointError(f"Rank {rank}: {content['error']}")
        return {name: FileRecord(**record) for name, record in content["files"].items()}


class _PeerWatch:
    """Detects that a rank will not write any more.

    Args:
        store: The store it writes to.
        rank: The rank.
        peer: The rank's process.
    """

    def __init__(self, store: Store, rank: int, peer: ProcessIdentity) -> None:
        self._store = store
        self._rank = rank
        self._peer = peer
        self._activity: object = object()
        self._active_at = time.monotonic()
        self._next_check = 0.0

    def death_reason(self) -> str:
        """Return why the rank will not report, or an empty text; the system is asked at most once a second."""
        now = time.monotonic()
        if now < self._next_check:
            return ""
        self._next_check = now + 1.0
        if self._peer.has_ended():
            return f"its process {self._peer.pid} has ended"
        activity = self._store.activity(self._rank)
        if activity is None:
            return f"and {self._store.folder} no longer exists"
        if activity != self._activity:
            self._activity, self._active_at = activity, now
        silent = now - self._active_at > _SILENCE_LIMIT
        return f"and nothing was written for {_SILENCE_LIMIT / 60:.0f} minutes" if silent else ""


# Reads and writes single files: safetensors, and torch's zip format with `weights_only` loading.

METADATA = {"format": "pt"}
"""The metadata that Accelerate and transformers expect in a safetensors file."""


_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32",
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64",
}  # fmt: skip
"""Names of dtypes in safetensors files, in the order in which safetensors sorts tensors from the end of a file."""
_ORDER = {dtype: -place for place, dtype in enumerate(_DTYPES)}
_MAX_CALL = 1 << 30
"""Bytes of one system call: macOS rejects 2 GiB."""
_JOINED = 1 << 18
"""Bytes up to which tensors are joined before they are written."""


def write_safetensors(value: Mapping[str, Any], path: Path) -> None:
    """Write named tensors as safetensors; tensors that share memory are written once.

    The files are those of safetensors.torch.save_file, which takes 30 us of Python for each tensor: 10,000 tensors of
    64 numbers take 45 ms here instead of 330 ms of processor time (safetensors 0.8).

    Raises:
        ValueError: The value is not a dictionary of tensors.
    """
    if not isinstance(value, Mapping):
        raise ValueError(
            f"safetensors files contain named tensors; got {type(value).__name__}: pass a dictionary of tensors, or "
            "safe_serialization=False"
        )
    tensors = clean_state_dict_for_safetensors(dict(value))
    known = all(is_plain_tensor(tensor) and tensor.dtype in _DTYPES for tensor in tensors.values())
    if not known or sys.byteorder != "little":
        safetensors.torch.save_file(tensors, path, metadata=METADATA)
        return
    names = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    with path.open("wb", buffering=0) as file:
        for piece in (_header(tensors, names), *_pieces(tensors[name] for name in names)):
            _write_all(file, piece)


def _header(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> bytes:
    """Return the length of the description, and the description: JSON that ends at a multiple of eight bytes."""
    entries: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the bytes of contiguous tensors, small ones joined."""
    small: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        flat = _values(tensor)
        if flat.numel() + size > _JOINED and small:
            yield torch.cat(small).numpy().data
            small, size = [], 0
        if flat.numel() > _JOINED:
            yield flat.numpy().data
        elif flat.numel():
            small.append(flat)
            size += flat.numel()
    if small:
        yield torch.cat(small).numpy().data


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes in main memory; conjugation and negation may be pending."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.cpu().reshape(-1).view(torch.uint8)


def _write_all(file: Any, content: Any) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view[:_MAX_CALL]) :]


def write(value: Any, path: Path) -> None:
    """Write `value` as safetensors if the file has that suffix, otherwise in torch's format."""
    (write_safetensors if path.suffix == ".safetensors" else torch.save)(value, path)


def read(path: Path, **options: Any) -> Any:
    """Read a file in the format of its suffix, into CPU memory.

    Args:
        path: The file.
        options: Arguments of torch.load; ignored for safetensors, which contain only tensors.

    Raises:
        BrokenCheckpointError: The file is truncated or damaged.
        CheckpointError: The file contains objects that `weights_only` loading refuses.
    """
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise BrokenCheckpointError(f"{path} is broken: {error}") from error
        except MALFORMED as error:  # an unknown dtype, for instance
            raise broken_file(path, error) from error
    return read_torch(path, **options)


# Tensors that share memory: saved once, and tied again on loading.


def tied_names(state: Mapping[str, Any]) -> list[list[str]]:
    """List groups of names whose tensors are the same view of the same memory, names in the order of the state.

    Args:
        state: Named tensors; other values are ignored.
    """
    names: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and _has_address(tensor) and tensor.numel():
            names[tensor.data_ptr()].append(name)
    views: dict[Any, list[str]] = defaultdict(list)
    for name in (name for group in _groups(names) for name in group):  # few: a view takes longer to describe
        tensor = state[name]
        views[tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype].append(name)
    return _groups(views)


def _groups(names: Mapping[Any, list[str]]) -> list[list[str]]:
    return [group for group in names.values() if len(group) > 1]


def _has_address(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type not in {"meta", "xla"}


def memory_key(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return a key that is equal for tensors that share memory."""
    return tensor.device, tensor.untyped_storage().data_ptr() if _has_address(tensor) else id(tensor)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Make named tensors fit for safetensors: contiguous, and none sharing memory.

    Of several names for one tensor the first is kept: a model registers its embedding before the head that shares its
    weight, and the class without the head must find the embedding in the file. Other views of one memory are copied.

    Args:
        state_dict: Named tensors.

    Returns:
        A new dictionary; tensors that need no change are the same objects.

    Raises:
        ValueError: A value is not a tensor.
    """
    dropped = {name for group in tied_names(state_dict) for name in group[1:]}
    seen: set[tuple[Any, int]] = set()
    clean = {}
    for name, tensor in state_dict.items():
        if name in dropped:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}: safetensors "
                "files contain tensors only; pass safe_serialization=False"
            )
        memory = memory_key(tensor)
        clean[name] = tensor.clone().contiguous() if memory in seen and tensor.numel() else tensor.contiguous()
        seen.add(memory)
    return clean


def add_tied_names(state: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Add the names that saving left out because their tensors share memory with a saved one.

    Args:
        state: Named tensors of a file.
        model: The model to load them into; its own ties are used.

    Returns:
        `state` with the names added.
    """
    wanted = model.state_dict(keep_vars=True)
    if wanted.keys() <= state.keys():  # nothing was left out
        return state
    for group in (*tied_names(wanted), *_names_of_same_object(model)):
        source = next((name for name in group if name in state), None)
        if source is not None:
            state.update({name: state[source] for name in group if name not in state})
    return state


def _names_of_same_object(model: torch.nn.Module) -> list[list[str]]:
    """List the names of parameters that are one object: ties where memory has no addresses (XLA, meta)."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return _groups(names)
