"""`as_accelerate` in a kernel: code written for Accelerate in cells, in ranks, and in their child processes."""

from __future__ import annotations

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import ready_kernel, said

pytestmark = pytest.mark.notebook

TRAIN = """
from accelerate import Accelerator
from accelerate.utils import gather_object

# One rank starts a loader's process, the other one an interpreter.
def train():
    import importlib.metadata, subprocess
    from torch.utils.data import DataLoader
    from client_data import Numbers
    accelerator = Accelerator(cpu=True)
    versions = [importlib.metadata.version("accelerate")]
    if accelerator.is_main_process:
        loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
        versions += next(iter(loader))
    else:
        ask = [sys.executable, "-c", "import accelerate; print(accelerate.__version__)"]
        versions.append(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    return gather_object(versions), Accelerator.__module__
"""


@pytest.mark.parametrize("method", ["fork", "zygote", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_cells_written_for_accelerate_run_in_ranks(kernel: Kernel, method: str) -> None:
    (kernel.cwd / "client_data.py").write_text(
        "import accelerate\nclass Numbers:\n    def __len__(self):\n        return 1\n"
        "    def __getitem__(self, index):\n        return accelerate.__version__\n"
    )
    kernel.check("notebook_accelerate.as_accelerate(); sys.path.insert(0, os.getcwd())")
    kernel.check(TRAIN)
    results = kernel.value(f"launch(train, start_method={method!r}).results")
    kernel.check("notebook_accelerate.as_accelerate(False); sys.path.remove(os.getcwd())")
    assert results == [[["1.15.0"] * 4, "notebook_accelerate.accelerator"]] * 2


def test_the_name_is_free_after_its_removal(kernel: Kernel) -> None:
    kernel.check("notebook_accelerate.as_accelerate()\nimport accelerate\nnotebook_accelerate.as_accelerate(False)")
    assert "No module named 'accelerate'" in said(kernel.run("import accelerate.utils"))
    text = said(kernel.run("launch(lambda: __import__('accelerate'))"))
    assert "No module named 'accelerate'" in text


def test_a_zygote_started_with_the_alias_forks_ranks_without_it() -> None:
    with ready_kernel(zygote=False) as kernel:
        kernel.check("notebook_accelerate.as_accelerate(); notebook_accelerate.shutdown()")
        kernel.check(
            "def missing():\n    import importlib.util\n    return importlib.util.find_spec('accelerate') is None"
        )
        look = "launch(missing, start_method='zygote').results"
        assert kernel.value(look) == [False, False]
        kernel.check("notebook_accelerate.as_accelerate(False)")
        assert kernel.value(look) == [True, True]
