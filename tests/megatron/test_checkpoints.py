"""Checkpoints of Megatron-LM: their names, both formats, and whole models gathered from the ranks' parts."""

from __future__ import annotations

import argparse
import importlib.util
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.trainings import STEPS, Case, place, prepared, run, steps
from tests.support.mounted import OWN_MACHINES, to_a_machine_of_its_own
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: make test-megatron"
)

CLOSE = 1e-5
HALF_WAY = 2
OLDER: dict[str, Any] = {"other_megatron_args": {"ckpt_format": "torch"}}
FILE = "model_optim_rng.pt"


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("degrees", "ranks", "parts"),
    [
        ({}, 1, {"mp_rank_00"}),
        ({"tp": 2}, 2, {"mp_rank_00", "mp_rank_01"}),
        ({"tp": 2, "pp": 2}, 4, {f"mp_rank_{tp:02d}_{pp:03d}" for tp in (0, 1) for pp in (0, 1)}),
    ],
    ids=["one", "tensors", "both"],
)
def test_a_file_for_each_part_can_be_saved_and_resumed(
    degrees: dict[str, int], ranks: int, parts: set[str], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    case = Case(**degrees, more=OLDER)
    whole = run_ranks(run, replace(case, save_after=HALF_WAY, save_to=str(folder)), world_size=ranks)
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(HALF_WAY + 1)
    iteration = folder / f"iter_{HALF_WAY + 1:07d}"
    assert _names(iteration) == parts
    assert all(_names(iteration / part) == {FILE} for part in parts)
    resumed = run_ranks(run, replace(case, start=str(folder), skipped=HALF_WAY + 1), world_size=ranks)
    assert resumed == [found[HALF_WAY + 1 :] for found in whole]
    if ranks == 2:
        with pytest.raises(
            RankError, match=r"this rank's part is mp_rank_00_000: .* degrees that they were written with"
        ):
            run_ranks(run, Case(pp=2, start=str(folder)), world_size=2)


def elsewhere(place: str, case: Case) -> list[tuple[float, float]]:
    """Run a case with temporary files that the other rank cannot see."""
    to_a_machine_of_its_own(place)
    return run(case)


@pytest.mark.parametrize("more", [OLDER, {}], ids=["torch", "torch_dist"])
def test_ranks_on_two_machines_resume_from_a_store(more: dict[str, Any], tmp_path: Path) -> None:
    folder = f"mounted://{tmp_path}/store/checkpoint"
    case = Case(tp=2, more=more)
    saving = replace(case, save_after=HALF_WAY, save_to=folder)
    whole = run_ranks(elsewhere, str(tmp_path), saving, env=OWN_MACHINES)
    going_on = replace(case, start=folder, skipped=HALF_WAY + 1)
    resumed = run_ranks(elsewhere, str(tmp_path), going_on, env=OWN_MACHINES)
    assert resumed == [found[HALF_WAY + 1 :] for found in whole]


def without_its_manifest(case: Case) -> list[tuple[float, float]]:
    """Resume from a folder as Megatron-LM itself leaves it: with iterations, but without Accelerate's files."""
    with place() as cpu:
        accelerator, model, optimizer, loader = prepared(case, cpu)
        assert case.start is not None
        accelerator.strategy.load_state(Path(case.start), models=[model])
        found = steps(case, accelerator, model, optimizer, loader)
        accelerator.end_training()
    return found


@pytest.mark.parametrize("more", [OLDER, {}], ids=["torch", "torch_dist"])
def test_checkpoints_written_by_megatron_load(more: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (expected,) = run_ranks(run, Case(more=more, save_after=HALF_WAY, save_to=str(folder)), world_size=1)
    bare = tmp_path / "megatron"
    bare.mkdir()
    for name in ("iter_0000003", "latest_checkpointed_iteration.txt"):
        (folder / name).rename(bare / name)
    for start in (bare, bare / "iter_0000003"):
        case = Case(start=str(start), skipped=HALF_WAY + 1)
        (found,) = run_ranks(without_its_manifest, case, world_size=1)
        assert found == expected[HALF_WAY + 1 :]


def test_files_of_parts_have_the_entries_of_megatrons_tools(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    run_ranks(run, Case(more=OLDER, save_after=0, save_to=str(folder)), world_size=1)
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(folder / "iter_0000001" / "mp_rank_00" / FILE, weights_only=False)
    assert {"args", "checkpoint_version", "iteration", "model", "optimizer", "opt_param_scheduler", "rng_state"} <= set(
        state
    )
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 1)
    assert state["args"].num_layers == 2
    assert state["args"].tensor_model_parallel_size == 1
    assert "decoder.layers.1.mlp.linear_fc1.weight" in state["model"]


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("this code ran",)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "iter_0000001" / "mp_rank_00"
    part.mkdir(parents=True)
    torch.save({"model": _Evil()}, part / FILE, pickle_module=pickle)
    with pytest.raises(RankError, match="contains objects that are not loaded"):
        run_ranks(without_its_manifest, Case(start=str(tmp_path)), world_size=1)
    assert "this code ran" not in capfd.readouterr().out.replace("print", "")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"contains no iter_\*/ written by Megatron-LM"):
        run_ranks(without_its_manifest, Case(start=str(tmp_path)), world_size=1)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    case = Case(more={"other_megatron_args": {"ckpt_format": "zarr"}}, save_after=0, save_to=str(tmp_path / "c"))
    with pytest.raises(RankError, match="'zarr'} is not known; pass one of 'torch_dist', 'torch'"):
        run_ranks(run, case, world_size=1)


def whole(case: Case) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Load a checkpoint. Return the whole model's state, and the names of the files that `save_model` writes."""
    with place() as cpu:
        accelerator, model, _, _ = prepared(case, cpu)
        if case.start:
            accelerator.load_state(case.start, elastic=True)
        state = accelerator.get_state_dict(model)
        accelerator.save_model(model, case.save_to)
        files = sorted(path.name for path in Path(case.save_to).iterdir()) if accelerator.is_main_process else []
        accelerator.end_training()
    return {name: tensor.clone() if torch.is_tensor(tensor) else tensor for name, tensor in state.items()}, files


@pytest.mark.parametrize(
    "more", [{}, {"other_megatron_args": {"swiglu": True, "num_layers": 4}}], ids=["gelu", "swiglu"]
)
def test_the_gathered_state_equals_the_state_of_one_rank(more: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_ranks(run, Case(more=more, save_after=STEPS - 1, save_to=folder), world_size=1)
    ((expected, _),) = run_ranks(whole, Case(more=more, start=folder, save_to=str(tmp_path / "one")), world_size=1)
    case = Case(tp=2, pp=2, more=more, start=folder, save_to=str(tmp_path / "four"))
    (found, files), *others = run_ranks(whole, case, world_size=4)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] is tensor is None) or torch.equal(found[name], tensor), name
    assert files == ["model.safetensors"]
    assert all(state == {} for state, _ in others)
