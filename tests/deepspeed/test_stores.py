"""An engine's checkpoint in a store that is reached through fsspec, written by ranks on separate machines."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.strategies import deepspeed_scripts as scripts
from tests.parity.strategies.scripts import Case
from tests.parity.strategies.table import ZERO
from tests.support.mounted import OWN_MACHINES, to_a_machine_of_its_own
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make test-deepspeed"
)

HALF = 3


def trained(place: str, case: Case, folder: str, save_at: int | None) -> dict[str, Any]:
    """Train with temporary files that the other rank cannot see."""
    to_a_machine_of_its_own(place)
    return scripts.trained(case, folder, save_at)


def test_ranks_on_two_machines_can_resume(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "checkpoint"
    whole = Case(**ZERO["stage 3"], steps=2 * HALF)
    half = Case(**ZERO["stage 3"], first=HALF, steps=HALF)
    options: dict[str, Any] = {"timeout": 400.0, "env": OWN_MACHINES}
    expected = run_ranks(trained, str(tmp_path), whole, f"mounted://{folder}", HALF, **options)[0]
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written == {
        *json.loads((folder / "checkpoint_manifest.json").read_text())["files"],
        "checkpoint_manifest.json",
    }
    assert len([name for name in written if name.endswith("optim_states.pt")]) == 2
    assert {"latest", "zero_to_fp32.py"} <= written
    resumed = run_ranks(trained, str(tmp_path), half, f"mounted://{folder}", None, **options)[0]
    assert resumed["losses"] == expected["losses"][HALF:]
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, expected["weights"][name]), name


class Attack:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.leaks_ok("reading an engine's checkpoint imports DeepSpeed, which sets PYTORCH_NVML_BASED_CUDA_CHECK")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["*_optim_states.pt", "*_model_states.pt"])
def test_no_code_of_an_engines_checkpoint_runs(stage: int, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    case = Case(**ZERO[f"stage {stage}"], steps=1)
    run_ranks(scripts.trained, case, str(folder), 0, timeout=400.0)
    for path in (folder / "pytorch_model").glob(name):
        content = torch.load(path, weights_only=False)
        torch.save({**content, "more": Attack(str(tmp_path / "ran"))}, path)
    (folder / "checkpoint_manifest.json").unlink()
    with pytest.raises(RankError, match="contains more than data and was not loaded"):
        run_ranks(scripts.trained, case, str(folder), None, timeout=400.0)
    assert not (tmp_path / "ran").exists()
