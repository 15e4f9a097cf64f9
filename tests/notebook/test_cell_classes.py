"""Classes defined in cells are the same classes in ranks and in the kernel, with every start method."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import open_gate, said

pytestmark = pytest.mark.notebook
METHODS = pytest.mark.parametrize("method", ["fork", "zygote", pytest.param("spawn", marks=pytest.mark.nightly)])
CELL = """
import dataclasses, enum, gc, pickle, threading, typing
from torch.utils.data import DataLoader
from notebook_accelerate import Accelerator, WorkerError, open_run
from notebook_accelerate.utils import gather_object

class Phase(enum.Enum):
    TRAIN = 1
    EVAL = 2

@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    phase: Phase = Phase.TRAIN

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

class Outer:
    class Inner(typing.NamedTuple):
        x: int = 3

UserId = typing.NewType("UserId", int)
lock = threading.Lock()
FACTOR = 2
TABLE = torch.zeros(2 << 20)

class Scaled:
    def __init__(self, x):
        self.x = x
    def value(self):
        with lock:
            return self.x * FACTOR

class Diverged(Exception):
    def __init__(self, step, where):
        super().__init__(f"{where}: {step}")
        self.step = step

class Unreadable(OSError):
    def __init__(self, path, code):
        super().__init__(code, f"cannot read {path}")
        self.path = path

def collate(rows):
    return Batch(torch.tensor(rows), Phase.EVAL)

def build():
    return {"batch": [Batch(torch.ones(1)).phase], "phase": Phase.EVAL, "inner": Outer.Inner(4), "net": type(Net())}

def travels():
    accelerator = Accelerator(cpu=True)
    found = gather_object([build()])
    loader = accelerator.prepare(DataLoader(list(range(4)), batch_size=2, num_workers=1, collate_fn=collate))
    batches = [(type(batch) is Batch, batch.phase is Phase.EVAL) for batch in loader]
    if accelerator.is_main_process:
        torch.save(Net(), "net.pt")
    accelerator.wait_for_everyone()
    return found == [build()] * 2, batches, UserId(3), pickle.loads(pickle.dumps(collate)) is collate

def unpickles(value):
    return pickle.loads(pickle.dumps(value)) == value

def reads_names():
    from __main__ import FACTOR as factor
    return factor, "FACTOR" in globals(), "TABLE" in globals(), "TABLE2" in globals(), __name__

def reads_eval(model):
    model.eval()
    return sorted(name for name in globals() if name[0] != "_"), "lock", __name__ == "__main__"

def reads_in_body():
    class Inner:
        factor = FACTOR
        def __init__(self):
            self.lock = 1
    return Inner.factor

def reads_lock():
    from __main__ import lock
    return lock

def reads_main():
    import __main__
    return sorted(set(vars(__main__)) & set("Batch TABLE serve sys".split())), hasattr(__main__, "__file__")

def diverges():
    raise Diverged(3, "here")

def fails_to_read():
    raise Unreadable("x.txt", 5)

def scales():
    return Scaled(2)

def make_kind(scale):
    @dataclasses.dataclass
    class Made(Outer):
        x: float = scale
    return Made

made = [make_kind(2), make_kind(3)]
made_values = [kind() for kind in made]

def uses_made():
    gate("made")
    return made_values, made, make_kind(2)()

def equal(value, other):
    return value == other and type(value) is type(other)
"""


@pytest.fixture(autouse=True, scope="module")
def _defined(kernel: Kernel) -> None:
    kernel.check(CELL)


@METHODS
def test_results_are_instances_of_the_cells_classes(kernel: Kernel, method: str) -> None:
    kernel.check(f"r = launch(build, start_method={method!r}, panel=False).results")
    assert kernel.value("[equal(value, build()) for value in r]") == [True, True]
    assert kernel.value("[value['phase'] is Phase.EVAL and value['net'] is Net for value in r]") == [True, True]


@METHODS
def test_ranks_pickle_objects_named_in_cells(kernel: Kernel, method: str) -> None:
    kernel.check(f"r = launch(travels, start_method={method!r}, panel=False, timeout=60).results")
    assert kernel.value("r[0]") == [True, [[True, True]], 3, True]
    assert kernel.value("type(torch.load('net.pt', weights_only=False)) is Net")


@METHODS
def test_ranks_pickle_arguments_whose_classes_the_function_does_not_name(kernel: Kernel, method: str) -> None:
    kernel.check("values = [Batch(1.0), Phase.EVAL, Outer.Inner(5), {'f': collate}]")
    kernel.check(f"r = launch(unpickles, (values,), start_method={method!r}, panel=False).results")
    assert kernel.value("r") == [True, True]


@METHODS
def test_names_in_strings_of_a_function_are_found(kernel: Kernel, method: str) -> None:
    kernel.check(f"r = launch(reads_names, start_method={method!r}, panel=False).results[0]")
    assert kernel.value("r") == [2, True, True, False, "__main__"]


@METHODS
def test_names_in_the_body_of_a_class_in_a_function_are_found(kernel: Kernel, method: str) -> None:
    assert kernel.value(f"launch(reads_in_body, start_method={method!r}, panel=False).results") == [2, 2]


def test_attributes_are_not_names_of_the_notebook(kernel: Kernel) -> None:
    kernel.check("eval = (i for i in range(3))")  # A generator cannot be pickled.
    kernel.check("r = launch(reads_eval, Net(), start_method='zygote', panel=False).results[0]; del eval")
    assert kernel.value("r") == [["Net", "reads_eval", "torch"], "lock", True]


def test_the_error_says_why_a_name_was_not_sent(kernel: Kernel) -> None:
    cell = kernel.run("launch(reads_lock, start_method='zygote', panel=False)")
    assert "The notebook has 'lock', but it could not be sent to this rank: TypeError: cannot pickle" in said(cell)


def test_the_main_module_of_a_rank_contains_only_the_names_that_the_function_needs(kernel: Kernel) -> None:
    kernel.check("r = launch(reads_main, start_method='zygote', panel=False).results[0]")
    assert kernel.value("r") == [[], False]


@METHODS
def test_the_cause_of_an_error_is_the_cells_exception(kernel: Kernel, method: str) -> None:
    for function, expected in (
        ("diverges", ["Diverged", ["here: 3"], 3]),
        ("fails_to_read", ["Unreadable", [5, "cannot read x.txt"], "x.txt"]),
    ):
        kernel.check(
            f"try:\n    launch({function}, start_method={method!r}, panel=False)\n"
            "except WorkerError as error:\n    cause = error.__cause__"
        )
        own = "getattr(cause, 'step', None) or cause.path"
        assert kernel.value(f"[type(cause).__name__, list(cause.args), {own}]") == expected
        assert kernel.value("isinstance(cause, (Diverged, Unreadable))")


def test_a_class_whose_methods_use_an_unpicklable_object_can_be_sent(kernel: Kernel) -> None:
    kernel.check("r = launch(scales, start_method='fork', panel=False).results")
    kernel.check("FACTOR = 5")
    assert kernel.value("[r[0].value(), type(r[0]) is Scaled]") == [10, True]
    kernel.check("FACTOR = 2")


@METHODS
def test_methods_of_the_kernels_class_keep_its_globals(kernel: Kernel, method: str) -> None:
    kernel.check("STEP = 1\nclass Plain:\n    def step(self):\n        return STEP\ndef plain():\n    return Plain()")
    kernel.check(f"r = launch(plain, start_method={method!r}, panel=False).results[0]")
    kernel.check("STEP = 7")
    assert kernel.value("[r.step(), Plain().step(), Plain.step.__globals__ is globals()]") == [7, 7, True]


@METHODS
def test_classes_created_by_functions_of_cells_can_be_sent(kernel: Kernel, method: str) -> None:
    kernel.check(f"run = launch(uses_made, start_method={method!r}, panel=False, block=False)")
    kernel.check("while run.status != 'running':\n    time.sleep(0.02)")
    kernel.check("asked = run.ask('made_values', timeout=30)[0]")
    open_gate(kernel, "made")
    kernel.check("run.wait(); values, kinds, other = run.results[0]; os.unlink('made')")
    assert kernel.value("[values == made_values, asked == made_values, [a is b for a, b in zip(kinds, made)]]") == [
        True, True, [True, True],
    ]  # fmt: skip
    assert kernel.value("[type(other) in made, isinstance(other, Outer), other.x]") == [False, True, 2]


CHANGING = """
@dataclasses.dataclass
class Score:
    value: float = 0.0
    def scaled(self):
        return self.value * {factor}
"""
FINISHED = """
run = launch(score, start_method={method!r}, panel=False, block=False)
while not run.done:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_results_read_after_their_cell_ran_again(kernel: Kernel, method: str) -> None:
    kernel.check(CHANGING.format(factor=1) + "def score():\n    return Score(2.0)")
    kernel.check(FINISHED.format(method=method))
    kernel.check(CHANGING.format(factor=1))
    cell = kernel.check("first, second = run.results")
    assert kernel.value("[first == Score(2.0), type(first) is type(second) is Score]") == [True, True]
    assert "definition" not in cell.stderr


@pytest.mark.parametrize("collected", ["", "; gc.collect()"])
@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_results_keep_the_definition_of_the_launch(kernel: Kernel, method: str, collected: str) -> None:
    kernel.check(CHANGING.format(factor=1) + "def score():\n    return Score(2.0)")
    kernel.check(FINISHED.format(method=method))
    kernel.check(CHANGING.format(factor=3) + collected)
    cell = kernel.check("first, second = run.results")
    assert kernel.value("[first.scaled(), Score(2.0).scaled()]") == [2.0, 6.0]
    assert kernel.value("[type(first) is type(second), isinstance(first, Score)]") == [True, False]
    assert "the rank's definition of Score differs" in cell.stderr


def test_a_kept_run_has_the_classes_of_a_kernel_that_ran_the_cell_again(kernel: Kernel) -> None:
    kernel.check("r = launch(build, start_method='fork', panel=False, save='kept', name='classes')")
    kernel.check(CELL)  # This defines new classes, as in a new kernel.
    kernel.check("gc.collect(); r = open_run(r.folder).results")
    assert kernel.value("[equal(value, build()) for value in r]") == [True, True]
