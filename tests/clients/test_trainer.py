"""transformers' Trainer, which imports this package as `accelerate`. Run these tests with `make test-clients`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.integrations import accelerate_alias
from tests.support.ranks import reserved_port

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers is not installed: make test-clients"
    ),
    pytest.mark.timeout(700),  # This only guards against hangs: several processes import transformers.
]

ROOT = Path(__file__).resolve().parents[2]
FSDP: dict[str, Any] = {"auto_wrap_policy": "NO_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, **FSDP}},
    "fsdp1": {"fsdp": True, "fsdp_config": {"version": 1, **FSDP}},
}


def train(folder: Path, ranks: int, more: dict[str, Any], script: str = "clients/trainer.py") -> list[dict[str, Any]]:
    """Run a test script on the given number of ranks. Return rank 0's findings."""
    with reserved_port() as port:
        return _train(folder, ranks, more, ROOT / "tests" / script, port)


def _train(folder: Path, ranks: int, more: dict[str, Any], path: Path, port: int) -> list[dict[str, Any]]:
    script = [sys.executable, str(path), str(folder / "out"), str(8 // ranks)]
    # as_accelerate() sets the path in the same way.
    path_with_alias = f"{accelerate_alias.STARTUP_FOLDER}{os.pathsep}{ROOT}"
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
        hub = {"HF_HUB_OFFLINE": 1, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path_with_alias}
        environment = {name: str(value) for name, value in {**place, **group, **hub}.items()}
        processes.append(
            subprocess.Popen(
                [*script, json.dumps(more)],
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        return [_result(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out[-4000:]
    found: dict[str, Any] = json.loads(out.rpartition("RESULT")[2].splitlines()[0])
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("alone"), 1, {})[0]


def test_one_process_trains_and_resumes(alone: dict[str, Any]) -> None:
    assert alone["served"] == "notebook_accelerate.accelerator"
    assert alone["strategy"] == "single"
    assert alone["steps"] == alone["resumed_steps"] == 6
    assert alone["resumed"] == alone["weights"]


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_like_one_process(way: str, alone: dict[str, Any], tmp_path: Path) -> None:
    first, second = train(tmp_path, 2, WAYS[way])
    assert first["strategy"] == second["strategy"] == way
    assert first["steps"] == first["resumed_steps"] == 6
    assert first["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-4)
    assert first["resumed"] == pytest.approx(first["weights"], rel=1e-6)
