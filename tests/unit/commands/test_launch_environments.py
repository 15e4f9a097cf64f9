"""Translating the options of `accelerate launch` into commands and environment variables."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_accelerate.utils import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
)


def _options(**given: Any) -> argparse.Namespace:
    base = {
        "num_processes": 4, "num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29511,
        "machine_rank": 0, "training_script": "train.py", "training_script_args": ["--epochs", "1"],
        "use_deepspeed": True, "zero_stage": 3,
    }  # fmt: skip
    return argparse.Namespace(**{**base, **given})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["--num_gpus", "2"]),
        ({"deepspeed_exclusion_filter": "worker-1@worker-2:0"}, ["--exclude", "worker-1@worker-2:0"]),
        ({"deepspeed_inclusion_filter": "worker-1:0,1"}, ["--include", "worker-1:0,1"]),
    ],
)
def test_deepspeeds_launcher_gets_the_hosts(options: dict[str, str], words: list[str]) -> None:
    given = _options(deepspeed_multinode_launcher="pdsh", deepspeed_hostfile="hosts", **options)
    command, environment = prepare_deepspeed_cmd_env(given)
    expected = ["deepspeed", "--hostfile", "hosts", "--no_local_rank", "--launcher", "pdsh", *words]
    expected += ["--master_addr", "10.0.0.1"]
    assert command == [*expected, "--master_port", "29511", "train.py", "--epochs", "1"]
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


def test_torchrun_starts_the_ranks_of_one_machine_and_of_the_standard_launcher() -> None:
    assert prepare_deepspeed_cmd_env(_options(num_machines=1))[0] is None
    assert prepare_deepspeed_cmd_env(_options(deepspeed_multinode_launcher="standard"))[0] is None


def test_options_of_a_strategy_are_variables_if_it_is_used() -> None:
    given = {"fsdp_version": 2, "fsdp_offload_params": True, "fsdp_transformer_layer_cls_to_wrap": "Block"}
    environment = prepare_multi_gpu_env(_options(use_fsdp=True, **given))
    expected = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    }  # fmt: skip
    assert {name: environment.get(name) for name in expected} == expected
    assert not any(name.startswith("FSDP_") for name in prepare_multi_gpu_env(_options(**given)))


def test_fp8_options_are_variables_of_accelerate() -> None:
    options = _options(mixed_precision="fp8", fp8_backend="te", fp8_override_linear_precision=(True, False, True))
    _, environment = prepare_simple_launcher_cmd_env(options)
    expected = {
        "ACCELERATE_FP8_BACKEND": "te", "ACCELERATE_FP8_OVERRIDE_FPROP": "True",
        "ACCELERATE_FP8_OVERRIDE_DGRAD": "False", "ACCELERATE_FP8_OVERRIDE_WGRAD": "True",
    }  # fmt: skip
    assert {name: value for name, value in environment.items() if name.startswith("ACCELERATE_FP8")} == expected


def test_a_module_runs_on_the_cpu() -> None:
    command, environment = prepare_simple_launcher_cmd_env(_options(cpu=True, module=True))
    assert command == [sys.executable, "-m", "train.py", "--epochs", "1"]
    assert (environment["ACCELERATE_USE_CPU"], environment["KMP_BLOCKTIME"]) == ("True", "1")
    assert (environment["ACCELERATE_DYNAMO_BACKEND"], environment["ACCELERATE_DYNAMO_USE_DYNAMIC"]) == ("NO", "False")


def test_a_sagemaker_job_gets_its_arguments_and_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Accelerate, the first result is the estimator's arguments, and the second one is the inputs of ``fit``."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    inputs, metrics = tmp_path / "inputs.tsv", tmp_path / "metrics.tsv"
    inputs.write_text("channel_name\tdata_location\ntrain\ts3://bucket/train\n")
    metrics.write_text("metric_name\tmetric_regex\nloss\tloss=(.*)\n")
    config = SimpleNamespace(
        region="eu-west-1", profile="me", distributed_type="DATA_PARALLEL", image_uri=None, iam_role_name="role",
        transformers_version="4", pytorch_version="2", py_version="py311", base_job_name="job", num_machines=2,
        ec2_instance_type="ml.p4d", sagemaker_inputs_file=str(inputs), sagemaker_metrics_file=str(metrics),
        additional_args={"environment": {"MINE": "1"}},
    )  # fmt: skip
    options = _options(training_script="code/train.py", mixed_precision="bf16", training_script_args=["--lr", "0.1"])
    estimator, found = prepare_sagemager_args_inputs(config, options)
    assert found == {"train": "s3://bucket/train"}
    assert (estimator["entry_point"], estimator["source_dir"], estimator["role"]) == ("train.py", "code", "role")
    assert estimator["hyperparameters"] == {"lr": 0.1}
    assert estimator["metric_definitions"] == [{"Name": "loss", "Regex": "loss=(.*)"}]
    assert estimator["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    assert estimator["environment"].pop("ACCELERATE_DYNAMO_BACKEND") == "NO"
    assert {name: value for name, value in estimator["environment"].items() if "DYNAMO" not in name} == {
        "ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "MINE": "1",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
    }  # fmt: skip


def test_a_sagemaker_job_needs_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    config = SimpleNamespace(profile=None)
    with pytest.raises(OSError, match="needs a profile of AWS, or both --aws_access_key_id and"):
        prepare_sagemager_args_inputs(config, _options(training_script="train.py", aws_access_key_id="a"))
