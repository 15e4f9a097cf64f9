from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from notebook_accelerate.precision import Bf16Precision, Precision
from notebook_accelerate.strategies.fsdp.fsdp_units import checkpoint_activations, find_ignored_modules, find_units
from notebook_accelerate.strategies.module_queries import keep_ties, retie, tied_names
from notebook_accelerate.strategies.sharding.sharded_strategy import upcast_trained
from notebook_accelerate.utils import FullyShardedDataParallelPlugin


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleList([Block(), Block()]), nn.Linear(4, 1))


BLOCKS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def test_units_are_found_by_class() -> None:
    built = model()
    assert find_units(built, BLOCKS) == list(built[1])
    assert find_units(built, None) == []


def test_units_by_size_are_never_lists() -> None:
    built = model()
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20)
    assert find_units(built, policy) == [built[0], built[1][0].inner, built[1][1].inner]
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=30)
    assert find_units(built, policy) == []  # Only the list is large enough, but a list is never a unit.


def test_a_parameter_shared_by_two_units_stays_outside_of_them() -> None:
    built = model()
    built[1][1].inner.weight = built[1][0].inner.weight
    assert find_units(built, BLOCKS) == []
    assert tied_names(built) == [["1.0.inner.weight", "1.1.inner.weight"]]


def test_lost_ties_are_restored() -> None:
    built = model()
    built[1][1].inner.weight = built[1][0].inner.weight
    ties = tied_names(built)
    built.to("meta")
    assert tied_names(built) == []
    retie(built, ties)
    assert tied_names(built) == ties
    init = keep_ties(lambda module: module.to_empty(device="cpu", recurse=False), built)
    for module in built.modules():
        init(module)
    assert tied_names(built) == ties
    assert not any(parameter.is_meta for parameter in built.parameters())


def test_ignored_modules_are_found_by_name() -> None:
    built = model()
    assert find_ignored_modules(built, r"1\.\d") == list(built[1])
    assert find_ignored_modules(built, [built[0]]) == [built[0]]
    with pytest.raises(ValueError, match="ignored_modules='none' matches no module of Sequential"):
        find_ignored_modules(built, "none")


def test_checkpointed_units_compute_the_same() -> None:
    built = model()[1]
    inputs = torch.ones(2, 4)
    expected = built[1](built[0](inputs))
    names = list(built.state_dict())
    units = checkpoint_activations(built, list(built), offload=False)
    assert list(built) == units
    assert torch.equal(built[1](built[0](inputs)), expected)
    assert list(built.state_dict()) == names
    with pytest.warns(UserWarning, match="activation_checkpointing=True recomputes units"):
        assert checkpoint_activations(built, [], offload=False) == []


def test_low_precision_is_raised_if_it_is_trained() -> None:
    built = nn.Linear(2, 2).to(torch.bfloat16)
    built.bias.requires_grad_(False)
    assert not upcast_trained(built, Precision("cpu"))
    with pytest.warns(UserWarning, match="Linear has parameters of low precision: they are trained in float32"):
        assert upcast_trained(built, Bf16Precision("cpu"))
    assert (built.weight.dtype, built.bias.dtype) == (torch.float32, torch.bfloat16)
    assert not upcast_trained(built, Bf16Precision("cpu"))


class TestPlugin:
    def test_classes_that_the_model_lacks_are_reported(self) -> None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Block, Layer"
        )
        with pytest.raises(
            ValueError, match=r"names Layer, which Sequential does not have; its modules with children are Block"
        ):
            plugin.policy_for(model())

    def test_a_model_without_known_classes_is_one_unit(self) -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        built = model()
        with pytest.warns(UserWarning, match=r"names no class of Sequential, so the model is one unit"):
            policy = plugin.policy_for(built)
        assert list(find_units(built, policy)) == []

    def test_mixed_precision_can_be_given_by_name(self) -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy={"param_dtype": "bf16"})
        plugin.set_mixed_precision("fp16")
        assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
        plugin.set_mixed_precision("fp16", override=True)
        assert plugin.mixed_precision_policy.param_dtype == torch.float16
        # Older versions of torch have None if the types are equal.
        assert plugin.mixed_precision_policy.reduce_dtype in {torch.float16, None}
        with pytest.raises(ValueError, match=r"pass a torch\.distributed\.fsdp\.MixedPrecision,"):
            FullyShardedDataParallelPlugin(mixed_precision_policy=plugin.mixed_precision_policy)

    def test_options_of_the_other_version_are_refused_or_translated(self) -> None:
        with pytest.raises(ValueError, match="sharding_strategy='FULL_SHARD' belongs to FSDP 1"):
            FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy="FULL_SHARD")
        plugin = FullyShardedDataParallelPlugin(reshard_after_forward="shard_grad_op")
        assert plugin.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP

    def test_choices_become_objects_of_torch(self) -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
        plugin.set_cpu_offload()
        plugin.set_state_dict_type("full_state_dict")
        plugin.validate_cpu_offload()
        assert plugin.offloads
        assert plugin.state_dict_type.name == plugin.state_dict_kind == "FULL_STATE_DICT"
        plugin.set_auto_wrap_policy(model())
        assert plugin.auto_wrap_policy is None
