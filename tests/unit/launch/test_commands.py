"""The commands that the options of `accelerate launch` become."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from notebook_accelerate.utils import prepare_deepspeed_cmd_env


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
def test_deepspeeds_launcher_is_told_where_to_run(options: dict[str, str], words: list[str]) -> None:
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
