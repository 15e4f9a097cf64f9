"""Record steps of a rank with torch's profiler, when the kernel requests it."""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from notebook_accelerate import torch_internals
from notebook_accelerate.config import environ
from notebook_accelerate.files.temporary_folders import make_private_folder_for, remove_private_folder
from notebook_accelerate.telemetry import Event, steady_time, step_time
from notebook_accelerate.telemetry.debug_protocol import AFTER_STEPS, TRACE_KEY, ProfileReply, ProfileRequest
from notebook_accelerate.telemetry.tracebacks import describe_error
from notebook_accelerate.worker import exit_handlers, held_tensors, waits
from notebook_accelerate.worker.timed_samples import TimedSamples, read_quickly, thread_delay

if TYPE_CHECKING:
    from torch.profiler import profile


BEGIN_SECONDS = 60.0
"""How long a request waits for the first step."""
STEPS_SECONDS = 300.0
"""How long the requested steps may take. After that, the trace recorded so far is sent."""
STUCK_SECONDS = 10.0
"""Seconds after which a main thread that has not moved is considered unable to reach the end of its step."""
BOUNDARY_SECONDS = 0.5
"""With ``seconds=``, how long to wait for a step before recording starts between two bytecodes."""
BYTECODE_SECONDS = 2.0
"""How long the main thread may take to reach its next bytecode. If it takes longer, it is waiting in native code."""
WITHOUT_STEPS = 3
"""If this many metrics arrive without an optimizer step, each metric counts as the end of a step."""


class StepProfiler:
    """Serves one request to record steps. ``at_boundary``, ``begin`` and ``finish`` are called on the main thread.

    A separate thread first imports what torch's profiler needs. During that time, ``at_boundary`` and ``due`` do
    nothing. Then the thread takes samples, and completes the trace after ``finish`` has stopped torch's profiler.

    Args:
        request: The request with the number of steps and the data to record.
        reply: Sends the reply to the kernel.
        done: Called at the end, on the thread that ends the recording.
    """

    def __init__(self, request: ProfileRequest, reply: Callable[[Event], None], done: Callable[[], None]) -> None:
        self.request = request
        self._reply, self._done = reply, done
        self._created = time.monotonic()
        self._profiler: Any = None
        self._made: Any = None
        self._samples: TimedSamples | None = None
        self._recording = False
        self._recorded: Recorded | None = None
        self._stopped = threading.Event()
        self._level = os.environ.get("KINETO_LOG_LEVEL")
        self._main = threading.main_thread().ident
        self._counts_metrics, self._metrics = False, 0
        self._warmup = self._steps = self._skipped = 0
        self._in_part = False
        self._others: Callable[[], None] = lambda: None
        self._began = self._asked = 0.0
        self._marks: list[dict[str, float]] = []
        self._boundaries: list[int] = []
        self._held: list[dict[str, Any]] = []
        self._graphs = held_tensors.GraphWatch()
        self._over = self._ready = False
        self._thread = threading.Thread(target=self._run, name="notebook-accelerate-profile", daemon=True)
        self._thread.start()

    # ---- the profile's own thread

    def _run(self) -> None:
        self._prepare()
        samples = self._sample()
        self._stopped.wait()
        step_time.at_end.discard(self._note_step)
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            self._write(recorded, samples)
        exit_handlers.awaited.discard(self._thread)

    def _prepare(self) -> None:
        """Do everything that is slow the first time, while training continues."""
        with suppress(Exception):  # If this fails, `begin` creates the profiler at the step boundary.
            torch_internals.import_inductor()  # This takes seconds.
            held_tensors.prepare()
            self._made = self._make()

    def _sample(self) -> dict[str, Any]:
        self._samples = samples = TimedSamples()
        self._created, self._ready = time.monotonic(), True
        step_time.at_end.add(self._at_step)
        try:
            return samples.run()
        except Exception as error:  # noqa: BLE001 - the trace is useful without samples
            return {"error": describe_error(error, 300)}

    def _collectives(self) -> list[tuple[str, int, str, int, float]]:
        """Return the collectives and their groups if there are several groups, because gloo's events name no group."""
        with suppress(Exception):  # If this fails, only the collectives of different ranks cannot be matched.
            if self._marks and len(torch_internals.process_groups()) > 1:
                return waits.entered_collectives(self._marks[0]["time"] / 1e9, self._marks[-1]["time"] / 1e9)
        return []

    def _write(self, recorded: Recorded, samples: dict[str, Any]) -> None:
        recorded.facts |= {"samples": samples, "boundaries": self._boundaries, "collectives": self._collectives()}
        try:
            reply = recorded.complete()
        except Exception as error:  # noqa: BLE001 - the training continues
            reply = self._not_written(error)
        self._end(reply)

    # ---- the main thread

    def at_boundary(self) -> None:
        """Handle a metric or a report of progress, which ends a step if no optimizer has taken one."""
        if self._counts_metrics:
            self._note_step()
        if self._over or not self._ready or threading.get_ident() != self._main or step_time.steps():
            return
        self._metrics += 1
        if self._metrics >= WITHOUT_STEPS:
            self._counts_metrics = True
            self._advance()

    def _at_step(self) -> None:
        if threading.get_ident() != self._main:
            return
        # This is the first step of an optimizer, and the events recorded before it are only a part of that step.
        if self._counts_metrics:
            self._counts_metrics, self._in_part = False, self._recording
            self._skipped, self._steps = self._skipped + self._steps, 0
        self._advance()

    def _note_step(self) -> None:
        """Record the end of a step that is only sampled, because torch's profiler has been stopped."""
        if self._boundaries and threading.get_ident() == self._main:
            self._boundaries.append(time.time_ns())

    def _advance(self) -> None:
        if self._over:
            return
        if self._profiler is None:
            self.begin()
            return
        if self._warmup:
            self._warmup -= 1
            self._profiler.step()
            self._start_recording()
            return
        if self._in_part:
            self._skip_part()
            return
        self._steps += 1
        self._mark()
        if self._steps >= self.request.steps:
            self._end_steps()
            self.finish()
        else:
            self._profiler.step()

    def _end_steps(self) -> None:
        """End the last step, so that TensorBoard counts later operations neither for it nor for another step."""
        from torch.profiler import record_function

        self._profiler.step_rec_fn.__exit__(None, None, None)
        after: Any = record_function(AFTER_STEPS)
        self._profiler.step_rec_fn = after  # Stopping the profiler ends this range.
        after.__enter__()

    def _skip_part(self) -> None:
        """Handle the end of the step during which the recording started. All further steps are whole."""
        self._in_part = False
        self._skipped += 1
        self._marks.clear()
        self._held.clear()
        self._mark()
        self._record_variables()
        self._profiler.step()

    def begin(self, *, within_step: bool = False) -> None:
        """Start torch's profiler, either at the end of a step or within a step."""
        if self._profiler is not None or self._over:
            return
        if torch_internals.profiler_enabled():  # Starting a second profiler would end the first one.
            self.fail("the function itself records with torch's profiler")
            return
        self._asked, self._began = 0.0, time.monotonic()
        os.environ["KINETO_LOG_LEVEL"] = "6"  # Otherwise torch's profiler writes to stderr when it starts and stops.
        try:
            made, self._made = self._made, None
            self._profiler = made if made is not None and self._warmup == warmup_steps() else self._make()
            self._record_variables()
            with quiet_stdio():
                self._profiler.start()
        except Exception as error:  # noqa: BLE001 - the function itself may be profiling
            self._profiler = None
            self.fail(f"torch's profiler does not start ({describe_error(error, 300)})")
            return
        self._others = torch_internals.before_profilers_start(self._make_way)
        self._in_part = within_step
        if within_step and self._warmup:
            self._warmup = 0
            self._profiler.step()
        if not self._warmup:
            self._start_recording()

    def _make_way(self, _profiler: object) -> None:
        """End the recording before the function starts its own profiler, because torch allows only one at a time."""
        if threading.get_ident() != self._main:
            return
        if self._steps:
            self.finish()
        else:
            self.fail("the function itself has begun to record with torch's profiler")
            self._discard()

    def _make(self) -> Any:
        """Create torch's profiler.

        With CUDA, its schedule has a warm-up step, because the first records are slow.
        """
        from torch import profiler

        self._warmup = warmup_steps()
        warmup, action = self._warmup, profiler.ProfilerAction
        plan: Any = lambda step: action.WARMUP if step < warmup else action.RECORD  # noqa: E731
        return profiler.profile(
            activities=None if self._warmup else [profiler.ProfilerActivity.CPU],
            schedule=plan,
            record_shapes=True,
            profile_memory=self.request.memory,
            # Otherwise torch 2.11 would warn in the user's cell that it clears events, even with only one cycle.
            acc_events=True,
            **torch_internals.trace_only(),
        )

    def _start_recording(self) -> None:
        self._began = time.monotonic()
        self._mark()
        self._recording = True
        if self._samples is not None:
            self._samples.begin(self.request.samples)

    def _mark(self) -> None:
        """Record the current time, and how long the main thread has waited for a CPU core so far."""
        self._marks.append({"time": float(time.time_ns()), "delay": thread_delay(os.getpid())})

    def _record_variables(self) -> None:
        """Record the tensors with graphs that variables hold, before the first step and after the last one."""
        with suppress(Exception):  # A variable may have any type, and inspecting it may raise any error.
            self._held.append(self._graphs.look())

    def finish(self) -> None:
        """Stop torch's profiler and write its trace, which the thread of this profile then completes."""
        if self._over:
            self._discard()
            return
        if self._profiler is None or not self._recording:
            self.fail("no step was recorded")
            self._discard()
            return
        self._over = True
        step_time.at_end.discard(self._at_step)
        self._end_samples()
        seconds = time.monotonic() - self._began
        self._others()
        profiler, self._profiler = self._profiler, None
        exit_handlers.awaited.add(self._thread)
        try:
            try:
                facts = self._facts(seconds)
            finally:
                profiler.stop()
            self._recorded = Recorded(profiler, self.request, facts)
        except Exception as error:  # noqa: BLE001 - the training continues
            self._end(self._not_written(error))
        finally:
            if self._recorded is not None and self._samples is not None and self._samples.running:
                self._boundaries.append(time.time_ns())
                step_time.at_end.add(self._note_step)
            self._stopped.set()
            self._restore_level()

    def _end_samples(self) -> None:
        if self._samples is not None:
            self._samples.end()

    def _not_written(self, error: Exception) -> ProfileReply:
        return ProfileReply(self.request.number, error=f"the trace was not written ({describe_error(error)})")

    def _discard(self) -> None:
        """Stop torch's profiler without writing a trace, because a reply without one has already been sent."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            self._others()
            with suppress(Exception):
                profiler.stop()
            self._done()

    def _facts(self, seconds: float) -> dict[str, Any]:
        self._record_variables()
        return {
            "version": 1,
            "rank": int(os.environ.get("RANK", "0")),
            "steps": self._steps,
            "skipped": self._skipped,
            "seconds": seconds,
            "clock": steady_time.now() - time.time(),
            "marks": self._marks,
            "held": self._held,
            "asked": asked_for(),
        }

    # ---- any thread

    def fail(self, why: str) -> None:
        """Reply that there is no trace, and stop torch's profiler as soon as the main thread returns to Python."""
        if self._over:
            return
        self._over = True
        step_time.at_end.discard(self._at_step)
        self._end_samples()
        self._stopped.set()
        self._restore_level()
        if self._profiler is None:
            self._done()
        self._reply(ProfileReply(self.request.number, error=why))

    def _end(self, reply: ProfileReply) -> None:
        self._done()
        self._reply(reply)

    def _restore_level(self) -> None:
        if self._level is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)
        else:
            os.environ["KINETO_LOG_LEVEL"] = self._level

    def due(self, moved: float) -> Callable[[FrameType | None, str], None] | None:
        """Return what the main thread must do at its next bytecode, or None.

        Args:
            moved: When the main thread last moved, in seconds since the epoch.
        """
        if self._over or not self._ready:
            return None
        now, seconds = time.monotonic(), self.request.seconds
        still = steady_time.now() - moved
        if self._asked:
            if now - self._asked > BYTECODE_SECONDS and still > STUCK_SECONDS:
                self._fail_as_stuck(still)
            return None
        if self._profiler is not None:
            if now - self._began <= (seconds or STEPS_SECONDS):
                return None
            self._asked = now
            return lambda _frame, _note: self.finish()
        if seconds:
            if now - self._created <= BOUNDARY_SECONDS:
                return None
            self._asked = now
            return lambda _frame, _note: self.begin(within_step=True)
        if still > STUCK_SECONDS:
            self._fail_as_stuck(still)
        elif now - self._created > BEGIN_SECONDS:
            self.fail(f"no step was seen within {BEGIN_SECONDS:.0f} s; pass seconds=, as in run.profile(seconds=5)")
        return None

    def _fail_as_stuck(self, still: float) -> None:
        self.fail(f"its main thread has not moved for {still:.0f} s; run.diagnose() shows where it is")


def warmup_steps() -> int:
    """Return the number of warm-up steps for torch's profiler: one if the function uses CUDA, otherwise none."""
    cuda: Any = sys.modules["torch"].cuda
    return int(cuda.is_available() and cuda.is_initialized())


def resident_bytes() -> int:
    """Return this process's resident memory, or 0 if the system does not report it."""
    with suppress(OSError, ValueError, IndexError):
        return int(read_quickly("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@contextmanager
def quiet_stdio() -> Iterator[None]:
    """Discard what C code writes to its ``stderr`` within the block, because torch warns about forked ranks there.

    The file descriptor is not changed, so the output of Python and of other processes still arrives.
    """
    if sys.platform != "linux":
        yield
        return
    libc = _libc()
    stream = ctypes.c_void_p.in_dll(libc, "stderr")
    before, null = stream.value, libc.fopen(b"/dev/null", b"w")
    stream.value = null or before
    try:
        yield
    finally:
        stream.value = before
        if null:
            libc.fclose(ctypes.c_void_p(null))


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    return libc


def asked_for() -> dict[str, Any]:
    """Return the settings that the training code has requested: its precision, and whether it compiles its model."""
    found = {"mixed_precision": environ.text("ACCELERATE_MIXED_PRECISION", "no"), "compiled": ""}
    for room in ("notebook_accelerate.state.accelerator_state", "accelerate.state"):
        shared = getattr(getattr(sys.modules.get(room), "AcceleratorState", None), "_shared_state", {})
        found["mixed_precision"] = shared.get("_mixed_precision") or found["mixed_precision"]
        plugin = shared.get("dynamo_plugin")
        backend = str(getattr(getattr(plugin, "backend", None), "value", "no")).lower()
        if backend != "no":
            found["compiled"] = f"dynamo_backend={backend!r}"
    return {**found, "compiled": found["compiled"] or held_tensors.compiled_variable()}


# ---- a profile's trace file

_END = 4096
"""Number of bytes to read from the end of a trace, which include its last brace."""


class Recorded:
    """A trace that torch's profiler has written, to be completed and sent.

    The trace is written on the main thread. Torch holds the interpreter lock while it writes, so writing on another
    thread would delay the main thread just as long, and each of its operations would have to hand over the lock.

    Args:
        profiler: Torch's profiler, which has been stopped.
        request: The request that started the profiler.
        facts: Data that torch's profiler does not record.
    """

    def __init__(self, profiler: profile, request: ProfileRequest, facts: dict[str, Any]) -> None:
        self.facts, self._number = facts, request.number
        self._own: Path | None = None
        folder = Path(request.folder)
        if not (folder / request.token).exists():
            folder = self._own = make_private_folder_for(self)
        self._path = folder / f"rank{facts['rank']}.{request.number}.pt.trace.json"
        profiler.export_chrome_trace(str(self._path))

    def complete(self) -> ProfileReply:
        """Add the facts to the trace file. The reply contains the file if the kernel's folder is on another machine."""
        append(self._path, self.facts)
        facts = self.facts
        reply = ProfileReply(self._number, "", "", facts["steps"], facts["seconds"], facts["clock"])
        if self._own is None:
            reply.path = str(self._path)
        else:
            reply.payload = gzip.compress(self._path.read_bytes(), 1)
            remove_private_folder(self._own)
        return reply


def append(path: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to a trace file without reading the whole file.

    Raises:
        ValueError: The file does not end as a JSON object does.
    """
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _END)
        file.seek(start)
        end = file.read().rstrip()
        if not end.endswith(b"}"):
            raise ValueError(f"{path} is not a trace, because it does not end with a brace")
        file.seek(start + len(end) - 1)
        file.write(f',\n"{TRACE_KEY}": {json.dumps(facts)}}}\n'.encode())
