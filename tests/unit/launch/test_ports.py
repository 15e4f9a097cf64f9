"""The search for a port for the process group."""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from notebook_accelerate.errors import PortInUseError
from notebook_accelerate.launch.processes import ports


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    for run_id in range(-9, 0):
        ports.release(run_id)


def _free() -> int:
    """Return a free port below the range of the system's ephemeral ports."""
    for port in range(20_000 + os.getpid() % 5_000, 29_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")


def test_a_free_port_is_used_silently() -> None:
    port = _free()
    assert ports.reserve(-1, port, fixed=False) == (port, "")


def test_a_taken_port_is_replaced_with_a_message_of_one_line(taken: int) -> None:
    port, note = ports.reserve(-1, taken, fixed=False)
    assert port != taken
    assert note == f"port {taken} is taken, using {port}"


def test_port_zero_gives_any_free_port() -> None:
    port, note = ports.reserve(-1, 0, fixed=False)
    assert port > 0
    assert note == ""


def test_two_concurrent_runs_get_two_ports_until_one_is_released() -> None:
    asked = _free()
    first, _ = ports.reserve(-1, asked, fixed=False)
    second, note = ports.reserve(-2, asked, fixed=False)
    assert first == asked != second
    assert "taken" in note
    ports.release(-1)
    assert ports.reserve(-3, asked, fixed=False) == (asked, "")


def test_a_taken_port_for_several_machines_is_refused_in_one_line(taken: int) -> None:
    with pytest.raises(PortInUseError, match=f"port {taken} is taken.*use_port={taken + 1}") as caught:
        ports.reserve(-1, taken, fixed=True)
    assert "\n" not in str(caught.value)
    assert ports.reserve(-2, taken, fixed=True, here=False) == (taken, "")


def test_the_error_for_the_last_port_number_suggests_a_valid_one() -> None:
    with socket.create_server(("127.0.0.1", 65535)), pytest.raises(PortInUseError) as caught:
        ports.reserve(-1, 65535, fixed=True)
    assert "65536" not in str(caught.value)


def test_a_port_held_on_all_interfaces_is_taken() -> None:
    with socket.create_server(("", 0)) as server:
        asked = server.getsockname()[1]
        assert ports.reserve(-1, asked, fixed=False)[0] != asked


linux = pytest.mark.skipif(sys.platform != "linux", reason="ports are only held on Linux")


@linux
def test_a_port_that_another_kernel_has_reserved_is_taken_until_that_kernel_exits() -> None:
    asked = _free()
    code = "from notebook_accelerate.launch.processes import ports; "
    code += f"print(ports.reserve(1, {asked}, fixed=False)); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline().decode().strip() == f"({asked}, '')"
        port, note = ports.reserve(-1, asked, fixed=False)
        assert port != asked
        assert note == f"port {asked} is taken, using {port}"
        with pytest.raises(PortInUseError):
            ports.reserve(-2, asked, fixed=True)
        other.kill()
        other.wait()
    assert ports.reserve(-3, asked, fixed=False) == (asked, "")


@linux
def test_the_system_does_not_hand_out_a_reserved_port_and_torchs_store_can_listen_on_it() -> None:
    port, _ = ports.reserve(-1, 0, fixed=False)
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, timeout=dt.timedelta(seconds=60))
    store.set("key", "value")
    assert store.get("key") == b"value"


@linux
def test_releasing_a_port_closes_its_descriptor() -> None:
    gc.collect()  # Collect first, so that descriptors of earlier tests are not closed during this one.
    before = psutil.Process().num_fds()
    ports.reserve(-1, 0, fixed=False)
    assert psutil.Process().num_fds() == before + 2
    ports.release(-1)
    assert psutil.Process().num_fds() == before
