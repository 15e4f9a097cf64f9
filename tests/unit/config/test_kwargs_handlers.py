"""Kwargs handlers pass torch only the values that differ from the defaults."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import DDPCommunicationHookType, DynamoBackend
from notebook_accelerate.config.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from notebook_accelerate.config.low_precision import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs


def test_only_fields_that_differ_become_keywords() -> None:
    assert AutocastKwargs().to_kwargs() == {}
    assert GradScalerKwargs(growth_factor=3.0).to_kwargs() == {"growth_factor": 3.0}
    assert GradientAccumulationPlugin(num_steps=2).to_kwargs() == {"num_steps": 2}
    assert AutocastKwargs(enabled=False).to_dict() == {"enabled": False, "cache_enabled": None}


def test_the_keywords_match_torch() -> None:
    assert torch.amp.GradScaler("cpu", **GradScalerKwargs(init_scale=8.0).to_kwargs()).get_scale() == 8.0
    with torch.autocast("cpu", dtype=torch.bfloat16, **AutocastKwargs(enabled=False).to_kwargs()):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize(
    ("values", "match"),
    [({"init_scale": 0.0}, "init_scale"), ({"growth_factor": 1.0}, "growth"), ({"backoff_factor": 1.5}, "backoff")],
)
def test_wrong_scaler_settings_raise(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        GradScalerKwargs(**values)


def test_the_time_limit_of_a_process_group_depends_on_its_backend() -> None:
    assert InitProcessGroupKwargs().timeout == timedelta(minutes=10)
    assert InitProcessGroupKwargs(backend="gloo").timeout == timedelta(minutes=30)
    assert InitProcessGroupKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs() == {"timeout": timedelta(seconds=5)}
    with pytest.raises(ValueError, match=r"timeout=5.*timedelta"):
        InitProcessGroupKwargs(timeout=5)  # type: ignore[arg-type]


def test_the_communication_hook_is_not_an_argument_of_ddp() -> None:
    kwargs = DistributedDataParallelKwargs(bucket_cap_mb=10, comm_hook="bf16")  # type: ignore[arg-type]
    assert kwargs.to_kwargs() == {"bucket_cap_mb": 10}
    assert kwargs.comm_hook is DDPCommunicationHookType.BF16
    assert set(kwargs.to_dict(ignore_keys=())) > set(kwargs.to_dict())


@pytest.mark.parametrize("values", [{"comm_hook": "fp61"}, {"comm_wrapper": "power_sgd"}])
def test_an_unknown_hook_raises_with_the_known_ones(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="pass one of 'no', 'fp16', 'bf16'"):
        DistributedDataParallelKwargs(**values)


def test_a_profiler_records_the_chosen_activities() -> None:
    seen = []
    kwargs = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1},
        on_trace_ready=lambda profiler: seen.append(len(profiler.events())),
        record_shapes=True,
    )
    with kwargs.build() as profiler:
        for _ in range(3):
            torch.ones(4) + 1
            profiler.step()
    assert seen
    assert seen[0] > 0
    with pytest.raises(ValueError, match="'gpu' is not supported here; supported: cpu"):
        ProfileKwargs(activities=["gpu"]).build()  # type: ignore[list-item]


def test_compilation_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "yes")
    before = dict(os.environ)
    plugin = TorchDynamoPlugin(mode="max-autotune", use_regional_compilation=True)
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.to_dict()["use_regional_compilation"] is True
    # Values from the environment must reach torch even if they are the defaults on this machine.
    assert plugin.to_kwargs() == {"backend": "inductor", "mode": "max-autotune", "dynamic": True}
    assert dict(os.environ) == before


def test_compilation_settings_are_checked() -> None:
    assert TorchDynamoPlugin().to_kwargs() == {}
    with pytest.raises(ValueError, match=r"backend='foo'.*INDUCTOR"):
        TorchDynamoPlugin(backend="foo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode='fast' is not allowed; pass one of 'default'"):
        TorchDynamoPlugin(mode="fast")
    with pytest.warns(FutureWarning, match="IPEX is deprecated: write INDUCTOR"):
        TorchDynamoPlugin(backend=DynamoBackend.IPEX)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "2"])
def test_accumulation_needs_a_whole_number_of_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match="num_steps"):
        GradientAccumulationPlugin(num_steps=steps)


def test_logs_go_to_the_project_folder_by_default(tmp_path: Path) -> None:
    both = ProjectConfiguration(project_dir=str(tmp_path))
    apart = ProjectConfiguration(project_dir=str(tmp_path), logging_dir="logs")
    later = ProjectConfiguration()
    later.set_directories("there")
    assert (both.logging_dir, apart.logging_dir) == (str(tmp_path), "logs")
    assert (later.project_dir, later.logging_dir) == ("there", "there")
    with pytest.raises(ValueError, match="total_limit=0"):
        ProjectConfiguration(total_limit=0)


def test_the_data_seed_must_be_a_number() -> None:
    assert DataLoaderConfiguration(data_seed=3).data_seed == 3
    with pytest.raises(ValueError, match="data_seed='3'"):
        DataLoaderConfiguration(data_seed="3")  # type: ignore[arg-type]


def test_recipes_without_their_library_name_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(ImportError, match=r"TERecipeKwargs needs transformer_engine.*pip install"):
        TERecipeKwargs()
    with pytest.raises(ImportError, match="pip install torchao"):
        AORecipeKwargs()


def test_recipes_read_their_variables_and_check_their_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
    assert MSAMPRecipeKwargs().to_kwargs() == {"opt_level": "O1"}
    with pytest.raises(ValueError, match=r"opt_level=.* is not allowed; pass one of 'O1', 'O2'"):
        MSAMPRecipeKwargs(opt_level="O9")  # type: ignore[arg-type]


def test_products_in_higher_precision_follow_the_variables_of_accelerates_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("notebook_accelerate.config.low_precision._require", lambda *_: None)
    assert TERecipeKwargs().override_linear_precision == (False, False, False)
    for name, value in {"FPROP": "1", "DGRAD": "0", "WGRAD": "True"}.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_OVERRIDE_{name}", value)
    assert TERecipeKwargs().override_linear_precision == (True, False, True)


def test_the_recipe_of_transformer_engine_fills_in_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_accelerate.config.low_precision._require", lambda *_: None)
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION", "(False,True,0)")
    recipe = TERecipeKwargs(fp8_format="e4m3", margin=2)  # type: ignore[arg-type]
    assert recipe.fp8_format == "E4M3"
    assert recipe.override_linear_precision == (False, True, False)
    assert recipe.to_kwargs() == {
        "margin": 2,
        "fp8_format": "E4M3",
        "override_linear_precision": (False, True, False),
    }
    with pytest.raises(ValueError, match=r"fp8_format='E4'.*HYBRID"):
        TERecipeKwargs(fp8_format="e4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="three flags"):
        TERecipeKwargs(override_linear_precision=(True, False))  # type: ignore[arg-type]


def test_the_older_recipe_is_deprecated_but_works() -> None:
    with pytest.warns(FutureWarning, match="use TERecipeKwargs"):
        recipe = FP8RecipeKwargs(backend="msamp", opt_level="O1")  # type: ignore[arg-type]
    assert (recipe.backend, recipe.opt_level) == ("MSAMP", "O1")
