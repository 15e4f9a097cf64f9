"""transformers imports this package as `accelerate`, in kernels and ranks. Run these tests with `make test-clients`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.support.kernel import Kernel
from tests.support.launching import ready_kernel

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed: make test-clients"
    ),
    pytest.mark.timeout(700),  # This only guards against hangs: several processes import transformers.
]

TRAIN = """
def look():
    from transformers.utils import is_accelerate_available
    from transformers.integrations import accelerate as integration
    return is_accelerate_available(), is_accelerate_available("1.1.0"), is_accelerate_available("9.0.0")

def train(folder):
    import accelerate
    from tests.clients.trainer import trainer_of
    trainer = trainer_of(folder, 4, {})
    steps = trainer.train().global_step
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    total = sum(weight.double().sum().item() for weight in weights.values())
    return steps, round(total, 6), trainer.accelerator.num_processes, type(trainer.accelerator).__module__
"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    with ready_kernel() as kernel:
        kernel.check("os.environ['HF_HUB_OFFLINE'] = '1'; notebook_accelerate.as_accelerate()")
        kernel.check(TRAIN)
        yield kernel


def test_transformers_finds_accelerate_in_the_kernel(kernel: Kernel) -> None:
    assert kernel.value("look()") == [True, True, False]


@pytest.mark.parametrize("method", ["fork", "zygote", "spawn"])
def test_a_trainer_in_a_cell_trains_in_ranks(kernel: Kernel, method: str) -> None:
    results = kernel.value(f"launch(train, 'out-{method}', start_method={method!r}, timeout=500).results")
    assert results[0] == results[1]
    steps, _, ranks, module = results[0]
    assert (steps, ranks, module) == (6, 2, "notebook_accelerate.accelerator")


def test_a_launch_with_the_alias_leaves_the_kernel_without_it(kernel: Kernel) -> None:
    kernel.check("notebook_accelerate.as_accelerate(False)\nfrom notebook_accelerate import LaunchConfig")
    results = kernel.value("launch(look, config=LaunchConfig(as_accelerate=True), start_method='zygote').results")
    assert results == [[True, True, False]] * 2
    assert kernel.value("'accelerate' in sys.modules") is False
