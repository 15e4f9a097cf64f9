"""Calls for which Accelerate logs a message or issues a warning; `condition_tables.py` lists all of them."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, big_modeling, utils
from accelerate.data_loader import prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from accelerate.tracking import GeneralTracker, register_tracker_class
from accelerate.utils import BnbQuantizationConfig, DeepSpeedPlugin, bnb, environment, modeling
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, IterableDataset

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import Net, loader, model, on_gpus, optimizer, raised, with_variables

CALLS = [
    f"_called(lambda: {call})"
    for call in (
        # Weights.
        "utils.save(_shared(), 'x.safetensors', safe_serialization=True)",
        "Accelerator().save_model(_tied(), 'out')",
        "Accelerator().save_model(model(), Path(__file__))",
        "_loaded_without_metadata()",
        "modeling.load_checkpoint_in_model(_untied(), _weights(_untied()))",
        "modeling.load_checkpoint_in_model(model(), _weights(nn.Sequential(nn.Linear(1, 1))))",
        "modeling.infer_auto_device_map(_untied())",
        "modeling.check_device_map(model(), {'': 'cpu', 'absent': 'cpu'})",
        "modeling.get_state_dict_offloaded_model(nn.Sequential(nn.Linear(1, 1, device='meta')))",
        "modeling.get_state_dict_offloaded_model(_without_buffers())",
        "modeling.infer_auto_device_map(model(), {0: 100, 'cpu': 10**6}, offload_buffers=False)",
        "big_modeling.cpu_offload(model()).to('cpu')",
        "_offloaded().to('cpu')",
        "_offloaded().cuda()",
        "modeling.get_max_memory({0: 10, 'cpu': 10})",
        "modeling.check_tied_parameters_on_same_device([['a', 'b']], {'a': 0, 'b': 1})",
        "bnb.replace_with_bnb_layers(nn.Sequential(nn.ReLU()), BnbQuantizationConfig(load_in_8bit=True))",
        "utils.load_and_quantize_model(model(), BnbQuantizationConfig(load_in_8bit=True))",
        # Settings.
        "Accelerator(log_with='comet_ml')",
        "Accelerator(log_with=['comet_ml', 'tensorboard'], project_dir='.')",
        "DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True)",
        "utils.TorchTensorParallelConfig(enable_async_tp=True)",
        "BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=5.0)",
        "environment.convert_dict_to_env_variables({'A': '1;2', 'B;': '3', 'C': '4'})",
        "importlib.import_module('accelerate.memory_utils')",
        "Accelerator(parallelism_config=ParallelismConfig(tp_handler=utils.TorchTensorParallelConfig()))",
        "Accelerator(torch_tp_plugin=utils.TorchTensorParallelPlugin(tp_size=1))",
        "utils.FP8RecipeKwargs(backend='AO')",
        "utils.FullyShardedDataParallelPlugin(fsdp_version=2, use_orig_params=True)",
        "utils.FullyShardedDataParallelPlugin(sync_module_states=False, cpu_ram_efficient_loading=True)",
        "_scheduled(train_samples=8, lr_warmup_samples=8)",
        "with_variables({'ACCELERATE_USE_MEGATRON_LM': 'true'}, _is_megatron_available)",
        "_on_kernel('5.4.0')",
        # Training.
        "[register_tracker_class(type('Other', (_Tracker,), {})) for _ in range(2)]",
        "_without_context_parallelism()",
        "_uneven_streams()",
        "_checkpoints(3, limit=2)",
        "Accelerator().clip_grad_norm_(model().parameters(), 1.0)",
        "Accelerator().prepare(loader(), optimizer())",
    )
]


CALLS_ON_TWO_RANKS = [
    "_split_on_a_mesh()",
    "_called(lambda: on_gpus(parallelism_config=ParallelismConfig(tp_handler=utils.TorchTensorParallelConfig())))",
    "_called(lambda: on_gpus(parallelism_config=ParallelismConfig(tp_size=2)).prepare(model(), optimizer()))",
    "_called(lambda: _uneven_streams(on_gpus(dataloader_config=_DISPATCHED)))",
]


def _called(call: Callable[[], Any]) -> None:
    """Call a function, whose messages are compared."""
    Accelerator()  # Accelerate's logger needs a state.
    raised(call)


def _shared() -> dict[str, torch.Tensor]:
    weight = torch.ones(2)
    return {"a": weight, "b": weight}


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    return net


class PreTrainedModel(Net):
    """Accelerate recognizes models of transformers by this name."""

    def get_output_embeddings(self) -> nn.Module:
        return self.second


def _untied() -> nn.Module:
    net: Any = PreTrainedModel()
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


def _uneven_streams(accelerator: Accelerator | None = None) -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from torch.arange(3)

    accelerator = accelerator or Accelerator()
    accelerator.prepare(DataLoader(Rows()))
    with accelerator.join_uneven_inputs([model()], even_batches=False):
        pass


def _offloaded() -> nn.Module:
    return big_modeling.dispatch_model(model(), {"first": "cpu", "norm": "cpu", "second": "disk"}, offload_dir="off")


_DISPATCHED = utils.DataLoaderConfiguration(dispatch_batches=True)


def _without_buffers() -> nn.Module:
    """Return an offloaded model whose buffers no hook loads."""
    net = big_modeling.cpu_offload(nn.Sequential(nn.BatchNorm1d(2)))
    net[0].running_mean = net[0].running_var = torch.empty(2, device="meta")
    return net


def _scheduled(**settings: int) -> None:
    plugin = utils.MegatronLMPlugin(**settings)
    plugin.megatron_lm_default_args["data_parallel_size"] = 1
    plugin.set_scheduler_args(utils.MegatronLMDummyScheduler(optimizer(), 10, 2))


def _is_megatron_available() -> None:
    Path("megatron").mkdir()
    sys.path.insert(0, ".")
    utils.is_megatron_lm_available()
    sys.path.remove(".")


def _on_kernel(release: str) -> None:
    uname = platform.uname
    platform.uname = lambda: uname()._replace(release=f"{release}-1-generic")
    utils.check_os_kernel()
    platform.uname = uname


class _Tracker(GeneralTracker):
    name = "twice"
    requires_logging_directory = False


def _split_on_a_mesh() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    batches = prepare_data_loader(
        loader(), num_processes=2, process_index=0, dispatch_batches=True, split_batches=True, put_on_device=True,
        torch_device_mesh=mesh, device=torch.device("cpu"),
    )  # fmt: skip
    return list(batches)


@program(ranks=2)
def threads_of_ranks() -> None:
    del os.environ["OMP_NUM_THREADS"]
    Accelerator()


def _checkpoints(count: int, limit: int) -> None:
    settings = utils.ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(project_config=settings)
    for _ in range(count):
        accelerator.save_state()
