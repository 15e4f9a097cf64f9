"""The config panel in a real kernel: its displays, and the cell that shows its runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernel import Cell, Kernel

pytestmark = pytest.mark.notebook
VIEW = "application/vnd.jupyter.widget-view+json"
CONFIGURE = """
import notebook_accelerate
from notebook_accelerate import LaunchConfig

def train(number):
    print("training", number)
    return 2 * number

panel = notebook_accelerate.configure(train, (21,), config=LaunchConfig(num_processes=2, cpu=True, use_port=0))
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        kernel.check(CONFIGURE)
        yield kernel


@pytest.fixture(scope="module")
def fresh() -> Iterator[Kernel]:
    """A kernel that has imported nothing yet."""
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def shown(kernel: Kernel) -> Cell:
    """A cell that shows the panel."""
    return kernel.check("panel")


def test_the_panel_is_a_widget_with_its_static_form_below(shown: Cell) -> None:
    live, static = shown.displays
    assert VIEW in live
    assert live["text/plain"] == "Settings of a launch: live in the notebook of its kernel"
    assert VIEW not in static
    assert "<summary>Settings of a launch, as of " in static["text/html"]
    assert "num_processes=2" in static["text/plain"]
    assert shown.stderr == ""


def test_the_static_form_follows_what_is_entered(kernel: Kernel, shown: Cell) -> None:
    kernel.check("panel.launch_form.input('max_restarts').value = '3'")
    kernel.wait_for(lambda: "max_restarts=3" in _static(kernel, shown), what="the static form to follow")
    kernel.check("panel.launch_form.input('max_restarts').value = '0'")


def _static(kernel: Kernel, shown: Cell) -> str:
    """Return the latest static form: an update replaces its display, whichever cell sends it."""
    outputs = [output for cell in kernel.cells.values() for output in cell.outputs]
    name = [o for o in shown.outputs if o["output_type"] == "display_data"][1]["transient"]["display_id"]
    texts = [o["data"]["text/plain"] for o in outputs if o.get("transient", {}).get("display_id") == name]
    return str(texts[-1])


def test_a_click_launches_and_output_appears_under_the_panels_cell(kernel: Kernel, shown: Cell) -> None:
    click = kernel.check("panel._go.click()")
    kernel.check("panel.runs[-1].wait()")
    kernel.wait_for(lambda: "[rank 1] training 21" in shown.stdout, what="the ranks' output under the panel")
    kernel.wait_for(lambda: "[rank 0] training 21" in shown.stdout, what="the ranks' output under the panel")
    assert "training" not in click.stdout
    assert kernel.value("panel.runs[-1].results") == [42, 42]
    kernel.wait_for(lambda: "succeeded" in kernel.value("panel._run_note.value"), what="the panel to say so")


def test_a_click_that_cannot_launch_raises_nothing_in_the_cell(kernel: Kernel, shown: Cell) -> None:
    kernel.check("panel._args.value = '(1'")
    click = kernel.check("panel._go.click()")
    assert click.stderr == ""
    assert "SyntaxError" in kernel.value("panel._run_note.value")
    kernel.check("panel._args.value = ''")


def test_closing_replaces_the_widget_by_the_static_form(kernel: Kernel, shown: Cell) -> None:
    kernel.check("panel.close()")
    first = next(o for o in shown.outputs if o["output_type"] == "display_data")["transient"]["display_id"]
    updates = [
        output["data"]
        for cell in kernel.cells.values()
        for output in cell.outputs
        if output["output_type"] == "update_display_data" and output["transient"]["display_id"] == first
    ]
    assert set(updates[-1]) == {"text/html", "text/plain"}
    assert "<table>" in updates[-1]["text/html"]


def test_functions_of_the_notebook_are_offered(kernel: Kernel) -> None:
    kernel.check("def other():\n    pass\npanel.refresh()")
    assert kernel.value("panel._name.options")[:2] == ["other", "train"]


def test_a_panel_loads_no_torch_into_the_kernel(fresh: Kernel) -> None:
    fresh.check("import notebook_accelerate\npanel = notebook_accelerate.configure()\npanel")
    assert fresh.value("'torch' not in __import__('sys').modules")
