"""Launches in a kernel with Colab's or Kaggle's versions and variables (`make test-colab`, `make test-kaggle`)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.kernel import ROOT, Kernel
from tests.support.launching import open_gate

pytestmark = pytest.mark.notebook

SERVICE = os.environ.get("TEST_HOSTED", "colab")
VARIABLES = {
    "colab": {"COLAB_RELEASE_TAG": "release-colab-external-images_20261007-060045_RC00", "COLAB_GPU": ""},
    "kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "KAGGLE_DATA_PROXY_TOKEN": "none"},
}[SERVICE]
PYTHON = {"colab": (3, 13), "kaggle": (3, 12)}[SERVICE]
WIDGET = "application/vnd.jupyter.widget-view+json"
TRAIN = """
import os, time
from notebook_accelerate import Accelerator, notebook_launcher, telemetry
from notebook_accelerate.telemetry import MetricEvent

def train(until=""):
    accelerator = Accelerator(cpu=True)
    step = 0
    while step < 3 or until and not os.path.exists(until):
        telemetry.emit(MetricEvent({"loss": 1.0 / (step + 1)}, step))
        print("step", step)
        step += 1
        time.sleep(0.05)
    return accelerator.num_processes

def ask():
    return input("name? ")

def stop_at_a_line():
    secret = 20
    breakpoint()
    return secret + 1

def launch(function=train, *args, **options):
    return notebook_launcher(function, args, num_processes=2, use_port=0, **options)
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """Yield a kernel with the variables of the service."""
    with Kernel(env=VARIABLES) as kernel:
        kernel.check(TRAIN)
        yield kernel


def _pins() -> dict[str, str]:
    lines = [line for name in ("hosted", SERVICE) for line in (ROOT / f"requirements/{name}.txt").read_text().split()]
    return dict(line.split("==") for line in lines if "==" in line)


def test_the_versions_match_the_service(kernel: Kernel) -> None:
    assert sys.version_info[:2] == PYTHON
    wrong = {name: version(name) for name, pin in _pins().items() if version(name) != pin}
    assert not wrong
    assert kernel.value("__import__('notebook_accelerate').hardware.detect().host") == SERVICE


def test_the_install_cell_does_not_change_installed_packages(tmp_path: Path) -> None:
    """Run the cell from docs/environments.md, with a wheel of this tree in place of the published one."""
    cell = re.search(
        r"^```(?:python)?\n(%pip install .*)\n```", (ROOT / "docs/environments.md").read_text(), re.MULTILINE
    )
    assert cell is not None
    wheels = tmp_path / "wheels"
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(_copy_of_the_tree(tmp_path / "tree")))
    _pip("download", "--no-deps", "--dest", str(wheels), "nvidia-ml-py")
    python = _environment_over_this_one(tmp_path / "venv")
    env = {**VARIABLES, "PYTHONPATH": None, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    versions = "{d.metadata['Name']: d.version for d in __import__('importlib.metadata').metadata.distributions()}"
    with Kernel(env=env, python=python) as fresh:  # type: ignore[arg-type]
        before = fresh.value(versions)
        installed = fresh.check(cell.group(1))
        after = fresh.value(versions)
        assert {name: after.get(name) for name in before} == before, installed.plain
        added = set(after) - set(before)
        assert {"notebook-accelerate"} <= added <= {"notebook-accelerate", "nvidia-ml-py"}, installed.plain
        fresh.check(TRAIN)  # The installed package works without a restart.
        assert fresh.value("__import__('notebook_accelerate').__file__").startswith(str(tmp_path))
        assert fresh.value("list(launch().results)") == [2, 2]


def _copy_of_the_tree(folder: Path) -> Path:
    """Copy the files that a wheel is built from, because setuptools writes files next to them."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("notebook_accelerate", "widgets"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip {arguments[0]} needs a package index: {done.stderr.strip().splitlines()[-1]}")


def _environment_over_this_one(folder: Path) -> str:
    """Create a virtual environment that also sees the packages installed here. Return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (found,) = (folder / "lib").glob("python*/site-packages")
    (found / "image.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
def test_a_launch_works(kernel: Kernel, method: str) -> None:
    cell = kernel.check(f"launch(start_method={method!r}).results")
    assert cell.result_text == "(2, 2)"
    assert "[rank 0] step 0" in cell.stdout
    assert "[rank 1] step 2" in cell.stdout


def test_the_first_cell_of_the_readme_succeeds(kernel: Kernel) -> None:
    cell = kernel.check(pages.first_cell())
    assert kernel.value("len(run.results)") == 2
    assert "⚠" not in cell.stderr
    kernel.check(TRAIN)  # That cell has defined another `train`.


def test_the_live_panel_and_the_saved_report_are_shown(kernel: Kernel) -> None:
    cell = kernel.submit("launch(train, 'seen')")
    kernel.wait_for(lambda: any(WIDGET in data for data in cell.displays), what="the live panel")
    opened = [comm for comm in cell.comms if comm["msg_type"] == "comm_open"]
    kernel.wait_for(lambda: any(comm["msg_type"] == "comm_msg" for comm in cell.comms), what="an update of the panel")
    assert {comm["target_name"] for comm in opened} == {"jupyter.widget"}
    open_gate(kernel, "seen")
    kernel.finish(cell).expect_ok()
    (saved,) = [data for data in cell.displays if data != {"text/plain": ""}]
    assert set(saved) == {"text/html", "text/plain"}
    assert "· train · succeeded ·" in saved["text/plain"]
    assert 'alt="Curve of loss: ' in saved["text/html"]


def test_without_a_renderer_the_panel_is_an_html_display() -> None:
    with Kernel(env=VARIABLES) as fresh:
        fresh.check(TRAIN)
        cell = fresh.check("run = launch(train, 'end', block=False)")
        note = "This front end has drawn no live panel: panels are HTML displays here"
        fresh.wait_for(lambda: note in str(cell.displays), 60, what="the note")
        open_gate(fresh, "end")
        fresh.check("run.wait()")


def test_input_and_the_debugger_work(kernel: Kernel) -> None:
    prompts = kernel.types("Ada", "Grace")
    assert kernel.check("sorted(launch(ask).results)").result_text == "['Ada', 'Grace']"
    assert sorted(prompts) == ["[rank 0] name? ", "[rank 1] name? "]
    kernel.types("p secret", "c")
    cell = kernel.check("notebook_launcher(stop_at_a_line, num_processes=1, start_method='fork').results")
    assert cell.result_text == "(21,)"
    assert re.search(r"^(\[rank 0\] )?20$", cell.plain, re.MULTILINE)


def test_the_stop_button_works(kernel: Kernel) -> None:
    cell = kernel.submit("launch(train, 'never')")
    kernel.wait_for(lambda: "[rank 1] step 0" in cell.stdout, what="the first step")
    begin = time.monotonic()
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.error is not None
    assert cell.error.ename in ("RunInterrupted", "KeyboardInterrupt")
    assert time.monotonic() - begin < 60
    assert kernel.check("launch().results").result_text == "(2, 2)"


def test_a_killed_rank_is_reported(kernel: Kernel) -> None:
    kernel.check(f"def die():\n    os.kill(os.getpid(), {int(signal.SIGKILL)})")
    cell = kernel.run("launch(die)")
    assert cell.error is not None
    assert "SIGKILL" in cell.error.text
    assert kernel.check("launch().results").result_text == "(2, 2)"
