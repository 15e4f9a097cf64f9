"""The training step: methods of `Accelerator`, LocalSGD, logging and inference."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

import torch
from accelerate import Accelerator, PartialState, debug_launcher, notebook_launcher, utils
from accelerate.inference import generate_device_map, prepare_pippy
from accelerate.local_sgd import LocalSGD
from accelerate.logging import MultiProcessAdapter, get_logger
from accelerate.optimizer import AcceleratedOptimizer, move_to_device
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, ThreadLocalSharedDict, do_nothing, is_initialized
from accelerate.utils import GradientAccumulationPlugin
from torch import nn

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import (
    data,
    loader,
    local_sgd,
    model,
    optimizer,
    parts,
    raised,
    train,
    warned,
    with_variables as _with,
)

INPUTS = torch.arange(6.0).view(2, 3)

CALLS = [
    "Accelerator().clip_grad_norm_(model().parameters(), 1.0)",
    "_clipped('clip_grad_norm_', 0.5)",
    "_clipped('clip_grad_norm_', 0.5, norm_type=1)",
    "_clipped('clip_grad_norm_', 0.5, norm_type=float('inf'))",
    "_clipped('clip_grad_value_', 0.01)",
    "_clipped('clip_grad_norm_', 0.5, 2, 3, 4)",
    "Accelerator().clip_grad_norm_([], 1.0)",
    "Accelerator().unscale_gradients()",
    "Accelerator().unscale_gradients(5)",
    "Accelerator().unscale_gradients(_optimizer())",
    "Accelerator().backward(torch.ones(1, requires_grad=True).sum())",
    "Accelerator().backward(torch.ones(2, requires_grad=True))",
    "Accelerator().backward(torch.ones(1))",
    "Accelerator().backward(torch.ones(1, requires_grad=True).sum(), retain_graph=True)",
    "Accelerator().backward(1.0)",
    "Accelerator().backward(None)",
    "raised(lambda: Accelerator().lomo_backward(torch.ones(1), 0.1))",
    "Accelerator().no_sync(model()).__enter__()",
    "Accelerator().no_sync(None).__enter__()",
    "Accelerator().trigger_sync_in_backward(model())",
    "Accelerator.trigger_sync_in_backward(5)",
    "Accelerator().accumulate().__enter__()",
    "Accelerator().accumulate(model(), model()).__enter__()",
    "Accelerator().free_memory()",
    "Accelerator().free_memory(1, [2])",
    "Accelerator().clear(1)",
    "Accelerator().clear()",
    "Accelerator().maybe_context_parallel().__enter__()",
    "Accelerator().maybe_context_parallel(buffers=[torch.ones(2, 2)], buffer_seq_dims=[1]).__enter__()",
    "Accelerator().autocast().__enter__()",
    "Accelerator().verify_device_map(model())",
    "Accelerator().unwrap_model(model()).extra()",
    "Accelerator().get_state_dict(model())",
    "list(Accelerator().get_state_dict(model(), unwrap=False))",
    "Accelerator().get_state_dict(5)",
    "type(Accelerator().prepare_scheduler(parts()[3])).__name__",
    "Accelerator().prepare_optimizer(5)",
    "Accelerator().prepare_model(5)",
    "Accelerator().prepare_scheduler(5)",
    "type(Accelerator().prepare_data_loader(loader(), device_placement=False, slice_fn_for_dispatch=None)).__name__",
    "Accelerator().set_trigger(), Accelerator().check_trigger()",
    "Accelerator().register_for_checkpointing()",
    "Accelerator().register_for_checkpointing(5)",
    "Accelerator().register_for_checkpointing(model(), 'x')",
    "Accelerator().skip_first_batches(loader(), 2).dataset.__class__.__name__",
    "len(list(Accelerator().skip_first_batches(loader(), 2)))",
    "len(list(Accelerator().skip_first_batches(Accelerator().prepare(loader()), num_batches=4)))",
    "Accelerator().deepspeed_ulysses_dl_adapter(loader(), model())",
    "Accelerator().optimizer_step_was_skipped",
    "Accelerator().save(5, 'x.pt'), os.listdir()",
    "Accelerator().local_main_process_first().__enter__()",
    "Accelerator().main_process_first().__enter__()",
    # Optimizers and schedulers.
    "type(_optimizer()).__name__",
    "AcceleratedOptimizer(optimizer()).optimizer.__class__ if Accelerator() else None",
    "_optimizer().step_was_skipped",
    "_optimizer().train()",
    "_optimizer().eval()",
    "move_to_device({'a': torch.ones(1)}, 'meta')",
    "move_to_device([torch.ones(1), 'x'], torch.device('meta'))",
    "_scheduler().get_last_lr()",
    "raised(lambda: _scheduler().get_lr())",
    "raised(lambda: _scheduler().print_lr(False, 0, 0.1))",
    "_scheduler(step_with_optimizer=False).step()",
    "_stepped(split_batches=True)",
    "_stepped(step_with_optimizer=False)",
    "_stepped()",
    "sorted(_scheduler().state_dict())",
    # State.
    "is_initialized()",
    "PartialState().initialized, is_initialized()",
    "do_nothing(1, a=2)",
    "str(PartialState().default_device)",
    "PartialState().set_device()",
    "PartialState().destroy_process_group()",
    "AcceleratorState().initialized if Accelerator() else None",
    "Accelerator().state.destroy_process_group()",
    "[getattr(Accelerator().state, name) for name in ('deepspeed_plugin', 'is_fsdp2')]",
    "raised(lambda: Accelerator().state.get_deepspeed_plugin('x'))",
    "raised(lambda: Accelerator().state.select_deepspeed_plugin('x'))",
    "ThreadLocalSharedDict().__class__.__name__",
    "GradientState().active_dataloader, GradientState().dataloader_references, GradientState().sync_with_dataloader",
    "GradientState().plugin_kwargs",
    "GradientState(GradientAccumulationPlugin(num_steps=3)).plugin_kwargs",
    "repr(GradientState())",
    # Logging.
    "type(get_logger('x')).__name__",
    "get_logger('x').name, get_logger('x', log_level='DEBUG').logger.level",
    "get_logger('x', 'nonsense')",
    "get_logger('x', log_level='debug').logger.level, logging.getLogger().level",
    "_with({'ACCELERATE_LOG_LEVEL': 'ERROR'}, lambda: get_logger('y').logger.level)",
    "get_logger('x').info('before the state')",
    "_messages()",
    "_messages(main_process_only=False)",
    "_messages(main_process_only=False, in_order=True)",
    "_once()",
    "MultiProcessAdapter(logging.getLogger('x'), {}).isEnabledFor(logging.ERROR)",
    "MultiProcessAdapter._should_log(True) if Accelerator() else None",
    # Inference.
    "inspect.signature(prepare_pippy)",
    "raised(lambda: prepare_pippy(model()))",
    "generate_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_processes=2)",
    "generate_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_processes=1)",
    # Launchers.
    "notebook_launcher(_nothing, num_processes=1)",
    "notebook_launcher(_nothing, (1,), num_processes=1, mixed_precision='bf16')",
    "notebook_launcher(_nothing, num_processes=1, mixed_precision='nonsense')",
    "inspect.signature(notebook_launcher).parameters['master_addr'].default",
    "list(inspect.signature(notebook_launcher).parameters)[:10]",
    "list(inspect.signature(debug_launcher).parameters)",
    "utils.PrepareForLaunch(_nothing).__class__.__name__",
    # Local SGD.
    "_local(1)",
    "_local(3)",
    "_local(3, enabled=False)",
    "LocalSGD(Accelerator(), model(), 0)",
]
CALLS_ON_TWO_RANKS = [
    "_clipped('clip_grad_norm_', 0.5)",
    "_messages()",
    "_messages(main_process_only=False)",
    "_messages(main_process_only=False, in_order=True)",
    "_local(1)",
    "_local(3)",
    "_local(3, enabled=False)",
    "_stepped()",
    "_stepped(split_batches=True)",
    "_accumulated()",
    "_accumulated(sync_each_batch=True)",
    "_accumulated(sync_with_dataloader=False)",
    "_accumulated(adjust_scheduler=False)",
    "_synchronised()",
    "MultiProcessAdapter._should_log(True), MultiProcessAdapter._should_log(False)",
    "Accelerator().should_save_model",
    "Accelerator().unwrap_model(Accelerator().prepare(model())).extra()",
    "Accelerator().trigger_sync_in_backward(Accelerator().prepare(model()))",
]


def _nothing(*args: Any) -> Any:
    return None


def _optimizer() -> Any:
    return Accelerator().prepare(optimizer())


def _scheduler(**settings: Any) -> AcceleratedScheduler:
    opt = optimizer()
    Accelerator()
    return AcceleratedScheduler(
        torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5), AcceleratedOptimizer(opt), **settings
    )


def _stepped(**settings: Any) -> Any:
    schedule = _scheduler(**settings)
    rates = []
    for _ in range(3):
        schedule.optimizers[0].step()
        schedule.step()
        rates += schedule.get_last_lr()
    return rates


def _clipped(method: str, *args: Any, **settings: Any) -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(model())
    accelerator.backward(net(INPUTS).square().sum())
    found = getattr(accelerator, method)(net.parameters(), *args, **settings)
    return found, [each.grad for each in net.parameters()]


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append([record.levelname, record.getMessage(), record.funcName])


def _kept(name: str) -> tuple[Any, _Kept]:
    logger, kept = get_logger(name, log_level="DEBUG"), _Kept()
    logger.logger.handlers = [kept]
    return logger, kept


def _messages(**settings: Any) -> Any:
    accelerator = Accelerator()
    logger, kept = _kept(f"messages {sorted(settings)}")
    logger.info("rank %s", accelerator.process_index, **settings)
    logger.warning("text", **settings)
    logger.log(logging.DEBUG, "debug", **settings)
    try:
        raise ValueError("x")
    except ValueError:
        logger.exception("failed", **settings)
    return kept.messages


def _once() -> Any:
    Accelerator()
    logger, kept = _kept("once")
    for _ in range(3):
        logger.warning_once("only once")
    logger.warning_once("another")
    return [message[:2] for message in kept.messages]


def _local(steps: int, **settings: Any) -> Any:
    accelerator = Accelerator()
    net, opt, batches = accelerator.prepare(model(), optimizer(), loader())
    return local_sgd(accelerator, net, opt, batches, steps=steps, **settings)


def _accumulated(**settings: Any) -> Any:
    plugin = GradientAccumulationPlugin(num_steps=2, **settings)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    net, opt, batches, schedule = accelerator.prepare(*_parts())
    losses, rates = [], []
    for inputs, targets in batches:
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(inputs), targets)
            accelerator.backward(loss)
            opt.step()
            schedule.step()
            opt.zero_grad()
        losses.append([loss.item(), accelerator.sync_gradients])
        rates += schedule.get_last_lr()
    return losses, rates, accelerator.get_state_dict(net)


def _parts() -> Any:
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, opt, loader(), torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)


def _synchronised() -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(nn.Linear(3, 1))
    with torch.no_grad():
        for each in net.parameters():
            each.fill_(1.0)
    found = []
    inputs = INPUTS * (1 + accelerator.process_index)
    with accelerator.no_sync(net):
        accelerator.backward(net(inputs).sum())
        found.append([each.grad.clone() for each in net.parameters()])
    accelerator.backward(net(inputs).sum())
    found.append([each.grad.clone() for each in net.parameters()])
    return found


def accumulation_in_one_process() -> Any:
    return [_accumulated(), _accumulated(sync_with_dataloader=False), _accumulated(sync_each_batch=True)]


def accumulation_with_clipping() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    net, opt, batches, _ = accelerator.prepare(*_parts())
    norms = []
    for inputs, targets in batches:
        with accelerator.accumulate(net):
            accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(net.parameters(), 0.1))
            opt.step()
            opt.zero_grad()
    return norms, net.state_dict()


def accumulation_steps_changed_while_training() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    net, opt, batches, _ = accelerator.prepare(*_parts())
    synced = []
    for at, (inputs, _) in enumerate(batches):
        if at == 2:
            accelerator.gradient_accumulation_steps = 3
        with accelerator.accumulate(net):
            accelerator.backward(net(inputs).sum())
            opt.step()
            opt.zero_grad()
        synced.append(accelerator.sync_gradients)
    return synced, accelerator.gradient_accumulation_steps


def accumulation_over_several_models() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = accelerator.prepare(model(), model(3))
    synced = []
    for _ in range(4):
        with accelerator.accumulate(first, second):
            accelerator.backward(first(INPUTS).sum() + second(INPUTS).sum())
        synced.append(accelerator.sync_gradients)
    return synced, first.first.weight.grad


def accumulation_of_an_unknown_length() -> Any:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(data(5))

    accelerator = Accelerator(gradient_accumulation_steps=3)
    net, batches = accelerator.prepare(model(), torch.utils.data.DataLoader(Stream(), batch_size=1))
    net.eval()
    synced = []
    for inputs, _ in batches:
        with accelerator.accumulate(net):
            net(inputs)
        synced.append([accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader])
    return synced


def manual_accumulation() -> Any:
    accelerator = Accelerator()
    net, opt, batches, _ = accelerator.prepare(*_parts())
    for at, (inputs, targets) in enumerate(batches):
        loss = nn.functional.mse_loss(net(inputs), targets) / 2
        accelerator.backward(loss)
        if (at + 1) % 2 == 0 or at == len(batches) - 1:
            opt.step()
            opt.zero_grad()
    return net.state_dict()


@program(ranks=2)
def manual_accumulation_without_synchronisation() -> Any:
    accelerator = Accelerator()
    net, opt, batches, _ = accelerator.prepare(*_parts())
    for at, (inputs, targets) in enumerate(batches):
        last = at % 2 == 1 or at == len(batches) - 1
        context = accelerator.no_sync if not last else lambda _: torch.enable_grad()
        with context(net):
            accelerator.backward(nn.functional.mse_loss(net(inputs), targets) / 2)
        if last:
            opt.step()
            opt.zero_grad()
    return accelerator.get_state_dict(net)


@program(ranks=2)
def two_ranks_early_stop_by_a_trigger() -> Any:
    accelerator = Accelerator()
    net, opt, batches, _ = accelerator.prepare(*_parts())
    steps = 0
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(net(inputs), targets)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        steps += 1
        if steps == 2 and accelerator.is_last_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return steps


@program(ranks=2)
def backward_without_synchronisation_then_triggered() -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(nn.Linear(3, 1))
    with accelerator.no_sync(net):
        first = net(INPUTS * (1 + accelerator.process_index)).sum()
        second = net(INPUTS).sum()
        accelerator.backward(first)
        accelerator.trigger_sync_in_backward(net)
        accelerator.backward(second)
    return [each.grad for each in net.parameters()]


@program(ranks=2)
def evaluation_with_metrics() -> Any:
    accelerator = Accelerator()
    net, batches = accelerator.prepare(model(), loader(7))
    net.eval()
    found = []
    for inputs, targets in batches:
        with torch.no_grad():
            outputs = net(inputs)
        found.append(accelerator.gather_for_metrics((outputs, targets)))
    return found


def free_memory_after_training() -> Any:
    accelerator = Accelerator()
    prepared = accelerator.prepare(*parts())
    train(accelerator, *prepared)
    net, opt, batches, schedule = accelerator.free_memory(*prepared)
    return net, opt, batches, schedule, accelerator.step, len(accelerator._optimizers)


def deferred_functions() -> Any:
    accelerator = Accelerator()
    seen: list[str] = []

    @accelerator.on_main_process
    def first(text: str) -> str:
        seen.append(text)
        return text

    @accelerator.on_local_main_process
    def second(text: str) -> None:
        seen.append(text)

    @accelerator.on_process(process_index=0)
    def third() -> None:
        seen.append("third")

    first("a")
    second("b")
    third()
    return seen


def loggers_before_the_state() -> Any:
    logger = get_logger("early")
    return raised(lambda: logger.info("x")), raised(lambda: logger.info("x", main_process_only=False)), is_initialized()


def mixed_precision_training() -> Any:
    accelerator = Accelerator(mixed_precision="bf16")
    net, opt, batches, schedule = accelerator.prepare(*_parts())
    losses = train(accelerator, net, opt, batches, schedule)
    return losses, net.state_dict(), net(INPUTS).dtype


def fp16_on_a_cpu() -> Any:
    return raised(lambda: Accelerator(mixed_precision="fp16").scaler), warned(
        lambda: raised(lambda: Accelerator(mixed_precision="fp16"))
    )[0]


def shared_states_reset() -> Any:
    Accelerator(gradient_accumulation_steps=3)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator().gradient_accumulation_steps, PartialState().initialized


@program(ranks=2)
def batches_of_one_rank() -> Any:
    accelerator = Accelerator()
    with (
        accelerator.split_between_processes(["a", "b", "c"]) as mine,
        accelerator.split_between_processes([1, 2, 3], apply_padding=True) as padded,
    ):
        return utils.gather_object(mine), padded


@program(ranks=2)
def pipelines() -> Any:
    return (
        raised(
            lambda: prepare_pippy(
                nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), split_points=["1"], example_args=(INPUTS,)
            )
        )
        is not None
    )
