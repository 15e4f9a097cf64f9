"""Two kernels in separate network namespaces, joined by a virtual cable: the closest thing here to two machines."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.launching import said
from tests.support.namespaces import ADDRESSES, ip, two_namespaces
from tests.support.notebooks import LIMIT, Notebooks, notebooks

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def names() -> Iterator[list[str]]:
    """Yield the names of two namespaces with a cable between them, if this machine permits creating them."""
    with two_namespaces("two") as names:
        yield names


@pytest.fixture(scope="module")
def pair(names: list[str]) -> Iterator[Notebooks]:
    """Yield a kernel in each namespace."""
    with notebooks(2, [("ip", "netns", "exec", name) for name in names]) as found:
        yield found


LISTENING = """
def listening():
    found = []
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(name).read().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            if state == "0A":
                found.append(local.partition(":")[0])
    return found
"""


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_form_one_run(pair: Notebooks, backend: str) -> None:
    options = {"master_addr": ADDRESSES[0], "rdzv_conf": {"secret": "hush"}, "rdzv_backend": backend}
    first, second = pair.finish(pair.launch("meet", "num_processes=1", "num_processes=2", **options))
    first.expect_ok()
    second.expect_ok()
    assert "[rank 2] sum 3.0 of 3 here 2" in first.stdout
    assert pair.values("run.results") == [[3.0, 3.0, 3.0], [3.0, 3.0]]


def test_kernels_listen_on_the_cable_only(pair: Notebooks, names: list[str]) -> None:
    for kernel in pair.kernels:
        kernel.check(LISTENING, LIMIT)
    before = pair.values("sorted(set(listening()))")  # These listeners on loopback are ipykernel's.
    options = {"master_addr": ADDRESSES[0], "rdzv_conf": {"secret": "hush"}, "block": False}
    cells = pair.finish(pair.launch("meet, -1, 600.0", "num_processes=1", "num_processes=1", **options))
    pair.wait_until_all_print(cells, "sum 1.0", [2, 1])
    # The kernel and its children must not listen on all interfaces, and must stop listening with the run.
    everywhere = {"00000000", "0" * 32}
    assert [sorted(everywhere & set(found)) for found in pair.values("listening()")] == [[], []]
    pair.kernels[1].check("run.stop()", LIMIT)
    assert pair.kernels[0].value("run.wait(100)", LIMIT)
    deadline = time.monotonic() + LIMIT
    while (after := pair.values("sorted(set(listening()))")) != before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert after == before


def test_an_unplugged_cable_ends_the_run(pair: Notebooks, names: list[str]) -> None:
    conf = {"secret": "hush", "keep_alive_interval": 2, "keep_alive_max_attempt": 5}
    options = {"master_addr": ADDRESSES[0], "rdzv_conf": conf}
    cells = pair.launch("meet, -1, 600.0", "num_processes=1", "num_processes=1", **options)
    pair.wait_until_all_print(cells, "sum 1.0", [2, 1])
    found = subprocess.run(
        ["ip", "-n", names[1], "-o", "link", "show", "type", "veth"], check=True, capture_output=True, text=True
    )
    end = found.stdout.split(":")[1].strip().partition("@")[0]
    ip("-n", names[1], "link", "set", end, "down")
    try:
        first, second = pair.finish(cells)
    finally:
        ip("-n", names[1], "link", "set", end, "up")
    assert "node 1 (" in said(first)
    assert "was lost: " in said(first)
    assert "node 0 (" in said(second)
    assert "was lost: " in said(second)
