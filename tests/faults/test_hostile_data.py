"""If data from user code cannot be sent or is far too large, the run continues and reports what was dropped."""

from __future__ import annotations

import pytest

from tests.support.kernel import Cell, Kernel
from tests.support.launching import said

pytestmark = pytest.mark.notebook
METHODS = pytest.mark.parametrize("method", ["fork", "zygote"])
"""How the ranks start, in tests whose result depends on what ranks inherit. All ranks send data in the same way."""
HUGE = 300_000_000
"""The length of a string that exceeds every bound."""


def _run(kernel: Kernel, body: str, method: str = "fork") -> Cell:
    lines = "\n".join("    " + line for line in body.splitlines())
    code = f"from notebook_accelerate import Accelerator\ndef train():\n{lines}\n"
    return kernel.run(f"{code}run = launch(train, start_method={method!r})\nrun.results", timeout=120)


def _checked(kernel: Kernel, body: str, method: str = "fork") -> Cell:
    cell = _run(kernel, body, method)
    assert cell.ok, said(cell)
    assert kernel.value("run.status") == "succeeded"
    return cell


def _displays(cell: Cell) -> str:
    return str([output for output in cell.outputs if "display_data" in output["output_type"]])


@pytest.mark.parametrize("key", ["('train', 'loss')", "3", "None", "b'loss'"])
def test_a_metric_key_that_is_not_a_string_is_recorded_as_one(kernel: Kernel, key: str) -> None:
    cell = _run(kernel, f"Accelerator(cpu=True).log({{'good': 1.0, {key}: 0.5}}, step=1)")
    assert cell.ok
    assert f"log() got the name {key}" in cell.stderr


@pytest.mark.parametrize(
    ("event", "name"),
    [
        ("MetricEvent({('a', 1): 0.5}, 1)", "MetricEvent"),
        ("DisplayEvent({('a', 1): 'x'})", "DisplayEvent"),
        ("DisplayEvent({'application/json': (loop := [], loop.append(loop))[0]})", "DisplayEvent"),
        ("DisplayEvent({'application/json': deep})", "DisplayEvent"),
    ],
)
def test_an_event_that_cannot_be_encoded_is_dropped_with_one_note(kernel: Kernel, event: str, name: str) -> None:
    body = f"""from notebook_accelerate.telemetry import DisplayEvent, MetricEvent, emit
deep = []
for _ in range(100_000):
    deep = [deep]
for step in range(3):
    emit({event})
    emit(MetricEvent({{'kept': 1.0}}, step))
    time.sleep(0.3)
return 'lives'"""
    cell = _checked(kernel, body)
    assert cell.result_text == "('lives', 'lives')"
    assert cell.stderr.count(f"a {name} cannot be sent") == 2  # Each rank prints the warning once.
    assert kernel.value("len(run.metrics['kept'].values)") == 6


@pytest.mark.parametrize(
    "shown",
    [
        "{'text/plain': 'a lone \\ud800 surrogate'}",
        "{'text/plain': 'x', 'image/png': b'bytes'}",
        "{'application/json': {'a': b'bytes', 'b': float('nan'), 'c': {1, 2}, 'd': object()}}",
        "{'application/json': {('a', 1): 2}}",
    ],
)
def test_a_display_that_cannot_be_encoded_ends_nothing(kernel: Kernel, shown: str) -> None:
    body = f"""from IPython.display import display
display({shown}, raw=True)
print('between')
display({{'text/plain': 'the next one'}}, raw=True)
return 'lives'"""
    cell = _checked(kernel, body)
    assert cell.result_text == "('lives', 'lives')"
    assert _displays(cell).count("the next one") == 2


def test_strings_with_lone_surrogates_arrive_escaped(kernel: Kernel) -> None:
    body = """Accelerator(cpu=True).log({'loss \\ud800': 1.0}, step=1)
print('printed \\ud800')
raise ValueError('raised \\ud800')"""
    text = said(_run(kernel, body))
    assert "ValueError: raised \\ud800" in text
    assert kernel.value("list(notebook_accelerate.runs()[-1].metrics)") == ["loss \\ud800"]


def test_a_giant_metric_name_is_shortened(kernel: Kernel) -> None:
    body = f"Accelerator(cpu=True).log({{'x' * {HUGE}: 1.0, 'loss': 2.0}}, step=1)\nreturn 'lives'"
    cell = _checked(kernel, body)
    assert "shortened" in cell.stderr
    names = kernel.value("list(run.metrics)")
    assert "loss" in names
    assert all(len(name) <= 1000 for name in names)


def test_a_giant_display_is_dropped(kernel: Kernel) -> None:
    body = f"""from IPython.display import display
display({{'text/plain': 'small', 'text/html': 'x' * {HUGE}}}, raw=True)
return 'lives'"""
    cell = _checked(kernel, body)
    assert "a display" in _displays(cell) + cell.stderr
    assert "300,000,0" in _displays(cell) + cell.stderr
    assert len(_displays(cell)) < 1 << 20


def test_a_giant_exception_message_is_shortened(kernel: Kernel) -> None:
    body = f"if rank() == 0:\n    raise ValueError('begin' + 'x' * {HUGE} + 'end')\ntime.sleep(600)"
    text = said(_run(kernel, body))
    assert "rank 0 failed" in text
    assert "ValueError: beginxxx" in text
    assert "characters left out" in text
    assert len(text) < 1 << 20


def test_a_giant_progress_label_is_shortened(kernel: Kernel) -> None:
    body = f"""from notebook_accelerate.integrations.reporting import send_progress
send_progress(1, 2, 'x' * {HUGE})
return 'lives'"""
    assert _checked(kernel, body).result_text == "('lives', 'lives')"


@METHODS
def test_invalid_frames_end_the_channel_of_that_rank_only(kernel: Kernel, method: str) -> None:
    body = """from notebook_accelerate.telemetry import current_sink
if rank() == 1:
    current_sink().channel.send_bytes(b'\\xff' * 100_000)
time.sleep(1.0)
print('still here')
return 'lives'"""
    cell = _run(kernel, body, method)
    text = said(cell)
    assert "rank 1" in text
    assert "not of this protocol" in text or "a frame" in text
    assert cell.stdout.count("still here") == 2
    assert kernel.value("[info.state for info in notebook_accelerate.runs()[-1].ranks]") == ["succeeded", "failed"]


@METHODS
def test_an_agent_that_ends_is_reported_in_the_run(kernel: Kernel, method: str) -> None:
    body = """from notebook_accelerate.telemetry import current_sink
sink = current_sink()
def broken():
    raise SystemExit('the flush is broken')
if rank() == 0:
    sink.flush = broken
    time.sleep(3.0)
    del sink.flush
return 'lives'"""
    cell = _checked(kernel, body, method)
    assert cell.result_text == "('lives', 'lives')"
    warnings = kernel.value("list(run.warnings)")
    assert any("agent of rank 0 failed (SystemExit: the flush is broken) and continues" in text for text in warnings)
    assert any("and ended: metrics, prompts and debugging no longer work" in text for text in warnings)


def test_a_value_that_exits_is_dropped(kernel: Kernel) -> None:
    body = """from notebook_accelerate.telemetry import MetricEvent, emit
class Odd:
    @property
    def item(self): raise SystemExit(3)
emit(MetricEvent({'bad': Odd()}, 1))
time.sleep(0.5)
for step in range(3):
    emit(MetricEvent({'kept': 1.0}, step))
    time.sleep(0.3)
return 'lives'"""
    cell = _checked(kernel, body)
    assert cell.result_text == "('lives', 'lives')"
    assert kernel.value("len(run.metrics['kept'].values)") == 6


BUDGET = 5_000_000
"""The maximum number of characters that the front end may receive from a run of a few seconds."""


def _sent(cell: Cell) -> int:
    return sum(len(str(output)) for output in cell.outputs)


def test_displays_stay_within_the_output_budget(kernel: Kernel) -> None:
    body = """from IPython.display import display
for number in range(30):
    display({'text/plain': f'display {number} ' + 'x' * 1_000_000}, raw=True)
print('after them')"""
    cell = _checked(kernel, body)
    assert _sent(cell) < BUDGET + 2_500_000
    assert "display 0 " in _displays(cell)
    assert "displays not shown here" in cell.stderr


def test_the_last_state_of_a_display_that_changes_often_is_shown(kernel: Kernel) -> None:
    body = """from IPython.display import display
if rank() == 0:
    shown = display({'text/plain': 'first'}, raw=True, display_id=True)
    for number in range(50):
        shown.update({'text/plain': f'state {number} ' + 'x' * 400_000}, raw=True)"""
    cell = _checked(kernel, body)
    assert _sent(cell) < BUDGET
    assert "state 49 " in _displays(cell)


def test_progress_bars_stay_within_the_output_budget(kernel: Kernel) -> None:
    body = """for number in range(60):
    sys.stderr.write('\\r' + f'{number} ' + '=' * 1_000_000)
    sys.stderr.flush()
    time.sleep(0.03)
print('after them')"""
    cell = _checked(kernel, body)
    assert _sent(cell) < BUDGET
    tail = "".join(data.get("text/plain", "") for data in cell.displays)
    assert all(f"[rank {rank}] after them" in cell.stdout + tail for rank in (0, 1))


FAILURES = {
    "a text that exits": "class E(Exception):\n    def __str__(self): raise SystemExit(3)\nraise E",
    "a reduction that exits": "class E(Exception):\n    def __reduce__(self): raise SystemExit(3)\nraise E('reason')",
    "notes that are no texts": "e = ValueError('reason')\ne.__notes__ = [1]\nraise e",
    "notes that are no list": "e = ValueError('reason')\ne.__notes__ = 5\nraise e",
    "members that are no exceptions": "class E(Exception):\n    exceptions = 5\nraise E('reason')",
    "members that raise": (
        "class E(Exception):\n    @property\n    def exceptions(self): raise KeyError\nraise E('reason')"
    ),
    "a group of 100,000": "raise ExceptionGroup('reason', [ValueError('x' * 1000) for _ in range(100_000)])",
    "a class that raises": (
        "class E(Exception):\n    @property\n    def __class__(self): raise KeyError\nraise E('reason')"
    ),
    "attributes that raise": (
        "class E(Exception):\n    def __getattribute__(self, name): raise KeyError(name)\nraise E('reason')"
    ),
    "a metaclass that raises": (
        "class M(type):\n    def __getattribute__(cls, name): raise KeyError(name)\n"
        "class E(Exception, metaclass=M): pass\nraise E('reason')"
    ),
    "a class without a module": (
        "made = {'__builtins__': __builtins__}\nexec(\"E = type('E', (Exception,), {})\", made)\n"
        "raise made['E']('reason')"
    ),
    "a chain of 5,000": (
        "e = None\nfor n in range(5000):\n    try:\n        raise ValueError(n) from e\n"
        "    except ValueError as x:\n        e = x\nraise e"
    ),
}


@METHODS
@pytest.mark.parametrize("kind", FAILURES)
def test_no_exception_conceals_its_origin(kernel: Kernel, method: str, kind: str) -> None:
    text = said(_run(kernel, FAILURES[kind], method))
    assert "in train\n    raise" in text
    assert "os._exit" not in text
    assert "supervisor.py" not in text
    assert len(text) < 1 << 20


@METHODS
@pytest.mark.parametrize(
    "change",
    [
        "sys.stdout = sys.stderr = None",
        "class S:\n    def write(self, t): return len(t)\n    def flush(self): raise RuntimeError\nsys.stdout = S()",
        "sys.modules.clear()",
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nos.environ.clear()",
        "time.time = lambda: 'no number'",
        "import atexit\natexit.register(sys.exit, 5)",
    ],
)
def test_no_change_of_a_rank_loses_its_result(kernel: Kernel, method: str, change: str) -> None:
    assert _checked(kernel, f"{change}\nreturn 'lives'", method).result_text == "('lives', 'lives')"


@METHODS
@pytest.mark.parametrize("end", ["return 'child'", "sys.exit(3)", "raise KeyError('child')"])
def test_a_process_that_a_rank_forks_is_not_the_rank(kernel: Kernel, method: str, end: str) -> None:
    body = f"if (child := os.fork()) == 0:\n    {end}\nreturn os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
    code = {"return 'child'": 0, "sys.exit(3)": 3}.get(end, 1)
    cell = _checked(kernel, body, method)
    assert cell.result_text == f"({code}, {code})"
    assert cell.stderr.count("KeyError: 'child'") == (2 if code == 1 else 0)


def test_an_integer_beyond_the_range_of_floats_is_dropped(kernel: Kernel) -> None:
    body = "Accelerator(cpu=True).log({'huge': 10**400, 'loss': 1.0}, step=1)\nreturn 'lives'"
    _checked(kernel, body)
    assert kernel.value("list(run.metrics)") == ["loss"]
