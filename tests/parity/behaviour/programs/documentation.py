"""Accelerate's guides: each program is a situation from a sentence of the documentation, or one of its examples."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, PartialState, infer_auto_device_map, utils
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import GradientAccumulationPlugin, LoggerType, ProjectConfiguration, find_executable_batch_size
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import (
    Net,
    loader,
    local_sgd,
    model,
    optimizer,
    parts,
    raised,
    train,
    warned,
)

INPUTS = torch.arange(6.0).view(2, 3)


# ---- checkpointing


def checkpoint_with_a_registered_scheduler() -> Any:
    accelerator = Accelerator(project_config=ProjectConfiguration("here", automatic_checkpoint_naming=True))
    net, opt, batches, schedule = parts()
    net, opt, batches = accelerator.prepare(net, opt, batches)
    accelerator.register_for_checkpointing(schedule)
    accelerator.save_state()
    losses = [train(accelerator, net, opt, batches)]
    schedule.step()
    accelerator.load_state("here/checkpoints/checkpoint_0")
    return losses, schedule.last_epoch, schedule.get_last_lr(), train(accelerator, net, opt, batches)


def resuming_within_an_epoch() -> Any:
    accelerator = Accelerator()
    net, opt, batches = accelerator.prepare(model(), optimizer(), loader())
    losses = []
    for at, (inputs, targets) in enumerate(batches):
        if at == 2:
            accelerator.save_state("my_state")
        losses += train(accelerator, net, opt, [(inputs, targets)])
    accelerator.load_state("my_state")
    rest = accelerator.skip_first_batches(batches, 2)
    return losses, len(rest), [batch[1] for batch in rest], len(list(batches))


def states_with_a_relative_folder() -> Any:
    accelerator = Accelerator(project_dir="my/save/path")
    accelerator.prepare(*parts())
    first = str(accelerator.save_state("state"))
    return first, sorted(str(path) for path in Path.cwd().rglob("*.safetensors")), accelerator.project_dir


# ---- tracking


class Documented(GeneralTracker):
    """The guide's custom tracker, whose methods accept only the arguments that the guide lists."""

    name = "documented"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str) -> None:
        self.run_name, self.rows = run_name, []

    @property
    def tracker(self) -> Any:
        return self.rows

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.rows.append([values, step])


def _documented() -> Any:
    PartialState(cpu=True)
    accelerator = Accelerator(log_with=Documented("some_run_name"))
    accelerator.init_trackers("my_project", config={"num_iterations": 5, "learning_rate": 1e-2})
    accelerator.log({"train_loss": 1.12, "valid_loss": 0.8}, step=1)
    accelerator.log({"tensor": torch.tensor(2.0)})
    tracker = accelerator.get_tracker("documented")
    found = type(tracker).__name__, tracker.tracker if accelerator.is_main_process else None
    return found, accelerator.get_tracker("documented", unwrap=True) if accelerator.is_main_process else None


def tracker_of_the_guide() -> Any:
    return _documented()


@program(ranks=2)
def tracker_of_the_guide_on_two_ranks() -> Any:
    return _documented()


def trackers_mixed_with_all() -> Any:
    accelerator = Accelerator(log_with=[Documented("x"), "all"], project_dir="logs")
    names = [str(getattr(each, "name", each)) for each in accelerator.log_with]
    return "documented" in names, "tensorboard" in {name.lower() for name in names}


def trackers_by_name_and_member() -> Any:
    config = ProjectConfiguration(project_dir=".", logging_dir="another/directory")
    accelerator = Accelerator(log_with=["tensorboard", LoggerType.TENSORBOARD], project_config=config)
    accelerator.init_trackers("example_project", config={"num_iterations": 5, "loss_function": str(nn.MSELoss())})
    for step in range(3):
        accelerator.log({"training_loss": torch.tensor(float(step))}, step=step)
    count = len(accelerator.trackers)
    accelerator.end_training()
    return count, sorted(path.name for path in Path("another/directory").iterdir())


# ---- gradient accumulation and synchronization


class Line(nn.Module):
    """A model with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((1, 1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def _accumulated_line() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    numbers = torch.arange(1.0, 9.0)
    net = Line()
    batches = DataLoader(TensorDataset(numbers, 2 * numbers), batch_size=2)
    net, opt, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.02), batches)
    seen = []
    for inputs, labels in batches:
        with accelerator.accumulate(net):
            accelerator.backward(nn.functional.mse_loss(net(inputs.view(-1, 1)), labels.view(-1, 1)))
            opt.step()
            opt.zero_grad()
        seen.append([inputs, accelerator.sync_gradients])
    return seen, accelerator.unwrap_model(net).weight


def accumulation_equals_a_large_batch() -> Any:
    return _accumulated_line()


@program(ranks=2)
def accumulation_equals_a_large_batch_on_two_ranks() -> Any:
    return _accumulated_line()


def _tokens(rows: list[int]) -> Any:
    sequences = [torch.arange(1, row + 2, dtype=torch.float32) for row in rows]
    inputs = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-100)
    labels = torch.where(inputs < 0, -100, torch.remainder(inputs, 2))
    return {"inputs": inputs[..., None], "labels": labels}


def _variable_sizes() -> Any:
    """Accumulate gradients, divided by the number of tokens on all ranks, using DDP's own `no_sync`."""
    steps = 2
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    net = nn.Linear(1, 2, bias=False)
    nn.init.constant_(net.weight, 0.1)
    net, opt = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.08))
    rows: Any = list(range(2 * steps * accelerator.num_processes + 2))
    batches = accelerator.prepare_data_loader(DataLoader(rows, batch_size=2, collate_fn=_tokens), device_placement=True)
    iterator, rest = iter(batches), len(batches) % steps or steps
    updates, counts = math.ceil(len(batches) / steps), []
    for update in range(updates):
        samples = [next(iterator) for _ in range(steps if update < updates - 1 else rest)]
        number = sum(batch["labels"].ne(-100).sum() for batch in samples)
        counts.append(accelerator.gather(number).sum().item())
        for at, batch in enumerate(samples):
            alone = at < len(samples) - 1 and accelerator.num_processes > 1
            with net.no_sync() if alone else contextlib.nullcontext():
                outputs = net(batch["inputs"]).transpose(1, 2)
                loss = nn.functional.cross_entropy(outputs, batch["labels"].long(), reduction="sum")
                accelerator.backward(loss * steps * accelerator.num_processes / counts[-1])
        opt.step()
        opt.zero_grad()
    return counts, accelerator.unwrap_model(net).weight


def accumulation_of_variable_sizes() -> Any:
    return _variable_sizes()


@program(ranks=2)
def accumulation_of_variable_sizes_on_two_ranks() -> Any:
    return _variable_sizes()


@program(ranks=2)
def synchronisation_on_the_last_batch() -> Any:
    accelerator = Accelerator()
    net, batches, opt = accelerator.prepare(model(), loader(), optimizer())
    opt = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    for index, (inputs, targets) in enumerate(batches):
        last = index == len(batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(net):
            accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
        if last:
            opt.step()
    return accelerator.get_state_dict(net)


def accumulation_that_does_not_follow_the_loader() -> Any:
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    net, batches = accelerator.prepare(model(), loader())
    seen = []
    for _ in range(2):
        for _batch in batches:
            with accelerator.accumulate(net):
                seen.append(accelerator.sync_gradients)
    return seen


@program(ranks=2)
def local_sgd_with_accumulation() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    net, opt, batches, schedule = accelerator.prepare(net, opt, loader(24), schedule)
    weights = local_sgd(accelerator, net, opt, batches, steps=2, schedule=schedule, enabled=True)
    return weights, schedule.get_last_lr()


# ---- execution, inference, metrics


@program(ranks=2)
def early_stopping() -> Any:
    accelerator = Accelerator()
    net, batches = accelerator.prepare(model(), loader(12))
    done = 0
    for inputs, _ in batches:
        net(inputs)
        done += 1
        if accelerator.process_index == 1 and done == 2:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return done


@program(ranks=2)
def files_of_the_main_process_first() -> Any:
    accelerator = Accelerator()
    folder = Path("..") / "shared"
    with accelerator.main_process_first():
        found = (folder / "state").exists()
        if accelerator.is_main_process:
            folder.mkdir()
            torch.save(model().state_dict(), folder / "state")
    net = Net()
    with accelerator.main_process_first():
        net.load_state_dict(torch.load(folder / "state"))
    return found, net


@program(ranks=2)
def prompts_are_split_and_gathered() -> Any:
    state = PartialState(cpu=True)
    with state.split_between_processes(["a dog", "a cat", "a chicken"]) as prompts:
        plain = list(prompts)
    with state.split_between_processes(["a dog", "a cat", "a chicken"], apply_padding=True) as prompts:
        padded = list(prompts)
    with Accelerator().split_between_processes({"prompt": ["a", "b", "c"], "seed": torch.arange(3)}) as share:
        several = dict(share)
    with AcceleratorState().split_between_processes([1, 2, 3, 4, 5]) as numbers:
        mine = list(numbers)
    return plain, padded, several, mine, utils.gather_object(padded)[:3]


@program(ranks=2)
def prompts_are_split_where_no_device_is_named() -> Any:
    with PartialState().split_between_processes(["a dog", "a cat"]) as prompts:
        return prompts


@program(ranks=2)
def column_of_a_mapped_dataset() -> Any:
    accelerator = Accelerator()
    net = nn.Linear(3, 1)
    nn.init.constant_(net.weight, 1.0)
    batches, net = accelerator.prepare(DataLoader(torch.arange(27.0).view(9, 3), batch_size=2), net)
    with torch.no_grad():
        return torch.cat([accelerator.gather_for_metrics(net(batch)) for batch in batches]).cpu().numpy().shape


@program(ranks=2)
def predictions_of_other_sizes_are_padded() -> Any:
    accelerator = Accelerator()
    mine = torch.full((2, 2 + accelerator.process_index), float(accelerator.process_index))
    return accelerator.gather_for_metrics(accelerator.pad_across_processes(mine, dim=1, pad_index=-1))


@program(ranks=2)
def debug_mode_of_broadcast() -> Any:
    import os

    os.environ["ACCELERATE_DEBUG_MODE"] = "1"
    state = PartialState(cpu=True)
    shape = (1, 5) if state.process_index == 0 else (1, 2, 5)
    return raised(lambda: utils.broadcast(torch.zeros(shape)))


# ---- internal mechanisms


def what_prepare_returns() -> Any:
    accelerator = Accelerator()
    net, opt, batches, schedule = accelerator.prepare(*parts())
    dispatched = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)).prepare(loader())
    same = Accelerator().state.__dict__ == AcceleratorState().__dict__, GradientState() == accelerator.gradient_state
    kinds = [type(each).__name__ for each in (net, opt, batches, schedule, dispatched)]
    return kinds, isinstance(batches, DataLoaderShard), isinstance(dispatched, DataLoaderDispatcher), same


@program(ranks=2)
def random_numbers_stay_apart_and_orders_equal() -> Any:
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    batches = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2, shuffle=True))
    mine = torch.cat(list(batches))
    return sorted(accelerator.gather(mine).tolist())


class Sharded(IterableDataset[int]):
    """A dataset that splits its files by process when it is created, and by worker when it is read."""

    def __init__(self, files: int) -> None:
        state = PartialState()
        self.files = list(range(files))[state.process_index :: state.num_processes]

    def __iter__(self) -> Any:
        worker = get_worker_info()
        number, at = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for file in self.files[at::number]:
            yield from range(10 * file, 10 * file + 3)


@program(ranks=2)
def streams_that_shard_themselves() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    found = []
    for workers in (0, 2):
        batches = DataLoader(Sharded(4), batch_size=3, num_workers=workers)
        found.append([batch.tolist() for batch in batches])
    twice = accelerator.prepare(DataLoader(Sharded(4), batch_size=3))
    return found, type(twice.dataset).__name__, raised(lambda: len(twice))


@program(ranks=2)
def lengths_after_prepare() -> Any:
    found = []
    for split in (False, True):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        batches = accelerator.prepare(loader(16, batch_size=4))
        found.append([len(batches), batches.total_batch_size, next(iter(batches))[0].shape[0], batches.batch_size])
    return found


@program(ranks=2)
def schedules_step_with_every_process() -> Any:
    accelerator = Accelerator()
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=1e-3 * accelerator.num_processes)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=10)
    net, opt, schedule = accelerator.prepare(net, opt, schedule)
    rates = []
    for _ in range(4):
        accelerator.backward(net(INPUTS).sum())
        opt.step()
        schedule.step()
        rates += schedule.get_last_lr()
    return rates


# ---- big models


def maps_of_the_guide() -> Any:
    def block() -> nn.Module:
        return nn.ModuleDict({f"linear{at}": nn.Linear(10, 10) for at in (1, 2, 3)})

    net = nn.ModuleDict({"block1": block(), "block2": block()})
    uncovered = {"block1": 0, "block2.linear1": 1, "block2.linear2": 1}
    found = [infer_auto_device_map(net, max_memory={0: "2KB", 1: "2KB", "cpu": "30GiB"})]
    found.append(infer_auto_device_map(net, max_memory={0: "1400", 1: 1400, "cpu": 10**6}))
    from accelerate.big_modeling import dispatch_model

    return found, raised(lambda: dispatch_model(net, uncovered))


def models_on_meta_cannot_be_moved() -> Any:
    from accelerate import init_empty_weights

    with init_empty_weights():
        net = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(3)])
    return raised(lambda: net.to("cpu")), {each.device.type for each in net.parameters()}, net[0].weight.shape


# ---- troubleshooting and compilation


def a_smaller_batch_size_is_found() -> Any:
    accelerator = Accelerator()
    seen = []

    @find_executable_batch_size(starting_batch_size=8)
    def inner(batch_size: int) -> Any:
        accelerator.free_memory()
        net, opt, batches = accelerator.prepare(model(), optimizer(), loader(batch_size=batch_size))
        seen.append([batch_size, len(accelerator._models)])
        if batch_size > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20 GiB")
        return len(train(accelerator, net, opt, batches))

    return inner(), seen


def loggers_need_a_state() -> Any:
    logger = get_logger("guide", log_level="INFO")
    return raised(lambda: logger.info("early")), Accelerator() is not None, logger.info("main process only")


@program(ranks=2)
def regions_compiled_by_hand() -> Any:
    accelerator = Accelerator()
    net = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)])
    for each in net.parameters():
        nn.init.constant_(each, 0.5)
    net = accelerator.prepare(net)
    compiled = utils.compile_regions(accelerator.unwrap_model(net), backend="eager")
    return compiled(INPUTS), utils.has_compiled_regions(compiled)


def warnings_of_a_training() -> Any:
    def run() -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        train(accelerator, *accelerator.prepare(*parts()))

    return warned(run)[0]
