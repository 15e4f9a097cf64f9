"""Libraries imported in a rank detect no notebook and no interactive interpreter. Their output is in the cell."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import ready_kernel

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="no lightning: make test-clients"),
    pytest.mark.timeout(900),  # This only guards against hangs: ranks import transformers and Lightning.
]

LOOK = """
import notebook_accelerate
notebook_accelerate.as_accelerate()

def look():
    import os, sys
    found = {"ps1": hasattr(sys, "ps1"), "parent": "JPY_PARENT_PID" in os.environ}
    from tqdm.auto import tqdm
    bar = tqdm(range(3))
    list(bar)
    found["tqdm"] = hasattr(bar, "container") and bar.container is not None
    import rich, rich.console
    found["rich"] = rich.get_console().is_jupyter or rich.console.Console().is_jupyter
    import huggingface_hub.utils as hub
    found["huggingface_hub"] = hub.is_notebook() or hub.is_google_colab()
    from transformers.utils import is_in_notebook
    found["transformers"] = is_in_notebook()
    import transformers.trainer
    found["progress"] = transformers.trainer.DEFAULT_PROGRESS_CALLBACK.__name__ != "ProgressCallback"
    import lightning.pytorch.trainer.connectors.accelerator_connector as connector
    import lightning.fabric.connector as fabric
    found["lightning"] = connector._IS_INTERACTIVE or fabric._IS_INTERACTIVE
    from wandb.sdk.lib import ipython
    found["wandb"] = ipython.in_jupyter()
    import pandas.io.formats.console
    found["pandas"] = pandas.io.formats.console.in_ipython_frontend()
    from IPython import get_ipython
    found["IPython"] = get_ipython() is not None
    return found

def show():
    import matplotlib.pyplot, ipywidgets, plotly.graph_objects
    from IPython.display import display
    matplotlib.pyplot.plot([1, 2, 3])
    matplotlib.pyplot.show()
    plotly.graph_objects.Figure(data=[plotly.graph_objects.Scatter(y=[1, 2])]).show()
    slider = ipywidgets.IntSlider()
    slider.value = 5
    display(slider)
"""
IMPORTS = """
%matplotlib inline
import ipywidgets, lightning, matplotlib.pyplot, pandas, plotly.graph_objects, plotly.io, rich, rich.console
import huggingface_hub, tqdm.auto, transformers.trainer, wandb
from IPython.display import display
rich.get_console(); list(tqdm.auto.tqdm(range(3)))
"""


@pytest.fixture(scope="module", params=["nothing imported", "everything imported"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Yield a kernel that has imported none or all of the libraries."""
    with ready_kernel() as kernel:
        kernel.check(LOOK)
        if request.param == "everything imported":
            kernel.check(IMPORTS)
        yield kernel


@pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
def test_libraries_do_not_detect_a_notebook_in_a_rank(kernel: Kernel, method: str) -> None:
    found: list[dict[str, Any]] = kernel.value(
        f"notebook_launcher(look, num_processes=2, start_method={method!r}).results"
    )
    assert len(found) == 2
    for rank in found:
        assert not any(rank.values()), rank


@pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
def test_figures_arrive_and_widgets_arrive_as_text(kernel: Kernel, method: str) -> None:
    cell = kernel.check(f"notebook_launcher(show, num_processes=2, start_method={method!r}, panel=False);")
    kinds = [kind for data in cell.displays for kind in data]
    assert kinds.count("image/png") == 2
    assert kinds.count("application/vnd.plotly.v1+json") == 2
    assert "application/vnd.jupyter.widget-view+json" not in kinds
    assert sum("IntSlider(value=5)" in data.get("text/plain", "") for data in cell.displays) == 2
    assert "from a fork" not in cell.plain
