"""The functions of `accelerate.utils` that need no Accelerator."""

from __future__ import annotations

import argparse
import collections
import inspect
import os
from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import torch
from accelerate import utils
from accelerate.utils import (
    dataclasses as accelerate_dataclasses,
    environment,
    imports,
    modeling,
    operations,
    other,
    versions,
)
from torch import nn

from tests.parity.behaviour.programs._parts import files, logged, model, raised, warned, with_variables as _with

Point = namedtuple("Point", "x y")  # noqa: PYI024 - the kind that users have
ones = torch.ones
HALF = {"a": ones(2, dtype=torch.float16), "b": [ones(1, dtype=torch.bfloat16), 1], "c": ones(1)}
_CONSTANTS = """
SCALER_NAME MODEL_NAME SAFE_MODEL_NAME RNG_STATE_NAME OPTIMIZER_NAME SCHEDULER_NAME SAMPLER_NAME
PROFILE_PATTERN_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME
SAFE_WEIGHTS_PATTERN_NAME SAFE_WEIGHTS_INDEX_NAME SAGEMAKER_PYTORCH_VERSION SAGEMAKER_PYTHON_VERSION
SAGEMAKER_TRANSFORMERS_VERSION SAGEMAKER_PARALLEL_EC2_INSTANCES FSDP_SHARDING_STRATEGY FSDP_AUTO_WRAP_POLICY
FSDP_BACKWARD_PREFETCH FSDP_STATE_DICT_TYPE FSDP2_STATE_DICT_TYPE FSDP_PYTORCH_VERSION FSDP2_PYTORCH_VERSION
DTENSOR_PYTORCH_VERSION FSDP_MODEL_NAME DEEPSPEED_MULTINODE_LAUNCHERS TORCH_DYNAMO_MODES
ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION XPU_PROFILING_AVAILABLE_PYTORCH_VERSION
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION STR_OPERATION_TO_FUNC TORCH_LAUNCH_PARAMS
CUDA_DISTRIBUTED_TYPES TORCH_DISTRIBUTED_OPERATION_TYPES SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
"""
_ENUMS = """
DDPCommunicationHookType DistributedType SageMakerDistributedType FP8BackendType ComputeEnvironment LoggerType PrecisionType RNGType CustomDtype
"""
STATES = {"a": ones(2, 3), "b": ones(4), "c": torch.zeros(10)}

CALLS = [
    # Sizes.
    "utils.convert_file_size_to_int(5)",
    "utils.convert_file_size_to_int(1.5)",
    "utils.convert_file_size_to_int(2.0e9)",
    "utils.convert_file_size_to_int('5GB')",
    "utils.convert_file_size_to_int('1.5GB')",
    "utils.convert_file_size_to_int('5GiB')",
    "utils.convert_file_size_to_int('5MiB')",
    "utils.convert_file_size_to_int('5MB')",
    "utils.convert_file_size_to_int('5KiB')",
    "utils.convert_file_size_to_int('5KB')",
    "utils.convert_file_size_to_int('5gb')",
    "utils.convert_file_size_to_int('5 GB')",
    "utils.convert_file_size_to_int('800Mb')",
    "utils.convert_file_size_to_int('5')",
    "utils.convert_file_size_to_int('5TB')",
    "utils.convert_file_size_to_int('GB')",
    "utils.convert_file_size_to_int('-1GB')",
    "utils.convert_file_size_to_int(-1)",
    "utils.convert_file_size_to_int(None)",
    "utils.convert_bytes(0)",
    "utils.convert_bytes(1024)",
    "utils.convert_bytes(1536.5)",
    "utils.convert_bytes(5 * 1024**3)",
    "utils.convert_bytes(-5)",
    "utils.convert_bytes(10**15)",
    "utils.dtype_byte_size(torch.float32)",
    "[utils.dtype_byte_size(each) for each in (torch.bool, torch.bfloat16, torch.int8, torch.float64, torch.float8_e4m3fn)]",
    "[utils.dtype_byte_size(each) for each in utils.CustomDtype]",
    "utils.dtype_byte_size(torch.complex64)",
    "utils.dtype_byte_size('int8')",
    "{device: int(size) for device, size in utils.get_max_memory({0: 1.5e9, 'cpu': 2.0}).items()}",
    "utils.get_max_memory({0: '1GB', 'cpu': '2GB'})",
    "utils.get_max_memory({'cpu': 100, 0: 5, 'disk': 7})",
    "utils.get_max_memory({'disk': '7GB'})",
    "utils.get_max_memory({1: '1GB', 0: '2GB'})",
    "utils.get_max_memory({'cuda:0': 5})",
    "utils.get_max_memory({'nonsense': 5})",
    "utils.get_max_memory({-1: 5})",
    "list(utils.get_max_memory())",
    "utils.get_max_memory({})",
    # Structures.
    "utils.is_namedtuple(Point(1, 2))",
    "utils.is_namedtuple((1, 2))",
    "utils.honor_type(Point(1, 2), [3, 4])",
    "utils.honor_type([1], (x for x in (1, 2)))",
    "utils.honor_type((1,), [2, 3])",
    "utils.is_torch_tensor(ones(1))",
    "utils.is_torch_tensor(np.ones(1))",
    "utils.listify(ones(2, 2))",
    "utils.listify({'a': ones(2), 'b': [ones(1), 'text']})",
    "utils.listify('text')",
    "utils.find_batch_size(ones(3, 2))",
    "utils.find_batch_size({'a': [ones(4, 1)], 'b': 1})",
    "utils.find_batch_size([1, ones(2, 2)])",
    "utils.find_batch_size([])",
    "utils.find_batch_size('text')",
    "utils.find_batch_size(torch.tensor(1.0))",
    "utils.find_batch_size(np.ones(3))",
    "utils.ignorant_find_batch_size('text')",
    "utils.ignorant_find_batch_size({'a': ones(4)})",
    "utils.ignorant_find_batch_size([1, 2])",
    "utils.find_device({'a': [1, ones(1)]})",
    "utils.find_device([1, 'text'])",
    "utils.find_device(None)",
    "utils.get_data_structure({'a': ones(2, 3), 'b': [ones(1, dtype=torch.int64)]})",
    "utils.get_data_structure('text')",
    "utils.initialize_tensors(utils.get_data_structure({'a': ones(2, 3)}))['a'].shape",
    "utils.is_tensor_information(utils.get_data_structure(ones(2)))",
    "utils.is_tensor_information(ones(2))",
    "utils.TensorInformation(torch.Size([1]), torch.float32)",
    "utils.slice_tensors({'a': ones(4, 2), 'b': [torch.arange(4)]}, slice(1, 3))",
    "utils.slice_tensors([ones(4)], slice(1, 3), process_index=0, num_processes=2)",
    "utils.slice_tensors('text', slice(0, 1))",
    "utils.slice_tensors([1, ones(3)], slice(0, 1))",
    "utils.concatenate([ones(1), ones(2)])",
    "utils.concatenate([ones(1, 2), ones(1, 2)], dim=1)",
    "utils.concatenate([{'a': ones(1)}, {'a': ones(2)}])",
    "utils.concatenate([(ones(1), ones(2)), (ones(1), ones(2))])",
    "utils.concatenate([Point(ones(1), ones(2)), Point(ones(1), ones(2))])",
    "utils.concatenate(['x'])",
    "utils.concatenate([['x']])",
    "utils.concatenate([{'a': 1}])",
    "utils.concatenate([ones(2)])",
    "utils.concatenate([1])",
    "utils.concatenate(['x', 'y'])",
    "utils.concatenate([1, 2])",
    "utils.concatenate([])",
    "utils.convert_to_fp32(HALF)",
    "utils.convert_to_fp32('text')",
    "utils.convert_to_fp32(Point(ones(1, dtype=torch.float16), 1))",
    "utils.convert_outputs_to_fp32(lambda x: HALF)(1)",
    "utils.convert_outputs_to_fp32(len)([1, 2])",
    "type(operations.ConvertOutputsToFp32(model().forward)).__name__",
    "operations.ConvertOutputsToFp32(model().forward).__wrapped__.__name__",
    "utils.recursively_apply(lambda t: t + 1, {'a': ones(1), 'b': [1, 'x']})",
    "utils.recursively_apply(lambda t: t + 1, {'a': 1}, error_on_other_type=True)",
    "utils.recursively_apply(lambda t, y: t + y, (ones(1),), 5)",
    "utils.recursively_apply(lambda t: t * 2, [1, 2, 'x'], test_type=lambda t: isinstance(t, int))",
    "utils.recursively_apply(lambda t: t, UserDict(a=ones(1)))",
    "utils.recursively_apply(lambda t: t + 1, OrderedDict(a=ones(1)))",
    "utils.recursively_apply(lambda t: t + 1, collections.defaultdict(list, a=ones(1)))",
    "utils.send_to_device({'a': ones(1), 'b': 1}, 'cpu')",
    "utils.send_to_device(Point(ones(1), 'x'), torch.device('cpu'))",
    "utils.send_to_device({'a': ones(1), 'b': ones(1)}, 'meta', skip_keys='a')",
    "utils.send_to_device({'a': ones(1), 'b': [ones(1)]}, 'meta', skip_keys=['b'])",
    "utils.send_to_device([1, None, 'x', {2}], 'cpu')",
    "utils.send_to_device(ones(1), 'nonsense')",
    "utils.send_to_device(ones(1), 'cpu', non_blocking=True)",
    "utils.send_to_device(model(), 'cpu')",
    "utils.send_to_device(OrderedDict(a=ones(1)), 'cpu')",
    "utils.send_to_device(ones(1).to_sparse(), 'cpu')",
    "utils.send_to_device(nn.utils.rnn.pack_sequence([ones(2), ones(1)]), 'cpu')",
    "utils.copy_tensor_to_devices(ones(2))",
    "utils.pad_input_tensors(ones(3, 2), 3, 2)",
    "utils.pad_input_tensors(ones(4, 2), 4, 2)",
    "utils.pad_input_tensors({'a': ones(3)}, 3, 4)",
    "utils.pad_input_tensors([1, ones(3, 1)], 3, 2, dim=0)",
    "utils.pad_input_tensors('x', 3, 2)",
    "utils.merge_dicts({'a': {'x': 1}}, {'a': {'y': 2}, 'b': 3})",
    "utils.merge_dicts({'a': 1}, {'a': {'y': 2}})",
    "utils.get_pretty_name(model)",
    "utils.get_pretty_name(model())",
    "utils.get_pretty_name(nn.Linear)",
    "utils.get_pretty_name('x')",
    "utils.recursive_getattr(model(), 'first.weight').shape",
    "utils.recursive_getattr(model(), 'first.absent')",
    "[type(each) for each in utils.get_module_children_bottom_up(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU())))]",
    "[name for name, _ in utils.get_module_children_bottom_up(nn.Sequential(nn.Linear(1, 1)), return_fqns=True)]",
    "utils.has_compiled_regions(model())",
    "utils.model_has_dtensor(model())",
    "bool(utils.is_peft_model(model()))",
    "utils.has_4bit_bnb_layers(model())",
    "utils.has_ao_layers(model())",
    "utils.has_transformer_engine_layers(model())",
    "utils.has_offloaded_params(model())",
    "utils.get_model_tp_size(model())",
    # Environment.
    "[utils.str_to_bool(each) for each in ('y', 'YES', 't', 'True', 'on', '1', 'n', 'no', 'f', 'false', 'off', '0')]",
    "utils.str_to_bool('maybe')",
    "utils.str_to_bool('')",
    "utils.str_to_bool('2')",
    "utils.str_to_bool('None')",
    "utils.parse_flag_from_env('ABSENT')",
    "utils.parse_flag_from_env('ABSENT', True)",
    "_with({'FLAG': '1'}, lambda: utils.parse_flag_from_env('FLAG'))",
    "_with({'FLAG': 'maybe'}, lambda: utils.parse_flag_from_env('FLAG'))",
    "_with({'FLAG': ''}, lambda: utils.parse_flag_from_env('FLAG'))",
    "_with({'CHOICE': 'bf16'}, lambda: utils.parse_choice_from_env('CHOICE'))",
    "utils.parse_choice_from_env('ABSENT')",
    "utils.parse_choice_from_env('ABSENT', 'x')",
    "_with({'A': '-1', 'B': '3'}, lambda: utils.get_int_from_env(['A', 'B'], 7))",
    "_with({'A': 'x'}, lambda: utils.get_int_from_env(['A'], 7))",
    "utils.get_int_from_env(['ABSENT'], 7)",
    "utils.get_int_from_env('ABSENT', 7)",
    "utils.convert_dict_to_env_variables({'A': 1, 'B': 'x y'})",
    "utils.convert_dict_to_env_variables({'A': 'x;rm', 'B': 'x\\ny'})",
    "utils.are_libraries_initialized('torch', 'numpy', 'absent')",
    "sorted(inspect.signature(utils.get_cpu_distributed_information).parameters)",
    "sorted(vars(utils.get_cpu_distributed_information()))",
    "_with({'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '2'}, utils.get_cpu_distributed_information)",
    "utils.check_os_kernel()",
    "utils.is_port_in_use(9)",
    "_patched()",
    "_patched_restores()",
    "_cleared()",
    "_purged()",
    "utils.get_gpu_info()",
    "utils.check_cuda_p2p_ib_support()",
    "utils.check_cuda_fp8_capability()",
    "utils.get_current_device_type()",
    "environment.override_numa_affinity(0)",
    "raised(lambda: utils.set_numa_affinity(0))",
    # Versions.
    "utils.compare_versions('torch', '>=', '1.0')",
    "utils.compare_versions('torch', '<', '1.0')",
    "utils.compare_versions('absent-package', '>=', '1.0')",
    "utils.compare_versions('torch', '=>', '1.0')",
    "utils.is_torch_version('>=', '2.0')",
    "utils.is_torch_version('==', '2.0')",
    "utils.is_torch_version('!', '2.0')",
    "versions.compare_versions('numpy', '!=', '0.0')",
    "utils.tqdm([1, 2], disable=True) is not None",
    "list(utils.tqdm([1, 2], main_process_only=True, disable=True))",
    "warned(lambda: list(utils.tqdm(True, [1, 2], disable=True)))",
    "list(utils.tqdm())",
    # Seeds.
    "_seeded(5)",
    "_seeded(5, device_specific=True)",
    "_seeded(5, deterministic=True)",
    "utils.set_seed('x')",
    "utils.set_seed(-1)",
    "utils.set_seed(2**40)",
    # Tied parameters and names.
    "utils.find_tied_parameters(model())",
    "sorted(utils.find_tied_parameters(_tied()))",
    "utils.check_tied_parameters_in_config(model())",
    "utils.check_tied_parameters_on_same_device([['a', 'b']], {'a': 0, 'b': 1})",
    "logged(lambda: utils.check_tied_parameters_on_same_device([['a', 'b']], {'a': 0, 'b': 1}))",
    "_cleaned(lambda t: {'a': t, 'b': t})",
    "_cleaned(lambda t: {'b': t, 'a': t[:1], 'c': t.clone()})",
    "_cleaned(lambda t: {'a': ones(2, 2).t(), 'b': 1})",
    "utils.id_tensor_storage(t := ones(2)) == utils.id_tensor_storage(t[1:])",
    "len(utils.id_tensor_storage(ones(2)))",
    # Legacy functions.
    "utils.shard_checkpoint(STATES, max_shard_size=50)",
    "utils.shard_checkpoint(STATES)",
    "utils.shard_checkpoint(STATES, max_shard_size=1, weights_name='w.bin')",
    "utils.extract_submodules_state_dict({'a.b': 1, 'c.d': 2, 'a': 3}, ['a'])",
    # State of checkpoint files.
    "_saved({'a': ones(2)}, 'x.bin')",
    "_saved({'a': ones(2)}, 'x.safetensors', safe_serialization=True)",
    "_saved([1, 2], 'x.bin')",
    "_saved([1, 2], 'x.bin', safe_serialization=True)",
    "_saved({'a': ones(2)}, Path('x.bin'), save_on_each_node=True)",
    "_saved({'a': ones(2)}, 'absent/x.bin')",
    "_loaded()",
    "utils.save_offload_index({}, '.')",
    "utils.offload_state_dict('off', {'a': ones(2, dtype=torch.bfloat16), 'b': torch.tensor(1.0)}), files('off')",
    "utils.offload_weight(ones(2, 2), 'w', '.'), files()",
    "utils.offload_weight(ones(2, dtype=torch.bfloat16), 'w', '.', index={})",
    "utils.offload_weight(torch.tensor(3), 'w', '.', index={})",
    "_offloaded(ones(2, 2))",
    "_offloaded(torch.tensor(2.5))",
    "_offloaded(ones(3, dtype=torch.bfloat16))",
    "_offloaded(ones(0, 3))",
    "_offloaded(torch.tensor([True, False]))",
    "utils.OffloadedWeightsLoader()",
    "utils.OffloadedWeightsLoader(state_dict={'a': ones(1)})['a']",
    "list(utils.OffloadedWeightsLoader(state_dict={'a': ones(1)}))",
    "utils.OffloadedWeightsLoader(state_dict={'a': ones(1)})['b']",
    "_dataset_of_offloaded()",
    "dict(utils.PrefixedDataset({'a.x': 1, 'a.y': 2, 'b.z': 3}, 'a.'))",
    "utils.PrefixedDataset({'a.x': 1, 'b.y': 2}, 'a.')['x']",
    "[len(each := utils.PrefixedDataset({'a.x': 1, 'b.y': 2}, 'a.')), list(each)]",
    "raised(lambda: utils.PrefixedDataset({'a.x': 1}, 'a.')['y'])",
    "utils.write_basic_config(save_location='config.yml'), Path('config.yml').read_text()",
    "utils.write_basic_config('bf16', 'config.json'), files()",
    "utils.write_basic_config('nonsense', 'config.json')",
    "utils.write_basic_config(save_location='config.json'), utils.write_basic_config(save_location='config.json')",
    "_constants()",
    "_members()",
    "'MULTI_TPU' in accelerate_dataclasses.DistributedType.__members__",
    "_availability()",
    "utils.is_bf16_available(True)",
    "utils.is_torch_xla_available(check_is_tpu=True)",
    "utils.is_torch_xla_available(True, True)",
    "utils.is_cuda_available()",
    "utils.is_xpu_available(check_device=True)",
    "utils.is_npu_available(check_device=True)",
    "imports.is_ccl_available()",
    "utils.install_xla.__name__",
    "utils.release_memory(1, 2, 3)",
    "utils.release_memory()",
    "utils.wait_for_everyone()",
    "utils.check_device_map(model(), {'': 0})",
    "utils.check_device_map(model(), {'first': 0})",
    "utils.check_device_map(model(), {})",
    "accelerate.big_modeling.check_device_map(model(), {'first': 0, 'norm': 0, 'second': 'cpu'})",
    "accelerate.is_rich_available()",
    "operations.is_torch_tensor(None)",
    "other.get_pretty_name(1)",
    "modeling.named_module_tensors.__name__",
    "sorted(field for field in accelerate_dataclasses.DataLoaderConfiguration.__dataclass_fields__)",
    "argparse.Namespace(x=1)",
    "accelerate.__version__.split('.')[:1] is not None",
]


def _patched() -> Any:
    with utils.patch_environment(first=1, SECOND="x"):
        return os.environ["FIRST"], os.environ["SECOND"]


def _patched_restores() -> Any:
    os.environ["FIRST"] = "before"
    try:
        with utils.patch_environment(first=1):
            raise ValueError
    except ValueError:
        pass
    return os.environ["FIRST"]


def _cleared() -> Any:
    os.environ["FIRST"] = "before"
    with utils.clear_environment():
        inside = dict(os.environ)
        os.environ["SECOND"] = "x"
    return inside, os.environ["FIRST"], "SECOND" in os.environ


def _purged() -> Any:
    os.environ["ACCELERATE_SECOND"] = "before"

    @utils.purge_accelerate_environment
    def change() -> None:
        os.environ["ACCELERATE_FIRST"] = "x"
        os.environ["ACCELERATE_SECOND"] = "x"
        os.environ["OTHER"] = "x"

    change()
    return {name: os.environ.get(name) for name in ("ACCELERATE_FIRST", "ACCELERATE_SECOND", "OTHER")}


def _seeded(*args: Any, **settings: Any) -> Any:
    import random

    accelerate.Accelerator()
    utils.set_seed(*args, **settings)
    return random.random(), np.random.rand(), torch.rand(2), torch.are_deterministic_algorithms_enabled()  # noqa: NPY002


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    net[1][1].weight = net[0].weight
    net[1][0].bias = net[0].bias
    return net


def _cleaned(make: Any) -> Any:
    accelerate.Accelerator()
    return utils.clean_state_dict_for_safetensors(make(ones(2)))


def _saved(value: Any, name: Any, **settings: Any) -> Any:
    utils.save(value, name, **settings)
    return files()


def _loaded() -> Any:
    torch.save({"a": ones(2)}, "x.bin")
    torch.save(np.ones(2), "numpy.bin")
    return utils.load("x.bin"), utils.load("x.bin", map_location="cpu"), raised(lambda: utils.load("numpy.bin"))


def _offloaded(weight: torch.Tensor) -> Any:
    index = utils.offload_weight(weight, "w", ".", index={})
    utils.save_offload_index(index, ".")
    return index, utils.load_offloaded_weight("w.dat", index["w"]), sorted(files())


def _dataset_of_offloaded() -> Any:
    utils.offload_state_dict("off", {"a": ones(2), "b": torch.zeros(1)})
    loader = utils.OffloadedWeightsLoader(state_dict={"c": ones(1)}, save_folder="off")
    return len(loader), list(loader), loader["a"], loader["c"]


def _constants() -> Any:
    from accelerate.utils import constants

    return {name: getattr(constants, name) for name in _CONSTANTS.split()}


def _members() -> Any:
    kinds = [getattr(accelerate_dataclasses, name) for name in _ENUMS.split()]
    return {
        kind.__name__: sorted([each.name, each.value] for each in kind if each.name != "MULTI_TPU") for kind in kinds
    }


def _availability() -> Any:
    names = (
        "bnb",
        "boto3",
        "clearml",
        "comet_ml",
        "datasets",
        "deepspeed",
        "fp16",
        "fp8",
        "lomo",
        "megatron_lm",
        "mlflow",
    )
    names += (
        "mps",
        "msamp",
        "pandas",
        "peft",
        "pippy",
        "pynvml",
        "pytest",
        "rich",
        "sagemaker",
        "schedulefree",
        "timm",
    )
    names += ("tensorboard", "torchao", "torchdata", "torchdata_stateful_dataloader", "torchvision", "transformers")
    names += ("transformer_engine", "triton", "wandb", "weights_only", "xccl", "4bit_bnb", "8bit_bnb", "aim", "trackio")
    names += ("bitsandbytes_multi_backend", "dvclive", "hpu", "import_timer", "matplotlib")
    return {name: raised(lambda name=name: bool(getattr(imports, f"is_{name}_available")())) for name in names}


def batch_size_is_searched() -> Any:
    seen = []

    @utils.find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, more: str) -> str:
        seen.append(batch_size)
        if batch_size > 3:
            raise RuntimeError("CUDA out of memory.")
        return more

    return train("x"), seen


def batch_size_of_zero() -> Any:
    @utils.find_executable_batch_size(starting_batch_size=0)
    def train(batch_size: int) -> int:
        return batch_size

    return raised(train)


def batch_size_search_ends() -> Any:
    @utils.find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        raise RuntimeError("CUDA out of memory.")

    return raised(train)


def batch_size_search_passes_other_errors() -> Any:
    @utils.find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        raise ValueError("other")

    return raised(train)


def batch_size_given_by_the_caller() -> Any:
    @utils.find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, first: int, second: int) -> int:
        return batch_size

    return raised(lambda: train(128, 1, 2)), train(1, 2)


def batch_size_search_is_repeated() -> Any:
    seen = []

    @utils.find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        seen.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")

    train()
    train()
    return seen


def batch_size_reduced_by_a_function() -> Any:
    seen = []
    sizes = iter([8, 5, 2])

    def reduce_batch_size() -> int:
        return next(sizes)

    @utils.find_executable_batch_size(starting_batch_size=9, reduce_batch_size_fn=reduce_batch_size)
    def train(batch_size: int) -> None:
        seen.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")

    train()
    return seen


def batch_size_from_120() -> Any:
    seen = []

    @utils.find_executable_batch_size
    def train(batch_size: int) -> None:
        seen.append(batch_size)
        if batch_size > 60:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    train()
    return seen


def batch_size_of_a_function_without_arguments() -> Any:
    @utils.find_executable_batch_size(starting_batch_size=4)
    def train() -> None: ...

    return raised(train)


def the_errors_of_memory() -> Any:
    texts = ["CUDA out of memory.", "XPU out of memory.", "out of memory", "CUDNN_STATUS_NOT_SUPPORTED.", "other"]
    texts += ["DefaultCPUAllocator: can't allocate memory", "HPU out of memory", "Out of memory"]
    from accelerate.utils.memory import should_reduce_batch_size

    found = [should_reduce_batch_size(RuntimeError(text)) for text in texts]
    return found, should_reduce_batch_size(ValueError(texts[0]))


def a_device_from_the_environment() -> Any:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu:64"
    return str(accelerate.Accelerator().device)


def a_meta_device_from_the_environment() -> Any:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "meta"
    return str(accelerate.PartialState().device)


def rng_states_of_an_unknown_kind() -> Any:
    return raised(lambda: utils.synchronize_rng_states(["nonsense"]))


def rng_states_of_one_process() -> Any:
    accelerate.Accelerator()
    generator = torch.Generator().manual_seed(3)
    utils.synchronize_rng_states(["torch", "generator"], generator)
    utils.synchronize_rng_state(utils.RNGType.TORCH)
    return generator.initial_seed()
