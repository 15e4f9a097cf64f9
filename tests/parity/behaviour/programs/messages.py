"""Calls for which Accelerate logs a message or issues a warning. Other modules have further ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, big_modeling, utils
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import BnbQuantizationConfig, DeepSpeedPlugin, environment, modeling
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.parity.behaviour.programs._parts import loader, logged, model, optimizer, warned

CALLS = [
    f"_reported(lambda: {call})"
    for call in (
        # Weights.
        "utils.save(_shared(), 'x.safetensors', safe_serialization=True)",
        "Accelerator().save_model(_tied(), 'out')",
        "_loaded_without_metadata()",
        "modeling.load_checkpoint_in_model(_untied(), _weights(_untied()))",
        "modeling.load_checkpoint_in_model(model(), _weights(nn.Sequential(nn.Linear(1, 1))))",
        "modeling.infer_auto_device_map(_untied())",
        "modeling.check_device_map(model(), {'': 'cpu', 'absent': 'cpu'})",
        "modeling.get_state_dict_offloaded_model(nn.Sequential(nn.Linear(1, 1, device='meta')))",
        "modeling.infer_auto_device_map(model(), {0: 100, 'cpu': 10**6}, offload_buffers=False)",
        "big_modeling.cpu_offload(model()).to('cpu')",
        # Settings.
        "Accelerator(log_with='comet_ml')",
        "Accelerator(log_with=['comet_ml', 'tensorboard'], project_dir='.')",
        "DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True)",
        "utils.TorchTensorParallelConfig(enable_async_tp=True)",
        "BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=5.0)",
        "environment.convert_dict_to_env_variables({'A': '1;2', 'B;': '3', 'C': '4'})",
        "importlib.import_module('accelerate.memory_utils')",
        "ParallelismConfig(dp_shard_size=1, cp_size=1)",
        # Training.
        "_without_context_parallelism()",
        "_uneven_streams()",
        "_checkpoints(3, limit=2)",
        "Accelerator().clip_grad_norm_(model().parameters(), 1.0)",
        "Accelerator().prepare(loader(), optimizer())",
    )
]


def _reported(call: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Return the levels of the records that are logged during a call, and the categories of its warnings."""
    Accelerator()  # Accelerate's logger needs a state.
    kinds: list[str] = []

    def watched() -> None:
        # These are torch's, which are issued once per process.
        kinds.extend(kind for kind in warned(call)[0] if kind not in ("FutureWarning", "DeprecationWarning"))

    return logged(watched), kinds


def _shared() -> dict[str, torch.Tensor]:
    weight = torch.ones(2)
    return {"a": weight, "b": weight}


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    return net


def _untied() -> nn.Module:
    net: Any = model()
    net.config = SimpleNamespace(tie_word_embeddings=True, get_text_config=lambda **_: net.config)
    return net


def _weights(net: nn.Module) -> str:
    torch.save(net.state_dict(), "weights.bin")
    return "weights.bin"


def _loaded_without_metadata() -> Any:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, "x.safetensors")
    return modeling.load_state_dict("x.safetensors")


def _without_context_parallelism() -> None:
    with Accelerator().maybe_context_parallel(buffers=[torch.ones(2)], buffer_seq_dims=[0]):
        pass


def _uneven_streams() -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from torch.arange(3)

    accelerator = Accelerator()
    accelerator.prepare(DataLoader(Rows()))
    with accelerator.join_uneven_inputs([model()], even_batches=False):
        pass


def _checkpoints(count: int, limit: int) -> None:
    settings = utils.ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(project_config=settings)
    for _ in range(count):
        accelerator.save_state()
