"""unsloth trains with this package as with the real Accelerate, on the CPU and in ranks of a notebook.

Without a GPU, unsloth trains on the CPU with the trainers of trl. Its code for GPUs can be imported, and patches the
same objects as on a GPU, but it cannot train.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.integrations.accelerate_alias import STARTUP_FOLDER
from tests.clients import peer
from tests.clients.test_programs import check_results
from tests.support.launching import ready_kernel

FOLDER = peer.VERSIONS.parent / "unsloth"
"""The folder in which make installs unsloth, and the versions of transformers and trl that it requires."""
pytestmark = [
    pytest.mark.skipif(not (FOLDER / "unsloth").exists(), reason="unsloth is not installed: make test-clients"),
    pytest.mark.skipif(not peer.FOLDER.exists(), reason="the environment has no real accelerate: make test-clients"),
    pytest.mark.timeout(1800),  # This only guards against hangs: importing unsloth takes many seconds.
]
PROGRAMS = ("unsloth_lora", "unsloth_lora@1")
PATCHES = """
import accelerate, unsloth
from accelerate.accelerator import Accelerator, TorchDynamoPlugin
print("PATCHED", accelerate.__file__, unsloth.DEVICE_TYPE, TorchDynamoPlugin.to_kwargs.__module__)
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the programs' results on the real Accelerate."""
    folder = tmp_path_factory.mktemp("there")
    return peer.results(peer.start(folder, PROGRAMS, FOLDER, peer.FOLDER), folder)


def test_programs_give_equal_results(there: dict[str, list[Any]], tmp_path: Path) -> None:
    here = peer.results(peer.start(tmp_path, PROGRAMS, STARTUP_FOLDER, FOLDER), tmp_path)
    for name in PROGRAMS:
        check_results(name, there[name], here[name])


def test_a_launch_in_a_notebook_gives_equal_results(there: dict[str, list[Any]]) -> None:
    with ready_kernel(zygote=False, env={"PYTHONPATH": f"{FOLDER}{os.pathsep}{peer.ROOT}"}) as kernel:
        kernel.check("import os; os.environ['HF_HUB_OFFLINE'] = '1'; notebook_accelerate.as_accelerate()")
        kernel.check("from tests.clients.programs.unsloth_training import unsloth_lora")
        kernel.check("run = launch(unsloth_lora, panel=False, timeout=900)", 900)
        here = kernel.value("run.results")
        check_results("unsloth_lora", there["unsloth_lora"], here)
        assert kernel.value("len(run.metrics['loss'].rank(0).values)") == here[0]["steps"]


def test_patches_for_gpus_find_their_targets(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (STARTUP_FOLDER, FOLDER, peer.ROOT)))
    variables = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "UNSLOTH_ALLOW_CPU": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PATCHES], env=variables, cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "notebook_accelerate/__init__.py cuda unsloth.models._utils" in done.stdout
