"""The commands produce the same files, estimates and environment variables as the real Accelerate."""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from notebook_accelerate import LaunchConfig
from notebook_accelerate.commands import estimate
from notebook_accelerate.commands.accelerate_cli import parser_for
from notebook_accelerate.commands.launch import launch_command_parser
from notebook_accelerate.commands.launch_settings import launch_config

pytest.importorskip("accelerate", reason="the real package is not installed: make test-parity")

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = {"theirs": "accelerate.commands.accelerate_cli", "ours": "notebook_accelerate"}


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}


def command(folder: Path, who: str, *arguments: str) -> str:
    """Run a command with one of the two programs. Return its output."""
    done = subprocess.run(
        [sys.executable, "-m", PROGRAMS[who], *arguments],
        cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_by_accelerate(path: Path) -> dict[str, Any]:
    """Return a configuration file as Accelerate reads it."""
    code = (
        "import json; from accelerate.commands.config import load_config_from_file; "
        f"print('READ', json.dumps(load_config_from_file({str(path)!r}).to_dict()))"
    )
    found: dict[str, Any] = json.loads(python(path.parent, code).rpartition("READ")[2])
    return found


def test_default_files_load_in_both(tmp_path: Path) -> None:
    for who in PROGRAMS:
        command(tmp_path, who, "config", "default", "--config_file", f"{who}.yaml", "--mixed_precision", "bf16")
    assert read_by_accelerate(tmp_path / "ours.yaml") == read_by_accelerate(tmp_path / "theirs.yaml")
    ours, theirs = (LaunchConfig.from_file(tmp_path / f"{who}.yaml") for who in ("ours", "theirs"))
    assert ours == theirs
    assert (ours.num_processes, ours.mixed_precision) == (1, "bf16")


FSDP = {
    "fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_cpu_ram_efficient_loading": True, "fsdp_forward_prefetch": True,
    "fsdp_offload_params": False, "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True, "fsdp_min_num_params": 100, "fsdp_transformer_layer_cls_to_wrap": "Block",
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"])
def test_converted_files_are_equal(strategy: str, tmp_path: Path) -> None:
    section = {**FSDP, "fsdp_sharding_strategy": strategy}
    contents = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": section, "downcast_bf16": "no"}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(contents))
    for who in PROGRAMS:
        command(tmp_path, who, "to-fsdp2", "--config_file", "one.yaml", "--output_file", f"{who}.yaml")
    assert (tmp_path / "ours.yaml").read_bytes() == (tmp_path / "theirs.yaml").read_bytes()


@pytest.mark.parametrize("safe", [True, False])
def test_merged_weights_are_equal(safe: bool, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2).bfloat16())
    shards = tmp_path / "checkpoint" / "pytorch_model_fsdp_0"
    dcp.save({"model": model.state_dict()}, checkpoint_id=shards, no_dist=True)
    options = [] if safe else ["--unsafe_serialization"]
    for who in PROGRAMS:
        command(tmp_path, who, "merge-weights", *options, str(shards), who)
    name = "model.safetensors" if safe else "pytorch_model.bin"
    ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
    if safe:
        assert ours.read_bytes() == theirs.read_bytes()
    found, expected = (torch.load(each) if not safe else _tensors(each) for each in (ours, theirs))
    assert found.keys() == expected.keys() == model.state_dict().keys()
    assert all(torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in found)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def test_estimates_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands import estimate as theirs  # noqa: TID251 - the peer

    model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 100))
    for module in (estimate, theirs):
        monkeypatch.setattr(module, "create_empty_model", lambda *_, **__: model)
    dtypes = ["float32", "float16", "int8", "int4"]
    options = SimpleNamespace(model_name="mine", library_name="transformers", dtypes=dtypes, trust_remote_code=False)
    expected = [[*row[:3], max(row[3].values()) if row[3] else None] for row in theirs.gather_data(options)]
    assert [row[:3] for row in estimate.gather_data(options)] == [row[:3] for row in expected]
    for dtype in ("float32", "float16", "bfloat16"):
        assert estimate.estimate_training_usage(4000, dtype) == theirs.estimate_training_usage(4000, dtype)


PARSERS = {
    "launch": "launch:launch_command_parser",
    "estimate-memory": "estimate:estimate_command_parser",
    "merge-weights": "merge:merge_command_parser",
    "to-fsdp2": "to_fsdp2:to_fsdp2_command_parser",
    "test": "test:test_command_parser",
    "env": "env:env_command_parser",
    "config": "config:get_config_parser",
}
MISSPELLED = {"torhchxla_trace_once"}
"""A misspelled backend that Accelerate's parser accepts but its configuration refuses."""


def options(parser: argparse.ArgumentParser, command: str) -> dict[tuple[str, str], argparse.Action]:
    """Return the options of a command and its subcommands, by command and spelling."""
    found: dict[tuple[str, str], argparse.Action] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found |= options(inner, f"{command} {name}")
        else:
            found |= {(command, spelling): action for spelling in action.option_strings or [action.dest]}
    return found


@pytest.mark.parametrize("name", PARSERS)
def test_every_option_is_accepted(name: str) -> None:
    module, _, function = PARSERS[name].partition(":")
    theirs = getattr(importlib.import_module(f"accelerate.commands.{module}"), function)()
    commands = parser_for([name])._actions[-1].choices
    assert commands is not None
    ours = options(commands[name], name)  # type: ignore[index]
    for key, action in options(theirs, name).items():
        if key[1] == "subcommand":
            continue
        assert key in ours, key
        assert (action.nargs == 0) == (ours[key].nargs == 0), f"{key} is a switch on one side only"
        assert set(action.choices or ()) - MISSPELLED <= set(map(str, ours[key].choices or action.choices or ())), key


@pytest.mark.parametrize("variables", [{"HF_HOME": "a"}, {"XDG_CACHE_HOME": "b"}, {"HOME": "c"}], ids=str)
def test_the_default_file_has_the_same_location(variables: dict[str, str], tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in {"HF_HOME", "XDG_CACHE_HOME"}}
    places = []
    for who, program in PROGRAMS.items():
        folder = tmp_path / who
        found = {name: str(folder / value) for name, value in variables.items()}
        done = subprocess.run(
            [sys.executable, "-m", program, "config", "default"],
            env={**kept, **found, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        places.append(sorted(str(path.relative_to(folder)) for path in folder.rglob("*.yaml")))
    assert places[0] == places[1] != []


SHOW = """
import json, os
if os.environ.get("RANK", "0") == "0":
    prefixes = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "OMP_", "KMP_", "CUDA_", "ROLE_NAME")
    print("SHOWN", json.dumps({name: value for name, value in os.environ.items() if name.startswith(prefixes)}))
"""
COMMANDS = (
    "",
    "--cpu",
    "--cpu --num_processes 1",
    "OMP_NUM_THREADS=5 --cpu --num_processes 1",
    "OMP_NUM_THREADS=5 --use_fsdp --num_processes 2",
    "--cpu --num_processes 1 --num_cpu_threads_per_process 3",
    "--num_processes 1 --mixed_precision bf16 --gpu_ids all --enable_cpu_affinity --debug",
    "--use_fsdp --num_processes 2 --gpu_ids all --role trainer",
    "ACCELERATE_DYNAMO_BACKEND=EAGER ACCELERATE_MIXED_PRECISION=bf16 --cpu --num_processes 1",
    "--use_fsdp --num_processes 2 --dynamo_backend inductor --dynamo_mode max-autotune --dynamo_use_dynamic",
    "--use_fsdp --num_processes 1",
    "--use_fsdp --num_processes 2",
    "--use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_offload_params true --debug",
    "--use_megatron_lm --num_processes 2 --megatron_lm_tp_degree 2 --megatron_lm_recompute_activations true",
    "--use_fsdp --num_processes 2 --fsdp_version 2 --use_parallelism_config --parallelism_config_tp_size 2",
    "--use_fsdp --num_processes 2 --fsdp_version 2 --use_parallelism_config --parallelism_config_cp_size 2",
    "--config_file compiled.yaml",
    "--config_file compiled.yaml --dynamo_backend eager --mixed_precision bf16",
    "--config_file fsdp.yaml",
    "--config_file megatron.yaml",
)
FILES = {
    "compiled": {
        "distributed_type": "NO", "num_processes": 1, "use_cpu": True, "debug": True,
        "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": True},
    },
    "fsdp": {
        "distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", "downcast_bf16": "no",
        "fsdp_config": {**FSDP, "fsdp_version": 2},
    },
    "megatron": {
        "distributed_type": "MEGATRON_LM", "num_processes": 2,
        "megatron_lm_config": {"megatron_lm_tp_degree": 2, "megatron_lm_recompute_activations": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS)
def test_scripts_have_the_same_variables(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    for name, contents in FILES.items():
        common = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**common, **contents}))
    for name in ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    words = line.split()
    for name, _, value in (word.partition("=") for word in words if "=" in word):
        monkeypatch.setenv(name, value)
    shown = {}
    for who in PROGRAMS:
        text = command(tmp_path, who, "launch", *(word for word in words if "=" not in word), "show.py")
        shown[who] = json.loads(text.rpartition("SHOWN")[2])
        if not {"--cpu", "compiled.yaml"} & set(words):
            # Only our command always sets this for ranks without an accelerator. Without it, Accelerate's ranks train
            # independently.
            shown[who].pop("ACCELERATE_USE_CPU", None)
    assert shown["ours"] == shown["theirs"]


FUNCTIONS = (
    "--num_processes 1 --mixed_precision fp8 --fp8_backend ao",
    "--num_processes 1 --mixed_precision fp8 --fp8_backend te --fp8_override_linear_precision true,false,true",
    "--num_processes 1 --mixed_precision fp8 --fp8_use_autocast_during_eval --fp8_pad_inner_dim false",
    "--multi_gpu --num_processes 2 --mixed_precision fp8 --fp8_backend msamp --fp8_opt_level O1",
    "--multi_gpu --num_processes 2 --gpu_ids 0,1 --role trainer --enable_cpu_affinity --debug",
    "--multi_gpu --num_processes 2 --dynamo_backend inductor --dynamo_mode max-autotune --dynamo_use_dynamic",
    "--cpu --num_processes 1",
    "--num_processes 1 --dynamo_backend inductor --dynamo_use_dynamic",
    "--use_fsdp --num_processes 2 --fsdp_version 2 --use_parallelism_config --parallelism_config_cp_size 2",
    "--use_megatron_lm --num_processes 2 --megatron_lm_recompute_activations 1",
)


@pytest.mark.parametrize("line", FUNCTIONS)
def test_functions_for_launchers_return_the_same_variables(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands import launch as their_launch  # noqa: TID251 - the peer
    from accelerate.utils import launch as theirs  # noqa: TID251 - the peer

    from notebook_accelerate import utils as ours

    monkeypatch.setattr(theirs, "is_fp8_available", lambda: True)
    arguments = their_launch.launch_command_parser().parse_args([*line.split(), "train.py"])
    checked, _, _ = their_launch._validate_launch_command(arguments)
    given = copy.deepcopy(checked)
    if "--multi_gpu" in line or "--use_" in line:
        assert ours.prepare_multi_gpu_env(given) == theirs.prepare_multi_gpu_env(checked)
    else:
        assert ours.prepare_simple_launcher_cmd_env(given) == theirs.prepare_simple_launcher_cmd_env(checked)
    launched = {**os.environ, **(launch_config(launch_command_parser().parse_args([*line.split(), "a.py"])).env or {})}
    prefix = "ACCELERATE_FP8_"
    expected = {name: value for name, value in theirs.prepare_multi_gpu_env(checked).items() if prefix in name}
    assert {name: value for name, value in launched.items() if prefix in name} == expected


def test_the_alias_works_next_to_the_installed_package(tmp_path: Path) -> None:
    out = python(
        tmp_path,
        "import importlib.metadata, notebook_accelerate\n"
        "notebook_accelerate.as_accelerate()\nimport accelerate\n"
        "print(accelerate.Accelerator is notebook_accelerate.Accelerator)\n"
        "print([each.name for each in importlib.metadata.distributions()].count('accelerate') > 1)\n"
        "notebook_accelerate.as_accelerate(False)\nimport accelerate\n"
        "print(accelerate.Accelerator.__module__)\n"
        "try:\n    notebook_accelerate.as_accelerate()\n"
        "except notebook_accelerate.NotebookAccelerateError as error:\n    print(error)\n",
    ).splitlines()
    assert out[:3] == ["True", "True", "accelerate.accelerator"]
    assert out[3].startswith("the real accelerate (")
