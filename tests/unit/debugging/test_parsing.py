"""Parsing records of a rank's state: faulthandler's dumps, torch's flight recorder, and the output of py-spy."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import types
from typing import Any

import pytest

from notebook_accelerate.debugging import process_stacks
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.supervisor import rank_group
from notebook_accelerate.telemetry import FrameInfo, RankFailure
from notebook_accelerate.telemetry.debug_protocol import Collective, HeartbeatEvent, StacksReply
from notebook_accelerate.telemetry.tracebacks import name_cells
from notebook_accelerate.worker import waits

DUMP = """\
Thread 0x00007f01 (most recent call first):
  File "/lib/channel.py", line 175 in receive
  File "/lib/agent.py", line 68 in _run

Current thread 0x00007f02 [main] (most recent call first):
  File "/tmp/ipykernel_5/77.py", line 12 in step
  File "/tmp/ipykernel_5/77.py", line 30 in train
  File "/x/worker/entry.py", line ??? in run
"""


def test_a_dump_is_read_with_the_signalled_thread_first() -> None:
    threads = process_stacks.parse_dump(DUMP)
    assert list(threads) == ["main", "0x00007f01"]
    assert [(frame.lineno, frame.function) for frame in threads["main"]] == [(0, "run"), (30, "train"), (12, "step")]
    assert process_stacks.parse_dump("Fatal Python error: Aborted") == {}


def test_only_the_new_part_of_a_dump_file_is_read() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"old\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        text = process_stacks.read_new_bytes(file.fileno(), 4, 1.0)
        assert "old" not in text
        assert process_stacks.parse_dump(text)[next(iter(process_stacks.parse_dump(text)))][-1].function == (
            "test_only_the_new_part_of_a_dump_file_is_read"
        )
        assert process_stacks.read_new_bytes(file.fileno(), os.fstat(file.fileno()).st_size, 0.1) == ""


def _entry(number: int, name: str = "gloo:all_reduce", **more: Any) -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "time_created_ns": 5_000_000_000,
        "retired": True,
        "state": "completed",
        "is_p2p": False,
        **more,
    }


def test_a_rank_that_is_still_importing_torch_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    half = types.ModuleType("torch.distributed")
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", half)
    monkeypatch.setitem(sys.modules, "torch.distributed", half)
    assert waits.read_flight_recorder() == ((), {})


def test_the_flight_recorder_gives_open_calls_and_the_last_one() -> None:
    open_call = _entry(3, "nccl:broadcast", retired=False, state="started")
    waiting, last = waits._parse([_entry(1), _entry(2), open_call, _entry(9, is_p2p=True, retired=False)])
    assert waiting == (Collective("default_pg/nccl", 3, "broadcast", ((2, 3),), ("f32",), 5.0),)
    assert waiting[0].text() == "broadcast, the 3rd collective (float32 [2, 3])"
    assert last == {"default_pg/gloo": 2, "default_pg/nccl": 3}
    assert waits._parse([]) == ((), {})


def test_an_unknown_type_keeps_its_name() -> None:
    waiting, _ = waits._parse([_entry(1, retired=False, state="scheduled", input_dtypes=["Float8_e4m3"])])
    assert waiting[0].dtypes == ("float8_e4m3",)


def test_a_watched_rank_records_its_collectives_and_nccl_does_not_abort_it_after_a_suspension() -> None:
    variables = rank_group.watched_rank_variables()
    assert variables == {
        "TORCH_FR_BUFFER_SIZE": rank_group.FLIGHT_RECORDER_ENTRIES,
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }


def test_without_torch_distributed_nothing_waits() -> None:
    assert waits.read_flight_recorder() == ((), {})


def test_events_are_rebuilt_from_their_json_form() -> None:
    row = ["0", 4, "all_reduce", [[128]], ["f32"], 1.0]
    reply = StacksReply(1, {"MainThread": [["f", 1, "g", ""]]}, 0.0, [row])  # type: ignore[arg-type, dict-item]
    assert reply.threads["MainThread"] == (FrameInfo("f", 1, "g", ""),)
    assert reply.waiting[0].shapes == ((128,),)
    beat = HeartbeatEvent(0.0, row)  # type: ignore[arg-type]
    assert beat.waiting is not None
    assert beat.waiting.text() == "all_reduce, the 4th collective (float32 [128])"


SPIED = """\
Process 7: python
Python v3.11.7

Thread 7 (active): "MainThread"
    do_futex_wait (libc.so.6)
    lock (ctypes.cpp:12)
    train (cell.py:3)
Thread 8 (idle): "agent"
    select (selectors.py:4)
"""


def test_py_spys_native_frames_are_read_outermost_first() -> None:
    assert process_stacks.parse_native(SPIED) == (
        "train (cell.py:3)",
        "lock (ctypes.cpp:12)",
        "do_futex_wait (libc.so.6)",
    )
    assert process_stacks.parse_native("") == ()


def test_a_missing_or_forbidden_py_spy_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stacks, "py_spy_path", lambda: None)
    assert process_stacks.native_stack(os.getpid()) == ()
    monkeypatch.setattr(
        process_stacks, "py_spy_path", lambda: sys.executable
    )  # Python exits with an error for py-spy's arguments, as py-spy does without permission.
    assert process_stacks.native_stack(os.getpid()) == ()


@pytest.mark.skipif(process_stacks.py_spy_path() is None, reason="py-spy is not installed")
def test_py_spy_sees_this_process_if_permitted() -> None:
    stack = process_stacks.native_stack(os.getpid())
    if not stack:
        pytest.skip(f"py-spy may not inspect this process: {_refusal(os.getpid())}")
    assert ctypes is not None
    assert any("test_py_spy_sees_this_process" in frame for frame in stack)


_STUCK = """
import ctypes
def train():
    print("in", flush=True)
    ctypes.PyDLL(None).sleep(600)  # holds the interpreter
train()
"""


@pytest.mark.skipif(process_stacks.py_spy_path() is None, reason="py-spy is not installed")
def test_py_spy_sees_native_code_that_holds_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_stacks, "PY_SPY_SECONDS", 60.0)
    with subprocess.Popen([sys.executable, "-c", _STUCK], stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None
        try:
            assert stuck.stdout.readline() == "in\n"
            frames = _seen(stuck.pid)
        finally:
            stuck.kill()
    assert any(frame.startswith("train (") for frame in frames), frames
    below = frames[next(i for i, frame in enumerate(frames) if frame.startswith("train (")) + 1 :]
    assert any("sleep" in frame for frame in below), frames


def _seen(pid: int) -> tuple[str, ...]:
    """Return a process's stack once it contains the native call."""
    frames: tuple[str, ...] = ()
    for _ in range(100):
        frames = process_stacks.native_stack(pid)
        if not frames:
            pytest.skip(f"py-spy may not inspect a child: {_refusal(pid)}")
        if "sleep" in frames[-1]:
            break
        time.sleep(0.05)
    return frames


def _refusal(pid: int) -> str:
    command = [str(process_stacks.py_spy_path()), "dump", "--native", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().partition("\n")[0] or f"exit {done.returncode}"


ABORTED = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match
Fatal Python error: Aborted

Thread 0x01 (most recent call first):
  File "/lib/python3.11/site-packages/torch/distributed/c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 3 in shapes
  File "/x/notebook_accelerate/worker/entry.py", line 185 in run
""".splitlines()


def test_a_crash_of_unlike_collectives_is_explained() -> None:
    failure = RankFailure(0, "signal", 0.0, "killed by SIGABRT (signal 6)", signal=6)
    assert failures.explained(failure, ABORTED).message == (
        "killed by SIGABRT (signal 6), at /home/me/train.py, line 3, in shapes: the ranks called a collective with "
        "different shapes or in a different order (a peer sent 8 bytes, but 4 were expected)"
    )
    assert failures.explained(failure, ["nothing of use"]) is failure
    raised = RankFailure(0, "exception", 0.0, "KeyError: 1")
    assert failures.explained(raised, ABORTED) is raised


def test_cells_are_named_only_at_their_own_lines() -> None:
    text = "> \x1b[32m/home/me/train.py\x1b[39m(3)f()"
    assert name_cells(text) == text
    assert name_cells("> \x1b[32m/tmp/ipykernel_5/77.py\x1b[39m(3)f()") == "> \x1b[32mCell\x1b[39m(3)f()"
