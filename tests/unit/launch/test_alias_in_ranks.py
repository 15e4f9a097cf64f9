"""Ranks that serve this package as `accelerate`, with every start method."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from notebook_accelerate import LaunchConfig, NotebookAccelerateError, notebook_launcher
from notebook_accelerate.integrations import accelerate_alias
from tests.support.runs import METHODS
from tests.unit.integrations.test_accelerate_alias import ROOT, stand_in

pytestmark = pytest.mark.usefixtures("zygote")


def _served() -> tuple[str, bool, str]:
    import importlib
    import importlib.metadata

    import notebook_accelerate

    served = importlib.import_module("accelerate")
    same = served.Accelerator is notebook_accelerate.Accelerator
    return importlib.metadata.version("accelerate"), same, os.environ["PYTHONPATH"].split(os.pathsep)[0]


@pytest.mark.parametrize("method", ["inline", "fork", "zygote", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_a_launch_serves_the_alias_to_its_own_ranks_only(method: str) -> None:
    before = os.environ.get("PYTHONPATH")
    ranks = 1 if method == "inline" else 2
    config = LaunchConfig(as_accelerate=True, start_method=method, use_port=0)
    run = notebook_launcher(_served, (), ranks, config=config)
    assert set(run.results) == {("1.15.0", True, accelerate_alias.STARTUP_FOLDER)}
    assert not accelerate_alias.is_installed()
    assert "accelerate" not in sys.modules
    assert os.environ.get("PYTHONPATH") == before


@METHODS
def test_ranks_have_the_alias_of_the_kernel(method: str) -> None:
    accelerate_alias.as_accelerate()
    try:
        run = notebook_launcher(_served, (), 2, start_method=method, use_port=0, env={"PYTHONPATH": str(ROOT)})
    finally:
        accelerate_alias.as_accelerate(False)
    assert set(run.results) == {("1.15.0", True, accelerate_alias.STARTUP_FOLDER)}


def test_a_kernel_with_the_real_package_serves_the_alias_to_ranks_of_a_zygote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(stand_in(tmp_path)))
    module = __import__("accelerate")
    del sys.modules["accelerate"]
    monkeypatch.setitem(sys.modules, "accelerate", module)  # After the test, this entry is removed.
    run = notebook_launcher(_served, (), 2, config=LaunchConfig(as_accelerate=True, use_port=0))
    assert run.plan is not None
    assert (run.plan.start_method, run.plan.reason) == ("zygote", "the kernel has imported the real accelerate")
    assert {result[:2] for result in run.results} == {("1.15.0", True)}
    with pytest.raises(ValueError, match="start_method='fork' is not possible with as_accelerate=True"):
        notebook_launcher(_served, (), 2, config=LaunchConfig(as_accelerate=True, start_method="fork"))
    with pytest.raises(NotebookAccelerateError, match="the real accelerate"):
        accelerate_alias.as_accelerate()


def test_ranks_do_not_inherit_a_library_that_found_no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", ModuleType("diffusers"))
    run = notebook_launcher(_served, (), 2, config=LaunchConfig(as_accelerate=True, use_port=0))
    assert run.plan is not None
    assert run.plan.start_method == "zygote"
    assert run.plan.reason == "the kernel has imported diffusers, which found no accelerate"
    assert notebook_launcher(int, (), 2, use_port=0).plan.start_method == "fork"
