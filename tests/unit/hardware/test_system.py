"""Free ports, the operating system's kernel, and ranks on CPUs."""

from __future__ import annotations

import platform
import socket

import pytest

from notebook_accelerate import Accelerator
from notebook_accelerate.hardware import addresses
from notebook_accelerate.state import process_group
from notebook_accelerate.utils import environment, other


def test_a_port_with_a_listener_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < addresses.get_free_port() < 1 << 16
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # This reserves the port, so that nothing else can listen on it.
        port = server.getsockname()[1]
        assert not other.is_port_in_use(port)
        server.listen()
        assert other.is_port_in_use(port)
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert other.is_port_in_use()


def test_old_kernels_cause_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "release", lambda: "5.15.0-1-generic")
    other.check_os_kernel()
    assert not caplog.records
    monkeypatch.setattr(platform, "release", lambda: "4.14.0-1-generic")
    for check in (other.check_os_kernel, lambda: Accelerator(cpu=True)):
        caplog.clear()
        check()
        assert [record.name for record in caplog.records] == ["accelerate.utils.other"]
        assert "4.14.0, and several ranks may hang on kernels before 5.5.0" in caplog.text


def test_imported_libraries_are_detected() -> None:
    assert environment.are_libraries_initialized("os", "no_such_library") == ["os"]


@pytest.mark.parametrize("prefix", ["", "OMPI_COMM_WORLD_"])
def test_ranks_are_read_from_torchrun_or_mpi(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    names = (
        ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        if prefix
        else ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    for name, value in zip(names, "3412", strict=True):
        monkeypatch.setenv(prefix + name, value)
    assert environment.get_cpu_distributed_information() == environment.CPUInformation(3, 4, 1, 2)


def test_without_variables_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in process_group.RANK_VARIABLES.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert environment.get_cpu_distributed_information() == environment.CPUInformation()


def test_lists_of_cores_have_ranges() -> None:
    assert process_group.parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert process_group.parse_cpu_list("\n") == set()


@pytest.mark.skipif(not hasattr(process_group.os, "sched_setaffinity"), reason="this platform has no affinity")
def test_a_rank_moves_to_the_cores_near_its_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = process_group.os.sched_getaffinity(0)
    near = {min(allowed)}
    monkeypatch.setattr(process_group, "_near_cores", lambda _: near)
    try:
        process_group.override_numa_affinity(1, verbose=True)
        assert process_group.os.sched_getaffinity(0) == near
        assert f"process 1 runs on cores {sorted(near)}" in capsys.readouterr().out
    finally:
        process_group.os.sched_setaffinity(0, allowed)
