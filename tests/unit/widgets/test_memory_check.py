"""Before a launch, the config panel warns if the training run does not fit in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accelerate import FullyShardedDataParallelPlugin as Fsdp
from notebook_accelerate.big_modeling import estimate_memory
from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.config.parallelism_config import ParallelismConfig as Degrees, TorchTensorParallelPlugin
from notebook_accelerate.hardware import HardwareInfo
from notebook_accelerate.launch import KernelFacts
from notebook_accelerate.widgets.config_panel import ConfigPanel, configure
from notebook_accelerate.widgets.memory_panel import MemoryCheck, distribution_of
from notebook_accelerate.widgets.training_options import TrainingOptions

WEIGHTS = 4 * 1000 * 1000
"""The size of the model in bytes. Training needs four times as much, and DDP's buckets as much as the model."""


def model() -> nn.Module:
    return nn.Linear(1000, 1000, bias=False)


def panel(memory_bytes: int, processes: int = 2, **values: Any) -> ConfigPanel:
    machine = HardwareInfo(
        accelerator="cpu", count=0, cpu_count=8, memory_bytes=memory_bytes, host="jupyter", loopback="lo"
    )
    config = LaunchConfig(num_processes=processes, cpu=True, block=False)
    return ConfigPanel(machine=machine, facts=lambda: KernelFacts(environment={}), config=config, model=model, **values)


def test_a_training_that_does_not_fit_has_a_warning_and_can_be_launched() -> None:
    made = panel(30_000_000)
    assert made.warning.startswith("This will not fit: training needs about ")
    assert "most of it for optimizer" in made.warning
    assert "for 2 on this machine" in made.warning
    assert made.warning in made.widget.texts["plan"]
    assert made.warning in made.html
    assert made.warning in made.text
    assert not made.errors
    assert made.widget.disabled == []


def test_a_training_that_fits_has_no_warning() -> None:
    assert panel(2 * 5 * WEIGHTS).warning == ""
    assert panel(2 * 5 * WEIGHTS - 1).warning
    assert panel(30_000_000, processes=1).warning == "", "half as many processes need half as much, and no buckets"
    assert configure().warning == "", "no model is known"


def test_the_warning_follows_the_options() -> None:
    made = panel(2 * 3 * WEIGHTS, memory={"optimizer": "sgd"})
    assert made.warning == ""
    made = panel(2 * 3 * WEIGHTS)
    assert made.warning
    made.change(fsdp_plugin=Fsdp())
    assert "This will not fit" not in made.warning
    with_inputs = panel(2 * 3 * WEIGHTS, memory={"optimizer": "sgd", "inputs": torch.zeros(10_000, 1000)})
    assert "most of it for activations" in with_inputs.warning


def test_a_model_that_raises_does_not_stop_the_panel() -> None:
    def broken() -> nn.Module:
        raise KeyError("width")

    made = ConfigPanel(
        config=LaunchConfig(num_processes=2, cpu=True, block=False),
        facts=lambda: KernelFacts(environment={}),
        model=broken,
    )
    assert "could not be estimated (KeyError: 'width')" in made.warning
    assert not made.errors


FSDP1: dict[str, Any] = {"fsdp_version": 1}


@pytest.mark.parametrize(
    ("options", "ranks", "expected"),
    [
        ({}, 1, {"strategy": "single"}),
        ({}, 4, {"strategy": "ddp"}),
        ({"fsdp_plugin": Fsdp(fsdp_version=2)}, 4, {"strategy": "fsdp"}),
        ({"fsdp_plugin": Fsdp(fsdp_version=2, reshard_after_forward=False)}, 4, {"strategy": "shard_grad_op"}),
        ({"fsdp_plugin": Fsdp(**FSDP1, sharding_strategy="SHARD_GRAD_OP")}, 4, {"strategy": "shard_grad_op"}),
        ({"fsdp_plugin": Fsdp(**FSDP1, sharding_strategy="NO_SHARD")}, 4, {"strategy": "ddp"}),
        ({"fsdp_plugin": Fsdp(**FSDP1, sharding_strategy="HYBRID_SHARD")}, 4,
         {"strategy": "fsdp", "degrees": {"dp_replicate": 2}}),
        ({"fsdp_plugin": Fsdp(**FSDP1, sharding_strategy="HYBRID_SHARD_ZERO2")}, 4,
         {"strategy": "shard_grad_op", "degrees": {"dp_replicate": 2}}),
        ({"fsdp_plugin": Fsdp(fsdp_version=2, cpu_offload=True)}, 4,
         {"strategy": "fsdp", "offload": {"weights": "cpu", "gradients": "cpu", "optimizer": "cpu"}}),
        ({"fsdp_plugin": Fsdp(fsdp_version=2), "parallelism_config": Degrees(dp_replicate_size=2, dp_shard_size=2)}, 4,
         {"strategy": "fsdp", "degrees": {"dp_replicate": 2, "dp_shard": 2}}),
        ({"parallelism_config": Degrees(dp_shard_size=2, cp_size=2)}, 4,
         {"strategy": "fsdp", "degrees": {"dp_shard": 2, "cp": 2}}),
        ({"parallelism_config": Degrees(ep_size=4)}, 4, {"strategy": "ep", "degrees": {"ep": 4}}),
        ({"parallelism_config": Degrees(dp_shard_size=2, ep_size=2)}, 4,
         {"strategy": "fsdp", "degrees": {"dp_shard": 2, "ep": 2}}),
        ({"parallelism_config": Degrees(tp_size=4)}, 4, {"strategy": "tp", "degrees": {"tp": 4}}),
        ({"parallelism_config": Degrees(pp_size=2, dp_replicate_size=2)}, 4,
         {"strategy": "pp", "degrees": {"dp_replicate": 2, "pp": 2}}),
        ({"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=4)}, 4, {"strategy": "tp", "degrees": {"tp": 4}}),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)}, 4, {"strategy": "zero3"}),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=0)}, 4, {"strategy": "ddp"}),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu")}, 4,
         {"strategy": "zero2", "offload": {"optimizer": "cpu", "gradients": "cpu"}}),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/t")},
         4, {"strategy": "zero3", "offload": {"weights": "disk"}}),
        ({"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3), "parallelism_config": Degrees(dp_shard_size=2, sp_size=2)},
         4, {"strategy": "zero3", "degrees": {"dp_shard": 2, "sp": 2}}),
        ({"megatron_lm_plugin": MegatronLMPlugin(tp_degree=2, pp_degree=2, use_distributed_optimizer=True)}, 8,
         {"strategy": "megatron_distributed_optimizer", "degrees": {"tp": 2, "pp": 2}}),
    ],
)  # fmt: skip
def test_the_distribution_of_the_model_follows_the_options(options: Any, ranks: int, expected: Any) -> None:
    sharing = distribution_of(TrainingOptions(**options), ranks, local=2)
    assert sharing == expected
    estimate_memory(model, num_processes=ranks, **sharing)  # estimate_memory must accept all of these names.


def test_offloaded_tensors_use_main_memory_that_ranks_share() -> None:
    offloaded = Fsdp(fsdp_version=2, cpu_offload=True)
    made = panel(2 * 3 * WEIGHTS - 1)
    made.change(fsdp_plugin=offloaded)
    assert "most of it for optimizer" in made.warning, (
        "each rank has half of four times the weights, and a whole copy for computing"
    )
    made = panel(2 * 3 * WEIGHTS)
    made.change(fsdp_plugin=offloaded)
    assert made.warning == ""


def test_on_gpus_offloaded_tensors_are_compared_with_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(memory_bytes=WEIGHTS)
    monkeypatch.setattr(
        "notebook_accelerate.widgets.memory_panel.nvml.visible_gpu", lambda _rank, _variables: gpu
    )  # This replaces NVML, because test machines have no GPUs.
    plan: Any = SimpleNamespace(accelerator="cuda", world_size=2, num_processes=2)
    machine: Any = SimpleNamespace(memory_bytes=4 * WEIGHTS)
    options = TrainingOptions(fsdp_plugin=Fsdp(fsdp_version=2, cpu_offload=True))
    assert MemoryCheck(model).warning(plan, options, machine) == "", (
        "each rank has half of four times the weights, in CPU memory"
    )
    assert "needs about 20.0 MB" in MemoryCheck(model).warning(plan, TrainingOptions(), machine)
    machine = SimpleNamespace(memory_bytes=4 * WEIGHTS - 1)
    assert "offloaded tensors need about" in MemoryCheck(model).warning(plan, options, machine)


def test_variables_of_the_launch_choose_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"0": WEIGHTS, "1": 100 * WEIGHTS}
    monkeypatch.setattr(
        "notebook_accelerate.widgets.memory_panel.nvml.visible_gpu",
        lambda _rank, variables: SimpleNamespace(memory_bytes=sizes[variables["CUDA_VISIBLE_DEVICES"]]),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    plan: Any = SimpleNamespace(accelerator="cuda", world_size=1, num_processes=1)
    machine: Any = SimpleNamespace(memory_bytes=1 << 40)
    check = MemoryCheck(model)
    assert "This will not fit" in check.warning(plan, TrainingOptions(), machine)
    assert check.warning(plan, TrainingOptions(), machine, {"CUDA_VISIBLE_DEVICES": "1"}) == ""
