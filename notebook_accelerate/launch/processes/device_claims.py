"""Claims on the devices of this machine, so that two runs of a user never use a device at the same time.

Each run that holds devices, or waits for them, has a file in a private folder of the user, which all kernels and
detached runs share. The names of the files give the order of the claims. The claims of dead processes are removed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.files import guarded_files
from notebook_accelerate.files.temporary_folders import make_private_folder
from notebook_accelerate.hardware.process_liveness import parse_identity, this_process

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The devices that a run holds or waits for.

    Attributes:
        name: The run's name.
        number: The run's number in its kernel.
        devices: The identities of the devices that the run holds, or of those that it can be given.
        count: How many of these devices the run needs.
        held: Whether the run holds the devices.
        detached: Whether the run is detached.
        process: The identity of the run's process; see ``hardware.process_liveness``.
    """

    name: str
    number: int
    devices: tuple[str, ...]
    count: int
    held: bool = False
    detached: bool = False
    process: Mapping[str, Any]

    @property
    def is_own(self) -> bool:
        """Whether the run belongs to this process."""
        return parse_identity(self.process) == this_process()


class DeviceClaim:
    """The claim of one run, from its launch to its end. Safe to use from any thread.

    Args:
        name: The run's name.
        number: The run's number in its kernel.
        devices: The identities of the devices that the run can be given. If there are none, there is nothing to claim.
        count: How many of these devices the run needs.
        detached: Whether the run is detached.

    Attributes:
        devices: The identities of the devices that the run holds, once `acquire` has returned None.
    """

    def __init__(self, name: str, number: int, devices: tuple[str, ...], count: int, *, detached: bool) -> None:
        process = asdict(this_process())
        self._claim = Claim(
            name=name, number=number, devices=devices, count=count, detached=detached, process=process
        )  # fmt: skip
        self._path: Path | None = None

    @property
    def devices(self) -> tuple[str, ...]:
        return self._claim.devices

    def acquire(self, *, in_turn: bool) -> Claim | None:
        """Try to get the devices. Return None if the run has them, or the claim of the run that it would wait for.

        Args:
            in_turn: Whether to wait in the queue, which `acquire` must then be called for again. Devices that earlier
                runs in the queue wait for are not available.
        """
        if not self._claim.devices or self._claim.held:
            return None
        folder = _folder()
        with _locked(folder):
            path = self._path or folder / f"{time.time_ns():020d}-{secrets.token_hex(8)}.json"
            others = [(each, claim) for each, claim in _claims(folder) if each != path]
            ahead = [claim for each, claim in others if claim.held or (in_turn and each.name < path.name)]
            free = _free(self._claim, ahead)
            if len(free) >= self._claim.count:
                self._claim = replace(self._claim, devices=tuple(free[: self._claim.count]), held=True)
            if self._claim.held or (in_turn and self._path is None):
                self._path = path
                _write(path, self._claim)
        return None if self._claim.held else [each for each in ahead if {*each.devices} & {*self._claim.devices}][-1]

    def release(self) -> None:
        """Give up the devices, or the place in the queue."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


def _free(wanted: Claim, ahead: list[Claim]) -> list[str]:
    """Return the devices that a run can have, given the claims that come first."""
    taken = {device for claim in ahead if claim.held for device in claim.devices}
    for claim in ahead:
        if not claim.held:
            taken.update([device for device in claim.devices if device not in taken][: claim.count])
    return [device for device in wanted.devices if device not in taken]


# ---- files

_thread_lock = threading.Lock()
_own_folder: Path | None = None


def _folder() -> Path:
    """Return the folder for claims. If the user has no usable home directory, only this process uses the folder."""
    global _own_folder  # noqa: PLW0603 - there is one such folder per process
    try:
        folder = guarded_files.state_folder() / "devices"
        guarded_files.make_folder(folder)
    except (LaunchError, OSError):
        _own_folder = folder = _own_folder or make_private_folder()
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Prevent other threads and processes from changing claims inside a with block."""
    with _thread_lock:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # The file system may not support locks.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            with suppress(OSError):  # Closing is not enough: a rank that was forked in the meantime has a copy.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _write(path: Path, claim: Claim) -> None:
    part = path.with_suffix(".new")
    part.write_text(json.dumps(asdict(claim)))
    part.replace(path)


def _claims(folder: Path) -> list[tuple[Path, Claim]]:
    """Return the claims of running processes on this machine, oldest first, and remove those of dead ones."""
    found, here = [], this_process()
    for path in sorted(folder.glob("*.json")):
        try:
            content = guarded_files.parse_json(guarded_files.read_limited(path, _MAX_BYTES, own=True))
            claim = Claim(**{**content, "devices": tuple(map(str, content["devices"]))})
        except (OSError, ValueError, TypeError, KeyError):  # The file was just removed, or is not a claim.
            continue
        identity = parse_identity(claim.process)
        if identity is None or identity.has_ended():
            path.unlink(missing_ok=True)
        elif identity.machine == here.machine:
            found.append((path, claim))
    return found
