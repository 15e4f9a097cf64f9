"""The arguments that `prepare` accepts, and its results."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import data, loader, logged, model, optimizer, parts, warned

CALLS = [
    "Accelerator().prepare()",
    "Accelerator().prepare(None)",
    "Accelerator().prepare(None, None)",
    "Accelerator().prepare([1, 2])",
    "Accelerator().prepare([1, 2], {'a': 1}, 'text', 3)",
    "Accelerator().prepare(print) is print",
    "Accelerator().prepare(nn.Linear) is nn.Linear",
    "Accelerator().prepare(data()) is not None",
    "type(Accelerator().prepare(loader())).__name__",
    "type(Accelerator().prepare(optimizer())).__name__",
    "type(Accelerator().prepare(model())).__name__",
    "Accelerator().prepare(model(), device_placement=[True])",
    "Accelerator().prepare(model(), device_placement=[True, False])",
    "Accelerator().prepare(model(), device_placement=[None])",
    "type(Accelerator().prepare_optimizer(optimizer())).__name__",
    "type(Accelerator().prepare_data_loader(loader())).__name__",
    "type(Accelerator().prepare_model(model())).__name__",
    "type(Accelerator().prepare_model(model(), evaluation_mode=True)).__name__",
    "len(Accelerator().prepare(loader()))",
]


class CustomScheduler:
    """A scheduler that does not follow torch's protocol."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


class Processor:
    def __call__(self, text: str) -> str:
        return text


class MovingAverage:
    """An exponential moving average of parameters, like those of training libraries."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [each.detach().clone() for each in parameters]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def step(self, parameters: Any) -> None:
        self.shadow = [each.detach().clone() for each in parameters]


def unknown_objects_come_back() -> Any:
    given = [[1], Processor(), MovingAverage(model().parameters()), CustomScheduler(optimizer()), object(), (1, 2)]
    prepared = Accelerator().prepare(*given)
    return [a is b for a, b in zip(given, prepared, strict=True)], type(prepared)


def unknown_objects_among_known_ones() -> Any:
    net, opt, batches, _ = parts()
    prepared = Accelerator().prepare(net, "tokenizer", opt, [batches], batches)
    return [type(each).__name__ for each in prepared]


def prepare_after_reset_of_the_state() -> Any:
    accelerator = Accelerator()
    AcceleratorState._reset_state(True)
    return [type(each).__name__ for each in accelerator.prepare(model(), loader())]


def warning_of_prepare_after_reset() -> Any:
    accelerator = Accelerator()
    AcceleratorState._reset_state()
    return warned(lambda: accelerator.prepare(model()))[0]


def train_after_reset_of_the_state() -> Any:
    accelerator = Accelerator()
    AcceleratorState._reset_state()
    net, opt, batches, _ = parts()
    net, opt, batches = accelerator.prepare(net, opt, batches)
    for inputs, targets in batches:
        accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
        opt.step()
        opt.zero_grad()
    return dict(net.named_parameters())


def reset_states_have_no_values() -> Any:
    Accelerator()
    AcceleratorState._reset_state(True)
    return [AcceleratorState._shared_state, PartialState._shared_state, AcceleratorState().initialized]


def gradient_state_after_reset() -> Any:
    accelerator = Accelerator()
    GradientState._reset_state()
    return [accelerator.gradient_state.initialized, GradientState._shared_state]


def prepare_twice() -> Any:
    accelerator = Accelerator()
    net, opt, batches, _ = parts()
    once = accelerator.prepare(net, opt, batches)
    twice = accelerator.prepare(*once)
    return [a is b for a, b in zip(once, twice, strict=True)], len(accelerator._models), len(accelerator._optimizers)


def prepare_scheduler_without_its_protocol() -> Any:
    accelerator = Accelerator()
    net, opt, _, _ = parts()
    scheduler = CustomScheduler(opt)
    net, opt, prepared = accelerator.prepare(net, opt, scheduler)
    return prepared is scheduler, len(accelerator._schedulers)


def prepare_a_plateau_scheduler() -> Any:
    accelerator = Accelerator()
    net, opt, _, _ = parts()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
    net, opt, scheduler = accelerator.prepare(net, opt, scheduler)
    rates = []
    for loss in (1.0, 2.0, 3.0, 4.0):
        scheduler.step(loss)
        rates.append(opt.param_groups[0]["lr"])
    return rates, type(scheduler)


@program(ranks=2)
def the_device_of_two_ranks_on_the_cpu() -> Any:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(model())
    return str(accelerator.device), next(net.parameters()).device == accelerator.device


@program(ranks=2)
def a_model_compiled_by_hand_on_two_ranks() -> Any:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(torch.compile(model(), backend="eager"))
    return [type(accelerator.unwrap_model(net, keep_torch_compile=keep)).__name__ for keep in (True, False)]


@program(ranks=2)
def a_plateau_on_two_ranks() -> Any:
    accelerator = Accelerator()
    net = model()
    opt = optimizer(net)
    plateau = accelerator.prepare(net, opt, torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1))[2]
    rates = []
    for _ in range(5):
        plateau.step(1.0)
        rates.append(opt.param_groups[0]["lr"])
    return rates


def prepare_scheduler_alone() -> Any:
    accelerator = Accelerator()
    _, opt, _, scheduler = parts()
    prepared = accelerator.prepare(scheduler)
    prepared.step()
    return type(prepared), prepared.get_last_lr(), scheduler.last_epoch


def names_of_the_prepared() -> Any:
    accelerator = Accelerator()
    accelerator.prepare(*parts())
    return [len(getattr(accelerator, f"_{name}")) for name in ("models", "optimizers", "schedulers", "dataloaders")]


def free_memory_returns_as_many_nones() -> Any:
    accelerator = Accelerator()
    prepared = accelerator.prepare(*parts())
    return accelerator.free_memory(*prepared), accelerator._models, accelerator.step


def clear_returns_as_many_nones() -> Any:
    accelerator = Accelerator()
    prepared = accelerator.prepare(*parts())
    return accelerator.clear(*prepared), accelerator._dataloaders


@program(ranks=2)
def unknown_objects_on_two_ranks() -> Any:
    given = [[1], Processor(), object()]
    prepared = Accelerator().prepare(*given)
    return [a is b for a, b in zip(given, prepared, strict=True)]


@program(ranks=2)
def two_ranks_train() -> Any:
    accelerator = Accelerator()
    net, opt, batches, schedule = accelerator.prepare(*parts())
    losses = []
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(net(inputs), targets)
        accelerator.backward(loss)
        opt.step()
        schedule.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, accelerator.get_state_dict(net), schedule.get_last_lr()


@program(ranks=2)
def join_uneven_inputs_warns_with_an_iterable() -> Any:
    class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.arange(6.0).view(6, 1))

    accelerator = Accelerator()
    net, batches = accelerator.prepare(nn.Linear(1, 1), DataLoader(Numbers(), batch_size=1))

    def enter() -> None:
        with accelerator.join_uneven_inputs([net], even_batches=False):
            pass

    return warned(enter)[0], warned(enter)[0]


@program(ranks=2)
def join_uneven_inputs_sets_even_batches() -> Any:
    accelerator = Accelerator()
    net, batches = accelerator.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1))
    with accelerator.join_uneven_inputs([net], even_batches=False):
        inside = batches.batch_sampler.even_batches
        count = sum(1 for _ in batches)
    return inside, count, batches.batch_sampler.even_batches


def join_uneven_inputs_of_one_process_warns() -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(nn.Linear(1, 1))

    def enter() -> None:
        with accelerator.join_uneven_inputs([net], even_batches=False):
            pass

    return warned(enter)[0], warned(enter)[0]


def prepared_mark() -> Any:
    prepared = Accelerator().prepare(*parts())
    return [getattr(each, "_is_accelerate_prepared", None) for each in prepared]


def log_levels_of_preparing() -> Any:
    return logged(lambda: Accelerator().prepare(*parts()))


def warnings_are_none() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Accelerator().prepare(*parts())
    return [each.category for each in caught]
