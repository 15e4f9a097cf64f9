"""Fixtures of all groups: the leak check, and skips on machines that lack a device."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest

from tests.support import leaks

with contextlib.suppress(ImportError):  # Some environments lack hypothesis, and run no property tests.
    from hypothesis import HealthCheck, settings

    # Use the same examples in every run, without a deadline, which a busy machine would exceed.
    settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")

# While the tests and torch are imported, garbage collection would take a third of the time and find nothing.
gc.disable()
# Two ranks and a kernel share few cores, so each gets one thread, here and in all child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# State that outlives a process goes to a temporary folder, so that tests neither read nor change the user's own.
_state = tempfile.TemporaryDirectory(prefix="state-")
os.environ["XDG_STATE_HOME"] = _state.name
os.environ.pop("XDG_RUNTIME_DIR", None)
# Every kernel and rank imports the package, and would compile it each time if there were no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, socket, environment variable, handler or process group behind."""
    if request.node.get_closest_marker("leaks_ok"):
        yield
        return
    before = leaks.take()
    yield
    if lines := leaks.compare(before):
        pytest.fail("left behind:\n  " + "\n  ".join(lines), pytrace=False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect nightly tests, skip tests that this machine cannot run, and require reasons for `leaks_ok`."""
    if os.environ.get("TEST_NIGHTLY") != "yes":
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if item not in nightly]
    missing = {"gpu": _without_gpu(items), "xla": _without_xla()}
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
        mark = item.get_closest_marker("leaks_ok")
        if mark and not (mark.args or mark.kwargs.get("reason")):
            raise pytest.UsageError(f'{item.nodeid} must name what it leaves behind: @pytest.mark.leaks_ok("...")')


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip the tests that are left at the time TEST_UNTIL, which is in seconds since 1970."""
    if time.time() > float(os.environ.get("TEST_UNTIL", "inf")):
        pytest.skip("the time of this run is over: see TEST_UNTIL")


def pytest_collection_finish() -> None:
    """Exclude torch and the tests from later garbage collections, which would each take half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the CPU time of the tests, which spent the rest of their time waiting."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    terminalreporter.write_line(f"= processor time of the tests and their processes: {seconds:.0f} s")


def _without_gpu(items: list[pytest.Item]) -> str | None:
    if not any(item.get_closest_marker("gpu") for item in items):
        return None
    if os.environ.get("TEST_GPU") == "dry":  # With TEST_GPU=dry, the tests run on the CPU: see tests/support/gpu.py.
        return None
    import torch

    # device_count asks NVML if possible, so that this process, which starts kernels, gets no CUDA context.
    return None if torch.cuda.device_count() else "no CUDA device on this machine"


def _without_xla() -> str | None:
    return None if importlib.util.find_spec("torch_xla") else "torch_xla is not installed"
