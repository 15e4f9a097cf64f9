"""The kernel imports torch._dynamo once for all the ranks that it forks, or leaves the import to them."""

from __future__ import annotations

import functools
import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import Accelerator
from notebook_accelerate.launch.processes import shared_imports
from notebook_accelerate.launch.processes.shared_imports import trains
from tests.support.interpreters import InterpreterServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux kernels are forked")
SETUP = """
import json, os, sys, threading, time
import torch
from notebook_accelerate import notebook_launcher
from notebook_accelerate.launch.processes import shared_imports

def step(*_):
    before = "torch._dynamo" in sys.modules
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return before

def here():
    return "torch._dynamo" in sys.modules

def launch(function, *args, **options):
    return notebook_launcher(function, args, **{"num_processes": 2, "use_port": 0, **options})

answers = []
"""


Answers = Callable[..., Any]


@pytest.fixture
def answers(interpreters: InterpreterServer, tmp_path: Path) -> Answers:
    """Return a function that runs a script in an interpreter in ``tmp_path``, and returns its list ``answers``."""
    # A test that compiled in this process may have set torch's variables, such as the one that names inductor's folder.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    environment = {**inherited, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}

    def answer(script: str) -> Any:
        program = SETUP + textwrap.dedent(script) + "\nprint(json.dumps(answers))"
        done = interpreters.run("-c", program, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return answer


def test_the_kernel_imports_once_for_the_ranks_of_functions_that_train(answers: Answers) -> None:
    script = """
    def step_and_state():
        state = "notebook_accelerate.accelerator" in sys.modules
        from notebook_accelerate import Accelerator
        return step() and state

    for function in (here, step_and_state, step):
        run = launch(function)
        answers.append([run.results, here(), run.plan.start_method, run.notes])
    answers.append("TORCHINDUCTOR_CACHE_DIR" in os.environ)
    """
    idle, first, second, left = answers(script)
    assert idle == [[False, False], False, "fork", []], "a function that does not train imports nothing"
    assert first[:3] == second[:3] == [[True, True], True, "fork"]
    assert second[3] == []
    assert not left, "a launch leaves no variable behind"


def test_ranks_of_the_server_process_share_an_import(answers: Answers) -> None:
    script = """
    for _ in range(2):
        answers.append(launch(step, start_method="zygote").results)
    answers.append(here())
    """
    assert answers(script) == [[True, True], [True, True], False]


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_the_kernel_learns_from_ranks_which_functions_train(method: str, answers: Answers) -> None:
    script = f"""
    def hidden():
        before = here()
        getattr(torch, "optim").SGD([torch.ones(1, requires_grad=True)], 0.1)
        return before

    answers.append(shared_imports.trains(hidden))
    launch(hidden, start_method={method!r})
    answers += [shared_imports.trains(hidden), launch(hidden, start_method={method!r}).results]
    """
    unknown, learned, shared = answers(script)
    assert (unknown, learned, shared) == (False, True, [True, True])


def test_changed_variables_are_read_by_ranks_from_the_server_process(answers: Answers) -> None:
    """The first launch leaves the import to the ranks. Once the kernel has imported, it ignores changed variables."""
    script = """
    from notebook_accelerate.launch.processes.zygote import ensure_zygote

    def suppressed():
        step()
        return torch._dynamo.config.suppress_errors

    changed = {"TORCHDYNAMO_SUPPRESS_ERRORS": "1"}
    servers = [ensure_zygote().pid]
    for env in (changed, None, changed, changed, None):
        run = launch(suppressed, env=env)
        answers.append([run.results, here(), run.plan.start_method])
        if run.plan.start_method == "zygote":
            servers.append(ensure_zygote(changed).pid)
    answers += [run.plan.reason, servers]
    try:
        launch(suppressed, env=changed, start_method="fork")
    except ValueError as error:
        answers.append(str(error))
    """
    *launches, reason, (first, second, third), refusal = answers(script)
    assert launches == [
        [[True, True], False, "fork"],
        [[False, False], True, "fork"],
        [[True, True], True, "zygote"],
        [[True, True], True, "zygote"],
        [[False, False], True, "fork"],
    ]
    assert reason == "the kernel is safe to fork"
    assert first != second == third, "a server process is replaced only if its variables are outdated"
    assert "TORCHDYNAMO_SUPPRESS_ERRORS has changed since the kernel imported torch._dynamo" in refusal


def test_the_server_process_imports_torch_with_the_variables_of_the_launch(answers: Answers) -> None:
    script = """
    def level():
        return torch.distributed.get_debug_level().name

    for env in ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, None):
        answers.append(launch(level, env=env, start_method="zygote").results)
    """
    assert answers(script) == [["DETAIL", "DETAIL"], ["OFF", "OFF"]]


@pytest.mark.parametrize("broken", ["torch._dynamo", "torch._dynamo.symbolic_convert"])
def test_ranks_train_even_if_the_import_fails_in_the_kernel(broken: str, answers: Answers) -> None:
    script = f"""
    kernel = os.getpid()

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == {broken!r} and os.getpid() == kernel:
                raise RuntimeError("not here")

    sys.meta_path.insert(0, Broken())
    for function in (step, step, here):
        run = launch(function)
        answers.append([len(run.results), run.notes])
    """
    first, second, other = answers(script)
    assert first[0] == second[0] == 2
    assert "importing torch._dynamo failed there (RuntimeError: not here)" in "".join(first[1])
    assert other == [2, []]


def test_ranks_are_not_forked_if_the_import_is_a_hazard(answers: Answers) -> None:
    """The import is followed by the checks that precede every fork."""
    script = """
    from notebook_accelerate.launch.processes import fork_probe
    fork_probe.CHECKS.append(lambda maps: "its runtime has started" if here() else "")
    run = launch(step)
    answers += [run.results, run.notes]
    """
    results, notes = answers(script)
    assert len(results) == 2
    assert "the kernel is no longer safe to fork: its runtime has started; starting the ranks from" in "".join(notes)


def test_a_run_that_is_stopped_during_the_import_ends_before_it_does(answers: Answers) -> None:
    script = """
    gate = threading.Event()

    class Slow:
        def find_spec(self, name, path=None, target=None):
            if name == "torch._dynamo":
                gate.wait()

    sys.meta_path.insert(0, Slow())
    import notebook_accelerate
    threading.Timer(2.0, lambda: notebook_accelerate.runs()[-1].stop()).start()
    try:
        launch(step)
    except notebook_accelerate.RunStoppedError as error:
        answers += [error.run.status, error.run.notes]
    gate.set()
    answers.append(launch(step).results)
    """
    status, notes, results = answers(script)
    assert status == "stopped"
    assert notes == ["importing torch._dynamo for all ranks that train, once per kernel"]
    assert results == [True, True], "the next launch waits for the import"


@pytest.mark.parametrize("name", ["sympy.py", "profile.py", "mpmath/__init__.py"])
def test_modules_of_the_working_directory_are_not_imported_into_the_kernel(
    name: str, tmp_path: Path, answers: Answers
) -> None:
    """Only ranks import such a module instead of the installed one."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('imported')")
    script = """
    try:
        launch(step)
    except Exception as error:
        answers += [here(), type(error).__name__]
    """
    assert answers(script) == [False, "WorkerError"]


def test_the_import_has_no_side_effects_that_a_kernel_would_notice(answers: Answers) -> None:
    """For example, the import starts no threads, initializes no device and draws no random numbers."""
    script = """
    import random, signal
    state = lambda: [
        sorted(os.listdir("/proc/self/task")),
        sorted(os.listdir("/proc/self/fd")),
        hash(random.getstate()),
        torch.get_rng_state().sum().item(),
        torch.cuda.is_initialized(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        [str(signal.getsignal(number)) for number in range(1, 32)],
        sys.path,
        len(sys.meta_path),
        sorted(os.environ),
    ]
    before = state()
    importing = shared_imports._Import(accelerator=True)
    importing.start()
    importing.join()
    while os.path.exists(f"/proc/self/task/{importing.native_id}"):
        time.sleep(0.01)
    answers += [here(), [pair for pair in zip(before, state()) if pair[0] != pair[1]]]
    """
    assert answers(script) == [True, []]


def test_the_import_reads_no_other_variables_and_looks_for_no_other_modules(answers: Answers) -> None:
    """If a newer torch reads more variables or looks for more modules, add them to the tables in `shared_imports`."""
    script = """
    read, wanted = set(), set()
    class Spy:
        def find_spec(self, name, path=None, target=None):
            wanted.add(name.partition(".")[0])
    kind = type(os.environ)
    get = kind.__getitem__
    kind.__getitem__ = lambda self, name: (read.add(name), get(self, name))[1]
    sys.meta_path.insert(0, Spy())
    import torch._dynamo
    answers += [sorted(read), sorted(wanted - sys.stdlib_module_names)]
    """
    read, wanted = answers(script)
    unknown = {name for name in read if name.startswith("TORCH")} - shared_imports.import_variables(
        dict.fromkeys(read, "")
    ).keys()
    assert unknown == {"TORCHINDUCTOR_CACHE_DIR"}
    assert {name for name in wanted if not name.startswith("_sysconfigdata")} <= shared_imports.OPTIONAL


# ---- which functions train


def _plain() -> int:
    return os.getpid()


def _with_backward(loss: Any) -> None:
    loss.backward()


def _through_a_function() -> None:
    _with_backward(None)


class _Loop:
    def run(self) -> None:
        _through_a_function()

    def __call__(self) -> None:
        self.run()


def _through_a_class() -> None:
    _Loop().run()


def _with_accelerator() -> None:
    Accelerator()


def _prepares(model: Any) -> None:
    Accelerator().prepare(model)


def _sets_a_variable(model: Any) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    _prepares(model)


def _updates_variables(model: Any) -> None:
    os.environ.update({"TORCH_COMPILE_DEBUG": "1", "A": "2"})
    _prepares(model)


def _closure() -> Callable[[], None]:
    inner = _with_backward
    return lambda: inner(None)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_plain, False),
        (_with_accelerator, False),
        (_with_backward, True),
        (_prepares, True),
        (_through_a_function, True),
        (_through_a_class, True),
        (_Loop().run, True),
        (_Loop(), True),
        (_closure(), True),
        (functools.partial(functools.partial(_with_backward), None), True),
        (_sets_a_variable, False),
        (_updates_variables, False),
        (len, False),
        (lambda: [_with_backward(each) for each in ()], True),
    ],
)
def test_functions_that_train_are_recognised(function: Callable[..., Any], *, expected: bool) -> None:
    assert trains(function) is expected


def test_functions_among_the_arguments_are_searched() -> None:
    assert trains(lambda function: function(), (_through_a_function,))
