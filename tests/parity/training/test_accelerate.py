"""Losses and weights equal the real Accelerate's, which must be installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.parity.training.scripts import Case, Result, accelerated
from tests.parity.training.test_plain_torch import CASES, assert_equal
from tests.support.ranks import run_ranks

pytest.importorskip("accelerate", reason="the real package is not installed: make test-parity")

# On the CPU, Accelerate refuses fp16.
SHARED = {name: case for name, case in CASES.items() if case.precision != "fp16"}


@pytest.fixture(autouse=True)
def fresh_original() -> Iterator[None]:
    yield
    state = import_module("accelerate.state")
    state.AcceleratorState._reset_state(True)
    state.GradientState._reset_state()


@pytest.mark.parametrize("case", SHARED.values(), ids=list(SHARED))
def test_one_process_trains_like_accelerate(case: Case) -> None:
    assert_equal(accelerated(case), accelerated(case, "accelerate"))


def both(case: Case) -> tuple[Result, Result]:
    """Train with both packages on one rank. The second one uses the process group that the first one created."""
    return accelerated(case, "accelerate"), accelerated(case)


@pytest.mark.parametrize("case", SHARED.values(), ids=list(SHARED))
def test_two_ranks_train_like_accelerate(case: Case) -> None:
    for theirs, ours in run_ranks(both, case):
        assert_equal(ours, theirs)


_DRAWS = """
import importlib, json, sys
import numpy as np, torch
package, folder, in_kernel, in_function = sys.argv[1:]
ours = importlib.import_module(package)
set_seed = importlib.import_module(package + ".utils").set_seed

def draw(launch):
    accelerator = ours.Accelerator()
    exec(in_function)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()
    found = [torch.rand(2).tolist(), np.random.rand(2).tolist(), weights, [batch.tolist() for batch in loader]]
    with open(f"{folder}/{package}.{launch}.{accelerator.process_index}", "w") as file:
        json.dump(found, file)

exec(in_kernel)
for launch in range(2):
    ours.debug_launcher(draw, (launch,), 2)
"""


@pytest.mark.parametrize(
    ("in_kernel", "in_function"),
    [
        ("set_seed(3)", "pass"),
        ("pass", "set_seed(4)"),
        ("torch.manual_seed(3)", "set_seed(4, device_specific=True)"),
    ],
)
def test_seeded_launches_draw_the_numbers_of_accelerate(tmp_path: Path, in_kernel: str, in_function: str) -> None:
    (tmp_path / "draws.py").write_text(_DRAWS)
    for package in ("accelerate", "notebook_accelerate"):
        command = [sys.executable, "draws.py", package, str(tmp_path), in_kernel, in_function]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    for launch in range(2):
        for rank in range(2):
            theirs, ours = (
                json.loads((tmp_path / f"{package}.{launch}.{rank}").read_text())
                for package in ("accelerate", "notebook_accelerate")
            )
            assert ours == theirs
