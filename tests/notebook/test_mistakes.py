"""A user's mistake is shown as the user's line and one sentence, but the package's own error keeps its traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import said

pytestmark = pytest.mark.notebook

SETUP = """
import notebook_accelerate
from notebook_accelerate import LaunchConfig, notebook_launcher, open_run
from notebook_accelerate.launch import starting
%load_ext notebook_accelerate

def train(): return 1
def generates(): yield 1
"""


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("notebook_launcher(train, num_processes=0)", "ValueError: num_processes=0 is not allowed"),
        ("notebook_launcher(train, start_method='thread')", "ValueError: start_method='thread' is not allowed"),
        ("notebook_launcher(train, config=3)", "ValueError: config=3 is not allowed"),
        ("notebook_launcher(train, processes=2)", "TypeError: notebook_launcher() got an unexpected keyword argument"),
        ("notebook_launcher(generates)", "ValueError: generates is a generator function"),
        ("notebook_launcher(train, 3)", "ValueError: args=3 is not a tuple"),
        ("notebook_launcher(train, block='yes')", "ValueError: block='yes' is not allowed; pass True or False"),
        ("notebook_launcher(train, hold_on_error='no')", "ValueError: hold_on_error='no' is not allowed"),
        ("notebook_launcher(train, detach=True, block=True)", "ValueError: block=True is not allowed with detach=True"),
        ("notebook_launcher(train, log_line_prefix_template='${rnk}')", "has the unknown field 'rnk'; pass a string"),
        ("notebook_launcher(train, resume=notebook_launcher(train))", "has succeeded and has no complete checkpoint"),
        ("notebook_accelerate.configure('x')", "ValueError: 'x' is not a function"),
        ("LaunchConfig(timeout='soon')", "ValueError: timeout='soon' is not allowed"),
        ("LaunchConfig.from_file('nowhere.yaml')", "FileNotFoundError: the configuration file nowhere.yaml"),
        ("open_run('nowhere')", "FileNotFoundError: "),
        ("notebook_accelerate.attach('nowhere')", "ValueError: there is no detached or live run named 'nowhere'"),
        ("notebook_accelerate.debug()", "ValueError: no run can be debugged"),
        ("%%rank 0\n1", "ValueError: "),
        ("%rank_start -n two", "ValueError: "),
    ],
)
def test_a_mistake_shows_the_users_line(kernel: Kernel, line: str, sentence: str) -> None:
    kernel.check(SETUP)
    cell = kernel.run(line)
    assert sentence in said(cell)
    assert "_mistakes.py" not in said(cell)
    assert "notebook_accelerate/" not in said(cell)
    assert "Cell In[" in said(cell)


def test_a_fault_keeps_its_traceback(kernel: Kernel) -> None:
    kernel.check(SETUP)
    kernel.check("whole = starting.plan_from_here\nstarting.plan_from_here = None")
    cell = kernel.run("notebook_launcher(train, num_processes=2)")
    kernel.check("starting.plan_from_here = whole")
    assert "starting.py" in said(cell)
    assert "TypeError: 'NoneType' object is not callable" in said(cell)


def test_a_mistake_in_a_callback_keeps_the_users_lines(kernel: Kernel) -> None:
    kernel.check(SETUP)
    kernel.check("def stops(run): run.stop(grace='long')\nrun = notebook_launcher(train, num_processes=2)")
    cell = kernel.run("run.add_done_callback(stops)")
    assert "in stops" in said(cell)
    assert "grace='long'" in said(cell)


@pytest.mark.parametrize("whole", [False, True], ids=["", "whole tracebacks"])
def test_a_script_shows_one_frame_of_the_package(*, whole: bool) -> None:
    script = "from notebook_accelerate import notebook_launcher\nnotebook_launcher(print, num_processes=0)"
    environment = {**os.environ, "NOTEBOOK_ACCELERATE_WHOLE_TRACEBACKS": "1" if whole else ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("ValueError: num_processes=0 is not allowed")
    frames = done.stderr.count("  File ")
    assert frames > 2 if whole else frames == 2
