"""Return values: large ones are passed in files, and each one is unpickled when it is read."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from notebook_accelerate import ResultsFreedError, Run, SerializationError, WorkerError
from notebook_accelerate.launch.state import rank_result
from notebook_accelerate.telemetry import ResultEvent, results
from notebook_accelerate.telemetry.worker_order import CHANNEL_BYTES
from tests.support.runs import METHODS, launch
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("zygote")
LARGE = 5 * CHANNEL_BYTES


@dataclass
class _Node:
    name: str
    weight: torch.Tensor
    children: list[_Node] = field(default_factory=list)


def _values() -> dict[str, Callable[[], Any]]:
    def shared() -> Any:
        base = torch.arange(LARGE // 4, dtype=torch.float32)
        return {"base": base, "view": base[10:20], "transposed": base.view(-1, 8).t(), "again": base}

    def nested() -> Any:
        return _Node("root", torch.ones(LARGE // 8), [_Node("leaf", torch.zeros(3)), _Node("big", torch.ones(LARGE))])

    def deep() -> Any:
        value: Any = torch.ones(LARGE)
        for _ in range(150):
            value = [value]
        return value

    return {
        "state dict": lambda: {f"w{i}": torch.full((LARGE // 16,), float(i)) for i in range(5)},
        "bf16": lambda: torch.linspace(0, 1, LARGE, dtype=torch.bfloat16),
        "arrays": lambda: [np.arange(LARGE // 4, dtype=np.int32).reshape(2, -1).T, np.array(3.0), np.zeros((0, 3))],
        "bytes": lambda: (b"x" * LARGE, bytearray(b"y" * LARGE), "é" * LARGE),
        "numbers": lambda: [(i, float(i), str(i)) for i in range(200_000)],
        "shared storage": shared,
        "dataclasses": nested,
        "deep list": deep,
        "empty tensors": lambda: [torch.empty(0), torch.empty(3, 0), torch.ones(LARGE), torch.empty(0)],
        "parameter": lambda: torch.nn.Parameter(torch.ones(LARGE), requires_grad=False),
        "module": lambda: torch.nn.Linear(1500, 1500),
        "complex": lambda: torch.ones(LARGE // 8, dtype=torch.complex64),
        "memory map": lambda: np.ascontiguousarray(np.broadcast_to(np.arange(5.0), (LARGE // 8, 5))),
    }


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        same = (left.dtype, left.shape, left.stride(), left.requires_grad) == (
            right.dtype, right.shape, right.stride(), right.requires_grad,
        )  # fmt: skip
        return type(left) is type(right) and same and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, torch.nn.Module):
        return _equal(left.state_dict(), dict(right.state_dict()))
    if isinstance(left, dict):
        return list(left) == list(right) and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, _Node):
        return _equal(vars(left), vars(right))
    return bool(left == right)


@METHODS
@pytest.mark.parametrize("name", list(_values()))
def test_large_values_arrive_unchanged(method: str, name: str) -> None:
    found = launch(_values()[name], start_method=method).results
    expected = _values()[name]()
    assert _equal(found[0], expected)
    assert _equal(found[1], expected)


def test_tensors_that_share_storage_still_share_it() -> None:
    found = launch(_values()["shared storage"], num_processes=1).results[0]
    found["base"][10] = -1.0
    assert float(found["view"][0]) == -1.0
    assert found["again"] is found["base"]


def test_results_can_be_written_to_without_changing_later_ranks() -> None:
    weights = launch(lambda: torch.ones(LARGE), num_processes=1).results[0]

    def change() -> float:
        weights.add_(1)
        return float(weights.sum())

    weights[0] = 5.0
    assert launch(change).results == (2 * LARGE + 4.0,) * 2
    assert float(weights.sum()) == LARGE + 4.0


@pytest.mark.parametrize("read", [False, True])
def test_large_values_leave_no_file_open(read: bool) -> None:
    for _ in range(3):
        launch(int)
    until(lambda: not _threads_of_runs())
    before = psutil.Process().num_fds()
    for _ in range(3):
        run = launch(lambda: (b"x" * LARGE, torch.ones(LARGE)))
        if read:
            run.results  # noqa: B018
        run.free_results()
    until(lambda: not _threads_of_runs())
    assert psutil.Process().num_fds() == before


def _threads_of_runs() -> list[str]:
    """Return the names of threads in which finished runs move memory into huge pages."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("notebook-accelerate-run")]


def _payload_files(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The listing includes its own descriptor, which is closed by now.
            found.append(str(link.readlink()))
    return [target for target in found if "notebook-accelerate-payload" in target]


def test_a_rank_that_is_killed_while_sending_leaves_no_file(tmp_path: Path) -> None:
    class Slow:
        def __reduce__(self) -> Any:
            (tmp_path / "pickling").touch()
            time.sleep(600)

    before = _payload_files(os.getpid())
    run = launch(lambda: [b"x" * LARGE, Slow()], num_processes=1, block=False)
    until((tmp_path / "pickling").exists)
    assert _payload_files(run.ranks[0].pid or 0)
    run.stop(grace=0.0)
    assert run.status == "stopped"
    assert len(_payload_files(os.getpid())) <= len(before)  # An earlier run may have closed files in the meantime.


# ---- values that cannot be transferred


@METHODS
def test_a_value_that_cannot_be_pickled_fails_only_its_own_reading(
    method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> Any:
        return threading.Lock() if os.environ["RANK"] == "1" else "kept"

    run = launch(train, start_method=method)
    assert run.status == "succeeded"
    assert [info.state for info in run.ranks] == ["succeeded"] * 2
    assert run.ranks[0].result == "kept"
    with pytest.raises(SerializationError, match=r"rank 1: the return value \(a lock\) cannot be pickled.*torch\.save"):
        run.ranks[1].result  # noqa: B018
    with pytest.raises(SerializationError, match="rank 1"):
        run.results  # noqa: B018
    assert [text for text in run.warnings if "lock" in text]
    assert "cannot be pickled" in capfd.readouterr().err


def _check_unreadable(run: Run, reason: str) -> None:
    """Check that a run succeeded, but that its results cannot be read for the given reason."""
    assert run.status == "succeeded", run.error
    with pytest.raises(SerializationError, match=reason):
        run.results  # noqa: B018


def test_the_error_for_a_prepared_model_names_unwrap_model() -> None:
    def train() -> Any:
        from notebook_accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        return {"model": [accelerator.prepare(torch.nn.Linear(2, 2))]}

    _check_unreadable(launch(train), r"accelerator\.unwrap_model\(model\)")


class _Raises:
    """An object that raises an error when it is unpickled."""

    def __init__(self, error: str) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return exec, (f"raise {self.error}",)


@METHODS
@pytest.mark.parametrize("error", ["SystemExit(3)", "GeneratorExit()", "BaseException('odd')", "MemoryError()"])
def test_unpickling_that_raises_fails_only_the_reading(method: str, error: str) -> None:
    run = launch(lambda: _Raises(error) if os.environ["RANK"] == "0" else 5, start_method=method)
    _check_unreadable(run, f"of rank 0 cannot be unpickled: {error.partition('(')[0]}")
    assert run.ranks[1].result == 5


def test_a_reduce_that_exits_counts_as_a_value_that_cannot_be_pickled() -> None:
    class Exits:
        def __reduce__(self) -> Any:
            raise SystemExit(3)

    _check_unreadable(launch(Exits), "SystemExit: 3")


class _Sleeps:
    def __reduce__(self) -> Any:
        return time.sleep, (600,)


def test_slow_unpickling_delays_neither_the_run_nor_its_stop() -> None:
    def train() -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(600)
        return _Sleeps()

    run = launch(train, block=False)
    until(lambda: run.ranks[0].exited)
    run.stop(grace=1.0)
    assert run.status == "stopped"


def test_a_result_can_be_freed_while_it_is_unpickled() -> None:
    started, freed = threading.Event(), threading.Event()
    found: list[object] = []

    def load() -> int:
        started.set()
        freed.wait(20)
        return 7

    def read() -> None:
        try:
            found.append(result.read())
        except ResultsFreedError as error:
            found.append(str(error))

    result = rank_result.RankResult(load)
    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(20)
    result.free("freed")
    freed.set()
    reader.join(20)
    assert found == ["freed"]


def test_reading_can_be_retried() -> None:
    attempts: list[int] = []

    def load() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            raise ImportError("no module named x")
        return 7

    found = rank_result.RankResult(load)
    with pytest.raises(SerializationError, match="no module named x"):
        found.read()
    assert (found.read(), found.read(), len(attempts)) == (7, 7, 2)


def test_concurrent_readers_get_the_same_object() -> None:
    run = launch(lambda: torch.ones(LARGE), num_processes=1)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(run.results[0])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(value) for value in found}) == 1


def test_the_state_of_a_rank_can_be_copied_and_pickled() -> None:
    info = launch(lambda: torch.ones(LARGE), num_processes=1).ranks[0]
    assert torch.equal(pickle.loads(pickle.dumps(info)).result, info.result)
    assert torch.equal(copy.deepcopy(info).result, info.result)


def test_a_value_that_a_rank_reads_stays_available_to_the_kernel() -> None:
    made = launch(lambda: (b"x" * LARGE, torch.ones(LARGE)), num_processes=1)
    assert launch(lambda: float(made.results[0][1].sum())).results == (float(LARGE),) * 2
    assert made.results[0][0] == b"x" * LARGE


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only files in memory have seals")
@pytest.mark.parametrize("read", [False, True])
def test_freed_files_that_a_rank_inherited_use_no_memory(read: bool) -> None:
    pickled = results.dump_result(torch.ones(LARGE), "the value", 0)
    files = results.ResultFiles(pickled.descriptors, pickled.sizes or [])
    inherited = [os.dup(descriptor) for descriptor in pickled.descriptors]
    value = files.load() if read else None
    files.close()
    sizes = [os.fstat(descriptor).st_size for descriptor in inherited]
    for descriptor in inherited:
        os.close(descriptor)
    if value is None:
        assert sizes == [0, 0]
    else:
        assert float(value.sum()) == LARGE


def test_a_rank_that_drops_an_inherited_result_leaves_it_to_the_kernel() -> None:
    made = [launch(lambda: torch.ones(LARGE), num_processes=1)]

    def drop() -> None:
        made[0].free_results()

    launch(drop)
    assert float(made[0].results[0].sum()) == LARGE


# ---- bounds


def test_the_error_for_a_value_larger_than_memory_says_how_to_save_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "machine_memory", lambda: (8 << 30, (1 << 29) + LARGE))
    run = launch(lambda: torch.ones(LARGE), num_processes=1)
    _check_unreadable(run, r"too large to return.*is available; save it.*torch\.save")
    assert launch(lambda: torch.ones(LARGE // 8), num_processes=1).results[0].numel() == LARGE // 8


def test_writing_stops_if_others_use_up_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_WRITE_BYTES", LARGE)
    left = iter([8 << 30, 8 << 30, 0])
    monkeypatch.setattr(results, "machine_memory", lambda: (8 << 30, next(left)))
    before = _payload_files(os.getpid())
    with pytest.raises(SerializationError, match="too large to return"):
        results.dump_result([torch.ones(LARGE), torch.ones(LARGE)], "it", CHANNEL_BYTES)
    assert _payload_files(os.getpid()) == before


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_results_around_the_size_limit_of_the_channel_arrive(extra: int) -> None:
    empty = results.dump_result(b"", "it", None)
    size = CHANNEL_BYTES - len(pickle.loads(empty.payload)[0]) + extra
    for count in range(size - 16, size):
        found = results.dump_result(b"x" * count, "it", CHANNEL_BYTES)
        event = ResultEvent(found.payload, found.sizes)
        assert rank_result.received(event, found.descriptors, 0).read() == b"x" * count


def test_without_files_everything_travels_in_the_channel() -> None:
    found = results.dump_result(torch.ones(LARGE), "it", None)
    assert (found.sizes, found.descriptors) == (None, ())
    assert math.isclose(len(found.payload), 4 * LARGE, rel_tol=0.01)


# ---- further cases


def test_an_error_that_cannot_be_shown_becomes_an_unreadable_value() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Both:
        def __init__(self, at: str) -> None:
            self.at = at

        def __reduce__(self) -> Any:
            if self.at == "rank":
                raise MuteError
            return exec, (
                "class MuteError(Exception):\n    def __str__(self):\n        raise ValueError\nraise MuteError",
            )

    run = launch(lambda: Both("rank") if os.environ["RANK"] == "0" else Both("kernel"))
    for info in run.ranks:
        with pytest.raises(SerializationError, match="Mute"):
            info.result  # noqa: B018


def test_an_error_with_a_huge_text_is_cut() -> None:
    class Loud:
        def __reduce__(self) -> Any:
            raise ValueError("\ud800" + "x" * 100_000_000)

    run = launch(Loud, num_processes=1)
    with pytest.raises(SerializationError) as caught:
        run.results  # noqa: B018
    assert len(str(caught.value)) < 5000


def _limit(resource_name: str, value: int) -> None:
    import resource

    kind = getattr(resource, resource_name)
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


@pytest.mark.parametrize(("name", "value"), [("RLIMIT_FSIZE", 1 << 16), ("RLIMIT_NOFILE", 0)])
def test_a_rank_that_cannot_write_a_file_reports_it(name: str, value: int) -> None:
    def train() -> Any:
        made = torch.ones(LARGE)
        _limit(name, value)
        return made

    _check_unreadable(launch(train, num_processes=1), r"File too large|Too many open files")


def test_a_kernel_out_of_descriptors_loses_the_value_and_nothing_else(tmp_path: Path) -> None:
    import resource

    def train() -> Any:
        until((tmp_path / "go").exists)
        return torch.ones(LARGE)

    run = launch(train, num_processes=1, block=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        (tmp_path / "go").touch()
        # The next descriptor gets the lowest free number, and descriptors may have gaps.
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        until(lambda: run.ranks[0].returned is not None or run.done)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert run.wait(60)
    _check_unreadable(run, "the kernel has no free file descriptors")


def test_results_of_earlier_attempts_are_freed() -> None:
    def train() -> Any:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            time.sleep(0.5)
            raise RuntimeError("once")
        return torch.ones(LARGE)

    run = launch(train, max_restarts=1)
    held = [record.event.result.nbytes for record in run._internals.journal.records if hasattr(record.event, "result")]
    assert sorted(size > 0 for size in held) in ([False, True, True], [True, True])
    assert [value.numel() for value in run.results] == [LARGE] * 2


def test_the_results_of_an_error_are_read_one_by_one() -> None:
    def train() -> Any:
        rank = int(os.environ["RANK"])
        if rank == 2:
            time.sleep(0.5)
            raise RuntimeError("lost")
        return (7, threading.Lock())[rank]

    with pytest.raises(WorkerError) as caught:
        launch(train, num_processes=3)
    found = caught.value.results
    assert (list(found), found[0], len(found)) == ([0, 1], 7, 2)
    assert repr(found) == "<results of ranks 0, 1>"
    with pytest.raises(SerializationError, match="lock"):
        found[1]


class _HostileError(Exception):
    """An exception that runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        super().__init__("hostile")
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


@METHODS
@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import time; time.sleep(4)", "(takes more than|the exceptions of other ranks took) 2 s"),
    ],
)
def test_an_exception_may_run_any_code_when_it_is_unpickled(method: str, code: str, note: str) -> None:
    def train() -> None:
        raise _HostileError(code)

    with pytest.raises(WorkerError, match=note):
        launch(train, start_method=method)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.endswith("-exception")])


def test_an_exception_with_a_large_attribute_arrives_without_it() -> None:
    def train() -> None:
        error = ValueError("large")
        error.tensor = torch.ones(LARGE)  # type: ignore[attr-defined]
        raise error

    note = r"the exception itself is not sent: 2\d,\d{3},\d{3} bytes, at most 16,777,216"
    with pytest.raises(WorkerError, match=rf"ValueError: large  \({note}\)"):
        launch(train)


def test_many_small_tensors_arrive_from_several_ranks() -> None:
    def make() -> Any:
        return [torch.full((50,), float(i)) for i in range(20_000)] + [torch.ones(LARGE)]

    for found in launch(make, num_processes=4).results:
        assert [float(found[i][0]) for i in (0, 77, 19_999)] == [0.0, 77.0, 19_999.0]


def test_tensors_with_other_layouts_arrive() -> None:
    def make() -> Any:
        eye = torch.eye(2000)
        return eye.to_sparse(), torch.full((LARGE,), 1j).conj(), torch.empty(LARGE, device="meta"), eye.t()[3:]

    sparse, conjugate, meta, view = launch(make).results[1]
    assert float(sparse.to_dense().trace()) == 2000.0
    assert complex(conjugate[-1]) == -1j
    assert (meta.device.type, meta.shape, float(view[0, 3])) == ("meta", (LARGE,), 1.0)
