"""Training libraries that import this package as `accelerate` in ranks compute the same as with the real one.

Their losses, steps and progress are in the run, and the cell shows neither widgets of ranks nor warnings about forks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients import peer
from tests.clients.programs import IN_ONE_PROCESS, PROGRAMS
from tests.parity.behaviour.description import differences
from tests.support.kernel import Cell, Kernel
from tests.support.launching import ready_kernel

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="no lightning: make test-clients"),
    pytest.mark.skipif(not peer.FOLDER.exists(), reason="the environment has no real accelerate: make test-clients"),
    pytest.mark.timeout(1800),  # This only guards against hangs: several processes import all libraries.
]
EACH = pytest.mark.parametrize("name", PROGRAMS)
TOLERANCE = 1e-4
"""The relative tolerance of losses and weights, most of which are bitwise equal."""
SECONDS = 900

CODE = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
notebook_accelerate.as_accelerate()
from tests.clients.programs import PROGRAMS, run_several

def points(run, name):
    series = run.metrics.get(name)
    return [] if series is None else sorted(zip(series.ranks.tolist(), series.steps.tolist()))
"""
IMPORTS = """
import importlib
from tests.clients.peer import LIBRARIES
for library in LIBRARIES:
    importlib.import_module(library)
"""


@pytest.fixture(scope="session")
def on_accelerate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the real Accelerate's results for all programs that have tests in this session."""
    names = set()
    for item in request.session.items:
        name = getattr(item, "callspec", item).params.get("name") if hasattr(item, "callspec") else None
        if name in PROGRAMS and "on_accelerate" in getattr(item, "fixturenames", ()):
            names.add(f"{name}@1" if "one_process" in item.name else name)
    return peer.run_on_accelerate(tmp_path_factory.mktemp("on_accelerate"), sorted(names))


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """Yield a kernel that has imported the libraries, as in a notebook that uses them."""
    with ready_kernel() as kernel:
        kernel.check(CODE)
        kernel.check(IMPORTS, SECONDS)
        yield kernel


def check_results(name: str, there: list[Any], here: list[Any]) -> None:
    """Fail unless a program returned the same values on both sides, in each rank."""
    for result in (*there, *here):
        assert isinstance(result, dict), f"{name} raised:\n{result}"
    assert differences(there, here, TOLERANCE) == []


def check_run(kernel: Kernel, cell: Cell, name: str, result: dict[str, Any]) -> None:
    """Fail unless a program's run has its curve, steps and progress, and its cell is clean."""
    if steps := result.get("steps"):
        assert kernel.value("[row.last_step for row in run.ranks]") == [steps] * 2
    if PROGRAMS[name].bar:
        assert 0 in kernel.value("list(run._internals.store.loops)")
    if curve := PROGRAMS[name].curve:
        points = kernel.value(f"points(run, {curve!r})")
        assert {rank for rank, _ in points} == {0, 1}, kernel.value("list(run.metrics)")
        assert len(points) >= 2 * min(len(result["losses"]), result["steps"])
    check_cell(cell)


def check_cell(cell: Cell) -> None:
    """Fail if a rank sent a widget to the cell, or if forking caused a warning."""
    assert cell.comms == []
    assert not [data for data in cell.displays if "application/vnd.jupyter.widget-view+json" in data]
    assert "fork" not in cell.plain


def check_launch(kernel: Kernel, on_accelerate: dict[str, list[Any]], name: str, method: str) -> None:
    """Fail unless a program has the same results as with Accelerate, and its run shows them."""
    cell = kernel.check(
        f"run = launch(PROGRAMS[{name!r}].train, start_method={method!r}, panel=False, timeout={SECONDS})", SECONDS
    )
    here = kernel.value("run.results")
    check_results(name, on_accelerate[name], here)
    check_run(kernel, cell, name, here[0])
    assert "fork" not in kernel.log


@EACH
def test_programs_give_equal_results_in_forked_ranks(
    kernel: Kernel, on_accelerate: dict[str, list[Any]], name: str
) -> None:
    check_launch(kernel, on_accelerate, name, "fork")


@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_programs_give_equal_results_in_one_process(
    kernel: Kernel, on_accelerate: dict[str, list[Any]], name: str
) -> None:
    cell = kernel.check(
        f"run = launch(PROGRAMS[{name!r}].train, num_processes=1, start_method='fork', panel=False, timeout={SECONDS})",
        SECONDS,
    )
    check_results(name, on_accelerate[f"{name}@1"], kernel.value("run.results"))
    check_cell(cell)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["zygote", "spawn"])
@EACH
def test_programs_give_equal_results_in_separate_launches(
    kernel: Kernel, on_accelerate: dict[str, list[Any]], name: str, method: str
) -> None:
    check_launch(kernel, on_accelerate, name, method)


@pytest.fixture(scope="module", params=["zygote", "spawn"])
def one_launch(kernel: Kernel, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results by rank of a launch that runs all programs in ranks that import the libraries themselves."""
    cell = kernel.check(
        f"run = launch(run_several, {list(PROGRAMS)}, start_method={request.param!r}, panel=False, timeout={SECONDS})",
        SECONDS,
    )
    check_cell(cell)
    curves = {program.curve for program in PROGRAMS.values() if program.curve}
    assert curves <= set(kernel.value("list(run.metrics)"))
    assert kernel.value("sorted(run._internals.store.loops)") == [0, 1]
    results: list[dict[str, Any]] = kernel.value("run.results")
    return results


@EACH
def test_programs_give_equal_results_in_ranks_that_import_the_libraries(
    one_launch: list[dict[str, Any]], on_accelerate: dict[str, list[Any]], name: str
) -> None:
    check_results(name, on_accelerate[name], [results[name] for results in one_launch])
