"""Collectives and the process's state, on one process and on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, PartialState, utils
from accelerate.state import AcceleratorState, GradientState

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import logged, raised, warned

CALLS = [
    "Accelerator().reduce(torch.ones(2), reduction='max')",
    "Accelerator().reduce(torch.ones(2), reduction='mean')",
    "Accelerator().reduce(torch.ones(2), reduction='sum', scale=2.0)",
    "Accelerator().reduce({'a': [torch.ones(2)]}, reduction='none')",
    "Accelerator().gather({'a': torch.ones(2)})",
    "Accelerator().gather(torch.tensor(1.0))",
    "Accelerator().gather_for_metrics(['a', 1])",
    "Accelerator().gather_for_metrics(torch.ones(2), use_gather_object=True)",
    "Accelerator().pad_across_processes(torch.ones(2, 2), dim=1)",
    "utils.gather_object([1, 2])",
    "utils.gather_object('x')",
    "utils.broadcast([torch.ones(1)])",
    "utils.broadcast_object_list([1, 'x'])",
    "list(Accelerator().split_between_processes([1, 2, 3]).__enter__())",
    "PartialState().split_between_processes({'a': [1, 2], 'b': [3]}).__enter__()",
    "Accelerator().check_trigger()",
    "Accelerator().print('text')",
    "Accelerator().wait_for_everyone()",
    "[Accelerator().is_main_process, Accelerator().is_local_main_process, Accelerator().is_last_process]",
    "[Accelerator().num_processes, Accelerator().process_index, Accelerator().local_process_index]",
    "str(Accelerator().device), Accelerator().distributed_type, Accelerator().mixed_precision",
    "[Accelerator().use_distributed, Accelerator().split_batches, Accelerator().even_batches]",
    "[Accelerator().sync_gradients, Accelerator().gradient_accumulation_steps, Accelerator().optimizer_step_was_skipped]",
    "[Accelerator().use_seedable_sampler, Accelerator().non_blocking, Accelerator().use_stateful_dataloader]",
    "[Accelerator().project_dir, Accelerator().logging_dir, Accelerator().save_iteration]",
    "[Accelerator().is_fsdp2, Accelerator().is_composable_parallelism_enabled, Accelerator().multi_device]",
    "Accelerator().on_main_process(lambda: 1)()",
    "Accelerator().on_process(lambda: 1, process_index=0)()",
    "Accelerator().on_process(lambda: 1, process_index=1)()",
    "Accelerator().on_local_process(lambda: 1, local_process_index=0)()",
    "Accelerator().on_last_process(lambda: 1)()",
    "Accelerator().on_local_main_process(lambda: 1)()",
    "Accelerator(mixed_precision='nonsense')",
    "Accelerator(mixed_precision='BF16').mixed_precision",
    "Accelerator(rng_types=['nonsense'])",
    "Accelerator(log_with='nonsense')",
    "Accelerator(kwargs_handlers=[1])",
    "Accelerator(gradient_accumulation_steps=0)",
    "Accelerator(gradient_accumulation_steps='2').gradient_accumulation_steps",
    "Accelerator(cpu=True).device",
    "Accelerator(dynamo_backend='nonsense')",
    "Accelerator(dynamo_backend='eager').state.dynamo_plugin.backend",
    "Accelerator(split_batches=True)",
    "Accelerator(nonsense=True)",
    "Accelerator(step_scheduler_with_optimizer=False).step_scheduler_with_optimizer",
    "PartialState(cpu=True).initialized",
    "repr(PartialState())",
    "GradientState().sync_gradients, GradientState().num_steps, GradientState().in_dataloader, GradientState().remainder",
    "GradientState().end_of_dataloader, GradientState().adjust_scheduler, GradientState().is_xla_gradients_synced",
    "utils.DistributedType('NO'), utils.DistributedType.MULTI_CPU.value",
    "raised(lambda: utils.DistributedType('nonsense'))",
    "'fp16' in utils.PrecisionType, 'nonsense' in utils.PrecisionType, utils.PrecisionType.list()",
    "AcceleratorState(mixed_precision='nonsense', _from_accelerator=True)",
    "logged(lambda: Accelerator(cpu=True))",
    "warned(lambda: Accelerator(cpu=True))[0]",
]
CALLS_ON_TWO_RANKS = [
    "_reduced('sum')",
    "_reduced('mean')",
    "_reduced('max')",
    "_reduced('none')",
    "Accelerator().reduce({'a': [_mine(), 'x']}, 'max')",
    "utils.reduce(_mine(), 'max')",
    "utils.reduce(_mine(), reduction='mean', scale=3.0)",
    "Accelerator().gather(_mine())",
    "Accelerator().gather({'a': (_mine(), torch.tensor(1.0))})",
    "Accelerator().gather(_mine(dtype=torch.bool))",
    "Accelerator().gather('x')",
    "utils.gather_object([_rank()])",
    "utils.gather_object([{'rank': _rank()}, None])",
    "utils.gather_object(_mine())",
    "utils.gather_object({_rank()})",
    "utils.gather_object({'rank': _rank()})",
    "utils.gather_object('text')",
    "utils.gather_object(None)",
    "utils.broadcast(_mine(), from_process=1)",
    "utils.broadcast({'a': _mine()}, from_process=0)",
    "utils.broadcast_object_list([_rank(), 'x'], from_process=1)",
    "utils.pad_across_processes(torch.ones(2 + _rank(), 2))",
    "utils.pad_across_processes(torch.ones(2 + _rank(), 2), pad_index=-1, pad_first=True)",
    "utils.pad_across_processes(torch.ones(2, 2 + _rank()), dim=1)",
    "utils.pad_across_processes(torch.ones(2), dim=3)",
    "utils.pad_across_processes(torch.ones(2, 2 + _rank()), dim=-1)",
    "utils.pad_across_processes({'a': torch.ones(1 + _rank()), 'b': 'x'})",
    "warned(lambda: utils.pad_across_processes(_nested()).is_nested)",
    "Accelerator().pad_across_processes(torch.tensor(1.0))",
    "Accelerator().gather_for_metrics([_rank(), 'x'])",
    "Accelerator().gather_for_metrics(_mine())",
    "PartialState().split_between_processes([1, 2, 3]).__enter__()",
    "PartialState().split_between_processes([1, 2, 3], apply_padding=True).__enter__()",
    "PartialState().split_between_processes((1, 2, 3)).__enter__()",
    "PartialState().split_between_processes(torch.arange(5)).__enter__()",
    "PartialState().split_between_processes(torch.arange(5), apply_padding=True).__enter__()",
    "PartialState().split_between_processes({'a': [1, 2, 3], 'b': torch.arange(3)}).__enter__()",
    "PartialState().split_between_processes({'a': [1, 2, 3], 'b': [1]}).__enter__()",
    "PartialState().split_between_processes('text').__enter__()",
    "PartialState().split_between_processes([1]).__enter__()",
    "PartialState().split_between_processes([]).__enter__()",
    "PartialState().split_between_processes({1, 2}).__enter__()",
    "Accelerator().on_main_process(lambda: 1)()",
    "Accelerator().on_last_process(lambda: 1)()",
    "Accelerator().on_process(lambda: 1, process_index=1)()",
    "Accelerator().on_local_process(lambda: 1, local_process_index=1)()",
    "[Accelerator().is_main_process, Accelerator().is_last_process, Accelerator().process_index, Accelerator().num_processes]",
    "Accelerator().distributed_type, Accelerator().use_distributed, PartialState().backend",
    "utils.avg_losses_across_data_parallel_group.__name__",
]


def _rank() -> int:
    return PartialState().process_index


def _mine(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(3) + _rank() * torch.tensor([1, -1, 0])).to(dtype)


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2 + _rank())], layout=torch.jagged)


def _reduced(reduction: str) -> Any:
    accelerator = Accelerator()
    return accelerator.reduce(_mine(), reduction), utils.reduce(_mine(), reduction)


def reduce_with_an_unknown_reduction() -> Any:
    return raised(lambda: Accelerator().reduce(torch.ones(1), "nonsense"))


@program(ranks=2)
def triggers() -> Any:
    accelerator = Accelerator()
    found = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


@program(ranks=2)
def main_process_first() -> Any:
    accelerator = Accelerator()
    order = []
    with accelerator.main_process_first():
        order.append(accelerator.process_index)
    with accelerator.local_main_process_first():
        order.append(accelerator.process_index)
    return utils.gather_object(order)


@program(ranks=2)
def gather_for_metrics_drops_what_was_padded() -> Any:
    accelerator = Accelerator()
    batches = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(7), batch_size=2))
    found = [accelerator.gather_for_metrics(batch) for batch in batches]
    objects = [accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True) for batch in batches]
    return found, objects


def _of_the_last_batch(samples: int) -> Any:
    accelerator = Accelerator()
    for _ in accelerator.prepare(torch.utils.data.DataLoader(torch.arange(samples), batch_size=2)):
        if accelerator.gradient_state.end_of_dataloader:
            values = [_mine(), [_mine(), (_mine(),)], {"a": _mine()}, torch.ones(0), [1, 2, 3], (1, 2), [None], {1, 2}]
            values += [torch.tensor(1.0), {"a": torch.tensor(1.0)}, [_mine(), torch.tensor(1.0)], [_mine(), "x"]]
            found = [accelerator.gather_for_metrics(value) for value in values]
            objects = [accelerator.gather_for_metrics(value, use_gather_object=True) for value in (_mine(), [1, 2, 3])]
    return found, objects


def gather_for_metrics_keeps_what_cannot_be_cut() -> Any:
    values = [3, 2.5, None, {"a": 1}, {"a": _mine(), "b": "x"}, "text", frozenset([1]), torch.float32]
    accelerator = Accelerator()
    for _ in accelerator.prepare(torch.utils.data.DataLoader(torch.arange(5), batch_size=2)):
        found = [accelerator.gather_for_metrics(value) for value in values]
        objects = [accelerator.gather_for_metrics(value, use_gather_object=True) for value in values]
    return found, objects, _of_the_last_batch(5), _of_the_last_batch(4)


@program(ranks=2)
def gather_for_metrics_of_any_value() -> Any:
    return _of_the_last_batch(5), _of_the_last_batch(7), _of_the_last_batch(8)


@program(ranks=2)
def debug_mode_finds_other_shapes() -> Any:
    import os

    os.environ["ACCELERATE_DEBUG_MODE"] = "true"
    accelerator = Accelerator()
    return raised(lambda: accelerator.gather(torch.ones(1 + accelerator.process_index)))


@program(ranks=2)
def a_second_accelerator() -> Any:
    first = Accelerator()
    second = Accelerator()
    return first.state.__dict__ is second.state.__dict__, second.num_processes


def gradient_state_of_loaders() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    batches = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(7), batch_size=2))
    seen = []
    for _ in batches:
        with accelerator.accumulate():
            seen.append([accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader])
            seen.append([accelerator.gradient_state.remainder, accelerator.gradient_state.in_dataloader])
    return seen


def attributes_that_do_not_exist() -> Any:
    states = (PartialState(), Accelerator().state, GradientState(), Accelerator())
    return [raised(lambda each=each: each.absent) for each in states]
