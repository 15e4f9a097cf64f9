"""The configuration file: round trips, older files, variables, and the default file for this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from notebook_accelerate import LaunchConfig
from notebook_accelerate.commands.accelerate_cli import main
from notebook_accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from notebook_accelerate.commands.config.default import write_basic_config
from notebook_accelerate.config import config_file
from notebook_accelerate.config.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from notebook_accelerate.hardware import detect

# This file was written by `accelerate config` of version 1.15.
FROM_ACCELERATE = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_use_dynamic: true
enable_cpu_affinity: false
fp8_config:
  amax_history_length: 16
  backend: TE
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap: A,B
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: no
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: false
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def _cluster(**values: Any) -> ClusterConfig:
    required: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": "no",
        "use_cpu": False,
        "debug": False,
    }
    return ClusterConfig(**{**required, **values})


def test_a_file_from_accelerate_loads(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FROM_ACCELERATE)
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert config.distributed_type is DistributedType.FSDP
    assert config.mixed_precision == "no"  # YAML reads a bare no as False.
    assert config.downcast_bf16 is False
    assert config.num_processes == 4


def test_a_file_becomes_the_variables_of_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FROM_ACCELERATE)
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert config.to_environment() == {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
        "ACCELERATE_FP8_BACKEND": "TE",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
    }


def test_the_settings_of_deepspeed_become_its_variables() -> None:
    config = _cluster(deepspeed_config={"zero_stage": 3, "gradient_clipping": 1.0, "zero3_init_flag": True})
    assert config.to_environment() == {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    }


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_a_written_file_reads_back_equal(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"config.{kind}"
    config = _cluster(num_processes=2, mixed_precision="bf16", gpu_ids="0,1", fsdp_config={"fsdp_version": 1})
    getattr(config, f"to_{kind}_file")(path)
    assert load_config_from_file(path) == config
    assert getattr(ClusterConfig, f"from_{kind}_file")(path) == config
    assert "dynamo_config" not in (yaml.safe_load(path.read_text()))


def test_sagemaker_has_a_separate_class(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=SageMakerDistributedType.DATA_PARALLEL,
        mixed_precision="fp16",
        use_cpu=False,
        debug=False,
        ec2_instance_type="ml.p3.2xlarge",
        iam_role_name="role",
    )
    config.to_yaml_file(path)
    assert load_config_from_file(path) == config


def test_files_from_before_mixed_precision_load(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"fp16": True, "dynamo_backend": "EAGER", "num_processes": 2}))
    config = load_config_from_file(path)
    assert config.mixed_precision == "fp16"
    assert config.dynamo_config == {"dynamo_backend": "EAGER"}
    assert config.distributed_type is DistributedType.NO


def test_unknown_and_missing_keys_and_values_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("num_proceses: 2\n")
    with pytest.raises(ValueError, match=r"config\.yaml has unknown keys: num_proceses; known: .*num_processes"):
        load_config_from_file(path)
    path.write_text("mixed_precision: fp61\n")
    with pytest.raises(ValueError, match="'fp61' is not allowed; pass one of 'no', 'fp8', 'fp16', 'bf16'"):
        load_config_from_file(path)
    path.write_text("compute_environment: AMAZON_SAGEMAKER\nprofile: a\n")
    with pytest.raises(ValueError, match="has no ec2_instance_type and no iam_role_name; add: ec2_ins"):
        load_config_from_file(path)
    with pytest.raises(FileNotFoundError, match="write_basic_config"):
        load_config_from_file(tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("just some text\n", r"config\.yaml contains text instead of settings; write lines such as num_processes: 2"),
        ("- num_processes\n", r"config\.yaml contains a list instead of settings"),
        ("a: [1\nb: 2\n", r"config\.yaml, line 2, column 2: this is not YAML: expected ',' or '\]'"),
        ("num_processes: two\n", r"config\.yaml: num_processes: 'two' is not allowed; write a whole number"),
        ("fsdp_config: yes please\n", r"config\.yaml: fsdp_config: 'yes please' is not allowed; write its settings on"),
        ("1: 2\n", r"config\.yaml has unknown keys: 1"),
        ("\udcff\udcfe", r"config\.yaml is not a text file in UTF-8"),
    ],
)
def test_a_file_that_is_no_configuration_is_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    for load in (load_config_from_file, LaunchConfig.from_file, ClusterConfig.from_yaml_file):
        with pytest.raises(ValueError, match=message):
            load(path)
    assert main(["launch", "--config_file", str(path), "script.py"]) == 2


def test_numbers_in_quotes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: '2'\ndistributed_type: MULTI_CPU\nmain_process_port: '1234'\n")
    config = LaunchConfig.from_file(path)
    assert (config.num_processes, config.use_port) == (2, "1234")


def test_the_default_location_follows_hf_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert config_file.cache_folder() == tmp_path / "accelerate"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert config_file.cache_folder() == tmp_path / "cache" / "huggingface" / "accelerate"


def test_the_basic_configuration_fits_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "config.yaml"
    assert write_basic_config("bf16", str(path)) == path
    config = load_config_from_file(path)
    hardware = detect()
    assert isinstance(config, ClusterConfig)
    assert config.num_processes == max(hardware.count, 1)
    assert config.use_cpu == (hardware.accelerator == "cpu")
    assert config.mixed_precision == "bf16"
    assert write_basic_config("no", str(path)) is False
    assert "was not changed" in capsys.readouterr().out
    assert load_config_from_file(path).mixed_precision == "bf16"


def test_the_basic_configuration_is_json_if_its_name_says_so(tmp_path: Path) -> None:
    path = write_basic_config(save_location=str(tmp_path / "config.json"))
    assert path
    assert json.loads(path.read_text())["mixed_precision"] == "no"


def test_the_arguments_of_the_basic_configuration_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`mixed_precision` should be one of no, fp8, fp16, bf16; received 'fp61'"):
        write_basic_config("fp61", str(tmp_path / "config.yaml"))
    with pytest.warns(FutureWarning, match="use_xpu is deprecated"):
        write_basic_config(save_location=str(tmp_path / "config.yaml"), use_xpu=True)
