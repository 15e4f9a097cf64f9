"""Checkpoints: names of folders, limits on their number, hooks, custom objects, and models saved without a state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_custom_state, save_custom_state
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from safetensors.torch import load_file
from torch import nn

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import files, loader, logged, model, parts, raised, train

CALLS = [
    "_saved()",
    "_saved(safe_serialization=False)",
    "_saved(max_shard_size='100B')",
    "_saved(max_shard_size=50, safe_serialization=False)",
    "_saved(max_shard_size='nonsense')",
    "_saved_over()",
    "Accelerator().save_model(5, 'out')",
    "Accelerator().save_model(model(), 5)",
    "_state_files()",
    "_state_files(safe_serialization=False)",
    "Accelerator().save_state()",
    "Accelerator().load_state()",
    "Accelerator().load_state('absent')",
    "_with_nothing()",
    "_limited(1)",
    "_limited(2)",
    "_limited(None)",
    "_limited(0)",
    "_automatic()",
    "_automatic(output_dir='given')",
    "_automatic(iteration=5)",
    "_latest()",
    "_loaded_by_name()",
    "_twice_the_same()",
    "_customs()",
    "_custom_count()",
    "Accelerator().register_for_checkpointing(Counter(), Counter())",
    "Accelerator().register_for_checkpointing([Counter()])",
    "_hooks()",
    "_hooks_removed()",
    "_hook_that_saves_itself()",
    "_folder_of_a_hook(lambda folder: folder.name)",
    "_folder_of_a_hook(lambda folder: folder.absolute() == Path('out').absolute())",
    "_resumed()",
    "_resumed(accumulation=2)",
    "_resumed(mixed_precision='bf16')",
    "_other_model()",
    "_settings_of_loading()",
    "_random_state()",
    "_tied()",
    "_overlapping()",
    "_object_in_a_custom_state()",
    "str(Accelerator(project_dir='p').save_state('x')), sorted(os.listdir())",
]
CALLS_ON_TWO_RANKS = [
    "_resumed()",
    "_state_files_of_ranks()",
    "_automatic_of_ranks()",
]


class Counter:
    """A custom object with a state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def _is_common(name: str) -> bool:
    """Return whether both packages write this file. Only this package writes a manifest and the states of samplers."""
    return "manifest" not in name and not name.endswith("sampler.bin")


def _saved(**settings: Any) -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(model())
    accelerator.save_model(net, "out", **settings)
    return files("out")


def _saved_over() -> Any:
    accelerator = Accelerator()
    accelerator.save_model(model(), "out", max_shard_size="100B")
    Path("out/notes.txt").write_text("kept")
    accelerator.save_model(model(), "out")
    return sorted(files("out"))


def _state_files(**settings: Any) -> Any:
    accelerator = Accelerator()
    prepared = accelerator.prepare(*parts())
    train(accelerator, *prepared)
    returned = accelerator.save_state("out", **settings)
    return sorted(name for name in files("out") if _is_common(name)), str(returned)


def _state_files_of_ranks() -> Any:
    accelerator = Accelerator()
    train(accelerator, *accelerator.prepare(*parts()))
    accelerator.save_state("out")
    accelerator.wait_for_everyone()
    return sorted(name for name in files("out") if _is_common(name))


def _with_nothing() -> Any:
    accelerator = Accelerator()
    accelerator.save_state("out")
    return sorted(name for name in files("out") if _is_common(name)), accelerator.load_state("out")


def _project(**settings: Any) -> Accelerator:
    config = ProjectConfiguration("p", automatic_checkpoint_naming=True, **settings)
    accelerator = Accelerator(project_config=config)
    accelerator.prepare(*parts())
    return accelerator


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _limited(limit: int | None) -> Any:
    accelerator = _project(total_limit=limit)
    found = []
    for _ in range(4):
        accelerator.save_state()
        found.append(_names("p/checkpoints"))
    return found


def _automatic(output_dir: str | None = None, **settings: Any) -> Any:
    accelerator = _project(**settings)
    names = [str(accelerator.save_state(output_dir)) for _ in range(2)]
    return (
        names,
        accelerator.save_iteration,
        _names("p/checkpoints"),
        accelerator.project_configuration.iteration,
    )


def _automatic_of_ranks() -> Any:
    accelerator = _project(total_limit=1)
    for _ in range(2):
        accelerator.save_state()
        accelerator.wait_for_everyone()
    return _names("p/checkpoints")


def _latest() -> Any:
    accelerator = _project()
    for value in (1.0, 2.0):
        with torch.no_grad():
            accelerator._models[0].first.weight.fill_(value)
        accelerator.save_state()
    with torch.no_grad():
        accelerator._models[0].first.weight.zero_()
    accelerator.load_state()
    return accelerator._models[0].first.weight[0, 0], accelerator.save_iteration


def _loaded_by_name() -> Any:
    accelerator = _project()
    accelerator.save_state()
    accelerator.save_state()
    accelerator.load_state("p/checkpoints/checkpoint_0")
    return accelerator.save_iteration


def _twice_the_same() -> Any:
    accelerator = _project()
    accelerator.save_state()
    accelerator.project_configuration.iteration = 0
    return raised(lambda: accelerator.save_state()) is not None, _names("p/checkpoints")


def _customs() -> Any:
    accelerator = Accelerator()
    first, second = Counter(), Counter()
    accelerator.register_for_checkpointing(first, second)
    first.value, second.value = 3, 5
    accelerator.save_state("out")
    first.value = second.value = 0
    accelerator.load_state("out")
    return first.value, second.value, sorted(name for name in files("out") if "custom" in name)


def _custom_count() -> Any:
    accelerator = Accelerator()
    accelerator.register_for_checkpointing(Counter())
    accelerator.save_state("out")
    accelerator.register_for_checkpointing(Counter())
    return raised(lambda: accelerator.load_state("out"))


def _hooks() -> Any:
    accelerator = Accelerator()
    accelerator.prepare(*parts())
    seen: list[Any] = []
    save = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: seen.append(["save", len(models), len(weights), "out" in str(folder)])
    )
    load = accelerator.register_load_state_pre_hook(
        lambda models, folder: seen.append(["load", len(models), "out" in str(folder)])
    )
    accelerator.save_state("out")
    accelerator.load_state("out")
    return seen, type(save).__name__ == type(load).__name__


def _hooks_removed() -> Any:
    accelerator = Accelerator()
    accelerator.prepare(*parts())
    seen: list[str] = []
    with accelerator.register_save_state_pre_hook(lambda *_: seen.append("with")):
        accelerator.save_state("out")
    handle = accelerator.register_save_state_pre_hook(lambda *_: seen.append("removed"))
    handle.remove()
    accelerator.save_state("out")
    return seen


def _hook_that_saves_itself() -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(model())

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(models[0].state_dict(), Path(folder) / "own.bin")
        weights.pop()

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "own.bin"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    accelerator.save_state("out")
    with torch.no_grad():
        net.first.weight.zero_()
    accelerator.load_state("out")
    return sorted(name for name in files("out") if _is_common(name)), net.first.weight


def _folder_of_a_hook(look: Callable[[Path], Any]) -> Any:
    accelerator = Accelerator()
    accelerator.prepare(model())
    seen: list[Any] = []
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(look(Path(folder))))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(look(Path(folder))))
    accelerator.save_state("out")
    accelerator.load_state("out")
    return seen


def _overlapping() -> Any:
    """Save two buffers that are different views of the same memory."""
    net = nn.Module()
    memory = torch.arange(6.0)
    net.register_buffer("first", memory[:4])
    net.register_buffer("second", memory[2:])
    Accelerator().save_model(net, "out")
    return sorted(load_file("out/model.safetensors"))


class _Settings:
    """A part of a state that is not plain data."""

    value = 3


def _object_in_a_custom_state() -> Any:
    counter = Counter()
    counter.value = _Settings()  # type: ignore[assignment]
    save_custom_state(counter, ".")
    return raised(lambda: load_custom_state(counter, "."))


def _resumed(accumulation: int = 1, **settings: Any) -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, **settings)
    net, opt, batches, schedule = accelerator.prepare(*parts())
    train(accelerator, net, opt, batches, schedule)
    accelerator.save_state("out")
    once = train(accelerator, net, opt, batches, schedule)
    accelerator.load_state("out")
    again = train(accelerator, net, opt, batches, schedule)
    return once, again, schedule.get_last_lr(), opt.state_dict()["param_groups"][0]["lr"], accelerator.step


def _other_model() -> Any:
    accelerator = Accelerator()
    accelerator.prepare(model())
    accelerator.save_state("out")
    accelerator.free_memory()
    accelerator.prepare(nn.Linear(2, 2))
    return raised(lambda: accelerator.load_state("out", strict=False)), raised(
        lambda: accelerator.load_state("out")
    ) is not None


def _settings_of_loading() -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(model())
    accelerator.save_state("out")
    accelerator.load_state("out", load_kwargs={})
    accelerator.load_state("out", map_location="cpu")
    return raised(lambda: accelerator.load_state("out", map_location="nonsense")), net.first.weight


def _random_state() -> Any:
    import random

    import numpy as np

    accelerator = Accelerator()
    accelerator.save_state("out")
    first = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    accelerator.load_state("out")
    return first, random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002


def _tied() -> Any:
    accelerator = Accelerator()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    net = accelerator.prepare(net)
    accelerator.save_model(net, "out")
    accelerator.save_state("state")
    with torch.no_grad():
        net[0].weight.zero_()
    accelerator.load_state("state")
    return files("out"), net[1].weight is net[0].weight, net[0].weight


def projects_reopened() -> Any:
    first = _project()
    first.save_state()
    second = _project(iteration=1)
    second.save_state()
    third = _project()
    third.load_state()
    return _names("p/checkpoints"), third.save_iteration


def checkpoints_log() -> Any:
    accelerator = Accelerator()
    accelerator.prepare(*parts())
    return logged(lambda: accelerator.save_state("out")), logged(lambda: accelerator.load_state("out"))


def the_step_is_saved() -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    net, opt, batches, _ = accelerator.prepare(*parts())
    for at, (inputs, _) in enumerate(batches):
        with accelerator.accumulate(net):
            accelerator.backward(net(inputs).sum())
            opt.step()
            opt.zero_grad()
        if at == 1:
            break
    accelerator.save_state("out")
    accelerator.step = 0
    accelerator.load_state("out")
    return accelerator.step


def middle_of_an_epoch() -> Any:
    accelerator = Accelerator()
    net, opt, batches, schedule = accelerator.prepare(*parts())
    for at, (inputs, targets) in enumerate(batches):
        accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
        opt.step()
        opt.zero_grad()
        if at == 1:
            accelerator.save_state("out")
    accelerator.load_state("out")
    rest = train(accelerator, net, opt, accelerator.skip_first_batches(batches, 2), schedule)
    return rest, net.state_dict()


def stateful_loaders_in_a_checkpoint() -> Any:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(dataloader_config=config)
    net, batches = accelerator.prepare(model(), loader(num_workers=0))
    iterator = iter(batches)
    first = [next(iterator)[0] for _ in range(2)]
    accelerator.save_state("out")
    accelerator.load_state("out")
    rest = [inputs for inputs, _ in batches]
    names = sorted(name for name in files("out") if "dl_state" in name)
    return len(first), rest, names, type(net)


@program(ranks=2)
def save_on_each_node() -> Any:
    config = ProjectConfiguration("p", save_on_each_node=True)
    accelerator = Accelerator(project_config=config)
    accelerator.prepare(*parts())
    accelerator.save_state("out")
    accelerator.save(torch.ones(1), "single.pt", safe_serialization=False)
    accelerator.wait_for_everyone()
    return sorted(name for name in files() if _is_common(name))
