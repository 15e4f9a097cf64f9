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
    with Kernel(server=False) as kernel:
        kernel.check(CONFIGURE)
        yield kernel


@pytest.fixture(scope="module")
def fresh() -> Iterator[Kernel]:
    """Yield a kernel without any imports."""
    with Kernel(server=False) as kernel:
        yield kernel


@pytest.fixture
def shown(kernel: Kernel) -> Cell:
    """Return a cell that shows the panel."""
    return kernel.check("panel")


def test_the_panel_is_a_widget_with_its_static_form_below(shown: Cell) -> None:
    live, static = shown.displays
    assert VIEW in live
    assert live["text/plain"] == "Settings of a launch: live view in the original notebook"
    assert VIEW not in static
    assert "<summary>Settings of a launch, as of " in static["text/html"]
    assert "num_processes=2" in static["text/plain"]
    assert shown.stderr == ""


def test_the_static_form_follows_the_entries(kernel: Kernel, shown: Cell) -> None:
    kernel.check("panel.launch_form.enter('max_restarts', '3')")
    kernel.wait_for(lambda: "max_restarts=3" in _static(kernel, shown), what="the static form to follow")
    kernel.check("panel.launch_form.enter('max_restarts', '0')")


def _static(kernel: Kernel, shown: Cell) -> str:
    """Return the latest text of the static form. An update replaces the display, whichever cell sends it."""
    outputs = [output for cell in kernel.cells.values() for output in cell.outputs]
    name = [o for o in shown.outputs if o["output_type"] == "display_data"][1]["transient"]["display_id"]
    texts = [o["data"]["text/plain"] for o in outputs if o.get("transient", {}).get("display_id") == name]
    return str(texts[-1])


def test_a_click_launches_and_output_appears_under_the_panels_cell(kernel: Kernel, shown: Cell) -> None:
    click = kernel.check("panel.click('launch')")
    kernel.check("panel.runs[-1].wait()")
    kernel.wait_for(lambda: "[rank 1] training 21" in shown.stdout, what="the ranks' output under the panel")
    kernel.wait_for(lambda: "[rank 0] training 21" in shown.stdout, what="the ranks' output under the panel")
    assert "training" not in click.stdout
    assert kernel.value("panel.runs[-1].results") == [42, 42]
    kernel.wait_for(lambda: "succeeded" in kernel.value("panel.widget.texts['run']"), what="the panel to say so")


def test_a_click_that_cannot_launch_raises_nothing_in_the_cell(kernel: Kernel, shown: Cell) -> None:
    kernel.check("panel.widget.enter('call.arguments', '(1')")
    click = kernel.check("panel.click('launch')")
    assert click.stderr == ""
    assert "SyntaxError" in kernel.value("panel.widget.texts['run']")
    kernel.check("panel.widget.enter('call.arguments', '')")


def test_closing_replaces_the_widget_with_the_static_form(kernel: Kernel, shown: Cell) -> None:
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
    assert kernel.value("panel.widget.suggestions['call.function']")[:2] == ["other", "train"]


def test_a_panel_loads_no_torch_into_the_kernel() -> None:
    with Kernel(server=False, forked=False) as kernel:
        kernel.check("import notebook_accelerate\npanel = notebook_accelerate.configure()\npanel")
        assert kernel.value("'torch' not in __import__('sys').modules")


def test_a_panel_sends_few_messages_and_builds_nested_forms_when_they_are_opened(fresh: Kernel) -> None:
    """A kernel with a slow server queues at most 1,000 messages and drops others. The panel once sent 720 at once."""
    shown = fresh.check("import notebook_accelerate\npanel = notebook_accelerate.configure()\npanel")
    sent = [message["msg_type"] for message in shown.comms]
    assert sent.count("comm_open") == 2, "only the view and its layout are created"
    assert len(sent) < 10
    assert "training.fsdp_plugin" not in fresh.value("list(panel.widget.tables)")
    opened = fresh.check("panel.widget.enter('training.fsdp_plugin', True)")
    assert "training.fsdp_plugin" in fresh.value("list(panel.widget.tables)")
    assert 0 < len(opened.comms) < 5


WARM_TORCH = """
import torch
torch.set_num_threads(4)
matrix = torch.randn(600, 600, requires_grad=True)
for _ in range(5):
    (matrix @ matrix).relu().sum().backward()
"""


def test_the_form_and_the_launch_make_the_same_plan_after_work_of_many_threads() -> None:
    with Kernel({"OMP_NUM_THREADS": "4"}) as kernel:
        kernel.check(WARM_TORCH)
        kernel.check(CONFIGURE)
        assert kernel.value("panel.plan.sentence()") == "2 processes on cpu · fork (the kernel is safe to fork) · gloo"
        kernel.check("panel.click('launch')\nrun.wait()")
        assert kernel.value("run.plan.start_method") == "fork"
        assert kernel.value("run.plan.sentence() == panel.plan.sentence()")


def test_a_click_binds_the_variable_of_the_generated_cell(kernel: Kernel, shown: Cell) -> None:
    kernel.check("run = None")
    assert "run = notebook_launcher(" in kernel.value("panel.code")
    kernel.check("panel.click('launch')\nrun.wait()")
    assert kernel.value("run is panel.runs[-1]")
    assert kernel.value("list(run.results)") == [42, 42]
