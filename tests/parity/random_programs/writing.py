"""Write random programs: loaders, accumulation, schedulers, models, saving and resuming, on one, two or three ranks.

A program is the text of a script. `write(number)` returns the same program for the same number.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from tests.parity.random_programs import pieces
from tests.parity.random_programs.plans import APART, OPTIMIZERS, ORDERS, SCHEDULERS, Plan, plan

HEADER = '''\
"""Random program {number}: torchrun --nproc_per_node={ranks} FILE, on Accelerate or on this package as accelerate."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, broadcast_object_list
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.utils.data import (
    DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler,
    get_worker_info,
)
'''
FOOTER = """
if __name__ == "__main__":
    print(*SEEN, sep="\\n")
    accelerator.wait_for_everyone()
"""
PIECES = {name: inspect.getsource(piece) for name, piece in vars(pieces).items() if getattr(piece, "__module__", "") == pieces.__name__}  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class RandomProgram:
    """The script of the program with this number, and how many ranks run it."""

    number: int
    ranks: int
    text: str


def write(number: int) -> RandomProgram:
    """Return the program with this number."""
    chosen = plan(number)
    body = "\n".join(_body(chosen))
    head = HEADER.format(number=number, ranks=chosen.ranks)
    return RandomProgram(number, chosen.ranks, "\n\n".join([head + _pieces(body), body]) + FOOTER)


def _pieces(body: str) -> str:
    """Return the sources of all pieces that ``body`` names, directly or through other pieces, in the file's order."""
    used, text = {"see", "plain", "numbers"}, body
    while found := {name for name in PIECES if re.search(rf"\b{name}\b", text)} - used:
        used |= found
        text = "\n".join(PIECES[name] for name in found)
    return "\n\nSEEN: list[Any] = []\n\n\n" + "\n\n".join(source for name, source in PIECES.items() if name in used)


def _body(p: Plan) -> Iterator[str]:
    names = _names(p)
    yield f"set_seed({p.number})\n\n"
    yield "def make() -> Any:"
    yield indent("\n".join(_make(p)), "    ")
    yield f"\n\naccelerator, {names} = make()"
    if p.device_specific:
        yield f"set_seed({p.number}, device_specific=True)"
    yield "\n\ndef inputs(batch: Any) -> Any:"
    yield f"    return {_INPUTS[p.row]}\n\n"
    yield from _functions(p)
    yield from _apart(p, "start")
    for number, phase in enumerate(p.phases):
        yield from _WRITERS[phase](p, number)
    yield 'see("random states", numbers())'


def _names(p: Plan) -> str:
    names = ["loader", "held_out"]
    for at in range(len(p.models)):
        names += [f"model{at}", f"optimizer{at}"] + ([f"scheduler{at}"] if p.scheduler else [])
    return ", ".join(names)


_INPUTS = {
    "row_dict": 'batch["ids"], batch["x"]',
    "row_tuple": "batch[0], batch[1]",
    "row_nested": 'batch["ids"], batch["more"]["x"]',
}


def _settings(p: Plan) -> str:
    config = {
        "split_batches": (p.split_batches, False), "dispatch_batches": (p.dispatch_batches, None),
        "even_batches": (p.even_batches, True), "use_seedable_sampler": (p.seedable, False),
        "data_seed": (p.data_seed if p.seedable else None, None), "use_stateful_dataloader": (p.stateful, False),
    }  # fmt: skip
    plugin = {
        "num_steps": (p.accumulation, None), "sync_with_dataloader": (p.sync_with_dataloader, True),
        "adjust_scheduler": (p.adjust_scheduler, True), "sync_each_batch": (p.sync_each_batch, False),
    }  # fmt: skip
    given = ["cpu=True"]
    if p.accumulation > 1:
        given.append(f"gradient_accumulation_plugin=GradientAccumulationPlugin({_arguments(plugin)})")
    if found := _arguments(config):
        given.append(f"dataloader_config=DataLoaderConfiguration({found})")
    if p.precision != "no":
        given.append(f'mixed_precision="{p.precision}"')
    if not p.step_scheduler_with_optimizer:
        given.append("step_scheduler_with_optimizer=False")
    if "Branches" in p.models:
        given.append("kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]")
    return ", ".join(given)


def _arguments(values: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name}={value!r}" for name, (value, default) in values.items() if value != default)


def _make(p: Plan) -> Iterator[str]:
    yield f"accelerator = Accelerator({_settings(p)})"
    yield f"data = {p.dataset}({p.length}, {p.row})"
    order = ORDERS[p.order].format(length=p.length, batch_size=p.batch_size, drop_last=p.drop_last)
    loading = [] if p.order == "batches" else [f"batch_size={p.batch_size}", *["drop_last=True"] * p.drop_last]
    loading += [order] * bool(order) + [f"num_workers={p.workers}"] * (p.workers > 0)
    yield f"loader = DataLoader(data, {', '.join(loading)})"
    yield f"held_out = DataLoader(Rows({p.length // 2}, {p.row}), batch_size={p.batch_size})"
    for at, model in enumerate(p.models):
        yield f"model{at} = {model}()"
        yield f"optimizer{at} = {OPTIMIZERS[p.optimizer].format(parameters=f'model{at}.parameters()')}"
        if p.scheduler:
            yield f"scheduler{at} = {SCHEDULERS[p.scheduler].format(optimizer=f'optimizer{at}')}"
    names = _names(p)
    yield f"{names} = accelerator.prepare({names})"
    yield f"return accelerator, {names}"


def _functions(p: Plan) -> Iterator[str]:
    every = range(len(p.models))
    models = ", ".join(f"model{at}" for at in every)
    yield "def train(batches: Any, save: int = -1, stop: int = -1, whole: bool = True) -> list[Any]:"
    yield "    steps, metrics = [], []"
    yield "    for step, batch in enumerate(batches):"
    yield "        ids, x = inputs(batch)"
    yield f"        with accelerator.accumulate({models}):"
    yield f"            loss = {' + '.join(f'model{at}(x).square().mean()' for at in every)}"
    yield "            accelerator.backward(loss)"
    if p.clip:
        yield "            if accelerator.sync_gradients:"
        call = (
            "clip_grad_norm_(model0.parameters(), 0.1)"
            if p.clip == "norm"
            else "clip_grad_value_(model0.parameters(), 0.05)"
        )
        yield f'                see("clipped", accelerator.{call})'
    for at in every:
        yield f"            optimizer{at}.step()"
        if p.scheduler:
            yield f"            scheduler{at}.step()"
        yield f"            optimizer{at}.zero_grad()"
    yield '        see("step", ids, loss, accelerator.sync_gradients, batches.end_of_dataloader)'
    yield '        see("random states", numbers())'
    yield '        see("rates", [group["lr"] for group in optimizer0.param_groups], optimizer0.step_was_skipped)'
    yield '        see("gathered", accelerator.gather(loss.detach()))'
    yield "        metrics += accelerator.gather_for_metrics(ids).tolist()"
    yield '        see("metrics", metrics)'
    yield "        steps.append([ids.tolist(), loss.item(), numbers()])"
    if p.evaluated_inside:
        yield "        if step == 1:"
        yield "            evaluate()"
    yield "        if step == save:"
    yield '            accelerator.save_state("saved")'
    yield "        if step == stop:"
    yield "            break"
    yield f'    see("weights", {", ".join(f"accelerator.get_state_dict({name})" for name in models.split(", "))})'
    yield '    see("random states", numbers())'
    if p.samples is not None:
        yield "    if stop < 0 and whole:"
        yield f'        see("right", len(metrics), {p.samples})'
    yield "    return steps\n\n"
    yield "def evaluate() -> None:"
    yield "    model0.eval()"
    yield "    for batch in held_out:"
    yield "        ids, x = inputs(batch)"
    yield "        with torch.no_grad():"
    yield '            see("metrics", *accelerator.gather_for_metrics((ids, model0(x))))'
    yield '    see("random states", numbers())'
    yield "    model0.train()\n\n"


def _train(p: Plan, number: int) -> Iterator[str]:
    yield f'see("phase {number}: train")'
    yield 'see("length", len(loader) if hasattr(loader.dataset, "__len__") else None)'
    yield "train(loader)"


def _leave(p: Plan, number: int) -> Iterator[str]:
    yield f'see("phase {number}: leave a pass")'
    yield "train(loader, stop=1)"


def _read(p: Plan, number: int) -> Iterator[str]:
    yield f'see("phase {number}: read")'
    yield "for batch in loader:"
    yield '    see("read", batch, loader.end_of_dataloader)'
    yield '    see("random states", numbers())'


def _evaluate(p: Plan, number: int) -> Iterator[str]:
    yield f'see("phase {number}: evaluate", len(held_out))'
    yield "evaluate()"


def _save_and_load(p: Plan, number: int) -> Iterator[str]:
    yield f'see("phase {number}: save and load")'
    if p.counter:
        yield "counter = Counter()"
        yield "accelerator.register_for_checkpointing(counter)"
        yield f"counter.count = {number + 1}"
    # After a pass that was left early, saving counts as saving within that pass.
    left = "leave" in p.phases[:number] and (p.depends_on_epochs or p.stateful)
    yield 'accelerator.save_state("whole")'
    yield "accelerator.wait_for_everyone()"
    yield "whole = train(loader)"
    if p.counter:
        yield "counter.count = 0"
    yield 'accelerator.load_state("whole")'
    yield f'see("loaded", accelerator.get_state_dict(model0){", counter.count" if p.counter else ""})'
    yield from _apart(p, "load")
    yield f"again = train(loader{', whole=False' if left else ''})"
    if not left:
        part = "" if p.has_same_losses else "[0]"
        yield f'see("right", [each{part} for each in again], [each{part} for each in whole])'


def _resume(p: Plan, number: int) -> Iterator[str]:
    yield f'see("phase {number}: resume")'
    yield f"whole = train(loader, save={p.skipped - 1})"
    if p.fresh:
        yield "accelerator.free_memory()"
        yield f"accelerator, {_names(p)} = make()"
    yield "accelerator.wait_for_everyone()"
    # After its last batch, a stateful loader resumes with the next pass.
    yield f"if len(whole) {'>' if p.stateful else '>='} {p.skipped}:"
    yield '    accelerator.load_state("saved")'
    yield from (f"    {line}" for line in _apart(p, "resume"))
    rest = "loader" if p.stateful else f"accelerator.skip_first_batches(loader, {p.skipped})"
    yield f"    rest = train({rest}, whole=False)"
    part = "" if p.has_same_losses else "[0]"
    end = "-1" if p.padding_differs else ""
    yield f'    see("right", [each{part} for each in rest[:{end}]], [each{part} for each in whole[{p.skipped}:{end}]])'
    yield from (f"    {line}" for line in _apart(p, "resumed"))


def _apart(p: Plan, place: str) -> Iterator[str]:
    """If Accelerate is known to be wrong at this place, yield the line after which the packages are not compared."""
    for each in APART:
        if each.place == place and each.applies(p):
            labels = f", {each.labels!r}" if each.labels else ""
            yield f'see("apart", "{each.reason}"{labels})'


def _collect(p: Plan, number: int) -> Iterator[str]:
    yield f'see("phase {number}: collect")'
    yield "rank = accelerator.process_index"
    yield "mine = torch.arange(2 + rank, dtype=torch.float32) + rank"
    yield 'see("gather", accelerator.gather({"a": mine[:2], "b": (mine[:1], mine[1])}))'
    yield 'see("pad", accelerator.pad_across_processes(mine, pad_index=-1))'
    yield 'see("pad", accelerator.pad_across_processes(mine, pad_first=True))'
    yield 'see("reduce", accelerator.reduce(mine[:2], "mean"), accelerator.reduce([mine[:1]], "sum"))'
    yield 'see("objects", gather_object([rank, "a"]), broadcast_object_list([rank, "b"]))'
    yield f"with accelerator.split_between_processes(list(range({p.length})), apply_padding={p.drop_last}) as share:"
    yield '    see("share", share)'


_WRITERS: dict[str, Callable[[Plan, int], Iterator[str]]] = {
    "train": _train, "leave": _leave, "read": _read, "evaluate": _evaluate, "save and load": _save_and_load,
    "resume": _resume, "collect": _collect,
}  # fmt: skip
