"""Prepared loaders: shares, order, padding, states, and iterable and stateful datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
)
from accelerate.utils import set_seed
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import raised


class Numbers(IterableDataset[Any]):
    """A stream of consecutive numbers that records its epoch."""

    def __init__(self, length: int = 11) -> None:
        self.length = length
        self.epoch = -1

    def __iter__(self) -> Any:
        return iter(torch.arange(self.length).float())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def _batches(size: int, length: int = 11, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(range(length), size, drop_last)


def _shares(*args: Any, **settings: Any) -> Any:
    shards = [BatchSamplerShard(_batches(*args), 2, rank, **settings) for rank in range(2)]
    return [list(each) for each in shards], [len(each) for each in shards]


def _streams(batch_size: int, **settings: Any) -> Any:
    return [
        list(IterableDatasetShard(range(11), batch_size, num_processes=2, process_index=rank, **settings))
        for rank in range(2)
    ]


def _read(settings: dict[str, Any] | None = None, passes: int = 2, **arguments: Any) -> Any:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**(settings or {})))
    dataset = arguments.pop("dataset", None)
    given = DataLoader(torch.arange(11) if dataset is None else dataset, **{"batch_size": 3, **arguments})
    loader = accelerator.prepare(given)
    found = [list(loader) for _ in range(passes)]
    return found, type(loader), loader.end_of_dataloader, raised(lambda: len(loader))


CALLS = [
    "_shares(3)",
    "_shares(2)",
    "_shares(3, 12)",
    "_shares(3, 2)",
    "_shares(3, 0)",
    "_shares(3, 11, True)",
    "_shares(3, even_batches=False)",
    "_shares(3, 10, even_batches=False)",
    "_shares(4, split_batches=True)",
    "_shares(4, 11, True, split_batches=True)",
    "_shares(4, 9, split_batches=True, even_batches=False)",
    "_shares(3, split_batches=True)",
    "_streams(3)",
    "_streams(3, drop_last=True)",
    "_streams(4, split_batches=True)",
    "_streams(4, split_batches=True, drop_last=True)",
    "_streams(3, split_batches=True)",
    "len(IterableDatasetShard([1, 2, 3], 2, num_processes=2))",
    "list(SkipBatchSampler(_batches(3), 2)), len(SkipBatchSampler(_batches(3), 2))",
    "SkipBatchSampler(_batches(3), 2).total_length",
    "list(SkipBatchSampler(_batches(3), 20))",
    "list(SkipDataLoader(torch.arange(7), skip_batches=2, batch_size=2))",
    "len(SkipDataLoader(torch.arange(7), skip_batches=2, batch_size=2))",
    "list(skip_first_batches(DataLoader(torch.arange(7), batch_size=2), 2))",
    "list(skip_first_batches(DataLoader(Numbers(), batch_size=2), 2))",
    "list(skip_first_batches(DataLoader(torch.arange(7), batch_size=2), 0))",
    "list(skip_first_batches(DataLoader(torch.arange(7), batch_size=2), 20))",
    "list(skip_first_batches(DataLoader(torch.arange(7), batch_size=None), 2))",
    "_seedable()",
    "type(get_sampler(DataLoader(torch.arange(3), shuffle=True)))",
    "type(get_sampler(DataLoader(torch.arange(3), batch_size=None)))",
    "get_sampler(DataLoader(Numbers()))",
    "_read()",
    "_read(batch_size=11)",
    "_read(batch_size=20)",
    "_read(drop_last=True)",
    "_read(shuffle=True)",
    "_read(shuffle=True, generator=torch.Generator().manual_seed(5))",
    "_read({'use_seedable_sampler': True}, shuffle=True)",
    "_read({'use_seedable_sampler': True, 'data_seed': 3}, shuffle=True)",
    "_read(sampler=RandomSampler(range(11), generator=torch.Generator().manual_seed(5)))",
    "_read(sampler=SequentialSampler(range(5)))",
    "_read(batch_size=None)",
    "_read(batch_size=1, batch_sampler=_batches(4))",
    "_read(dataset=Numbers())",
    "_read({'dispatch_batches': False}, dataset=Numbers())",
    "_read({'dispatch_batches': True})",
    "_read({'dispatch_batches': True}, batch_size=20, drop_last=True)",
    "_read({'split_batches': True})",
    "_read({'even_batches': False})",
    "_read({'non_blocking': True})",
    "_read(collate_fn=list)",
    "_read(dataset=[{'a': i, 'b': str(i)} for i in range(5)])",
    "_read(dataset=[])",
    "_read(num_workers=1)",
    "DataLoaderConfiguration(split_batches=True, dispatch_batches=True)",
    "prepare_data_loader([1])",
    "type(prepare_data_loader(DataLoader(torch.arange(3)), num_processes=2, process_index=1))",
    "list(prepare_data_loader(DataLoader(torch.arange(7), batch_size=2), num_processes=2, process_index=1))",
    "list(prepare_data_loader(DataLoader(torch.arange(8), batch_size=4), num_processes=2, process_index=1, split_batches=True))",
    "prepare_data_loader(DataLoader(torch.arange(8), batch_size=3), num_processes=2, process_index=1, split_batches=True)",
    "prepare_data_loader(DataLoader(torch.arange(8)), dispatch_batches=True, put_on_device=False)",
    "list(prepare_data_loader(DataLoader(Numbers(), batch_size=2), num_processes=2, process_index=1, put_on_device=False))",
    "list(DataLoaderShard(torch.arange(4), batch_size=2))",
    "list(DataLoaderShard(torch.arange(7), batch_size=2, skip_batches=1))",
]
CALLS_ON_TWO_RANKS = [
    "_read(sampler=OwnSampler())",
    "_read(sampler=OwnSampler(), num_workers=1)",
    "_read()",
    "_read(batch_size=2)",
    "_read(batch_size=20)",
    "_read(drop_last=True)",
    "_read(shuffle=True, generator=torch.Generator().manual_seed(5))",
    "_read({'use_seedable_sampler': True, 'data_seed': 3}, shuffle=True)",
    "_read(sampler=RandomSampler(range(11), generator=torch.Generator().manual_seed(5)))",
    "_read(batch_sampler=_batches(4), batch_size=1)",
    "_read(dataset=Numbers())",
    "_read({'dispatch_batches': False}, dataset=Numbers())",
    "_read({'dispatch_batches': False, 'split_batches': True}, dataset=Numbers(), batch_size=4)",
    "_read({'dispatch_batches': True})",
    "_read({'dispatch_batches': True, 'split_batches': True}, batch_size=4)",
    "_read({'split_batches': True}, batch_size=4)",
    "_read({'even_batches': False})",
    "_read(dataset=[{'a': i, 'b': str(i)} for i in range(5)], batch_size=2)",
    "_read(dataset=Numbers(4))",
    "_read({'dispatch_batches': False}, dataset=Numbers(4))",
    "_read(batch_size=None)",
]


class OwnSampler(torch.utils.data.Sampler[int]):
    """A sampler like those of other libraries, which draws from its own generator or from torch's global one."""

    generator = None

    def __iter__(self) -> Any:
        return iter(torch.randperm(11, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 11


def _seedable() -> Any:
    sampler = SeedableRandomSampler(range(6), generator=torch.Generator().manual_seed(3), data_seed=7)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(0)
    return first, second, list(sampler), sampler.epoch, sampler.initial_seed


def set_epoch_reaches_the_dataset() -> Any:
    dataset = Numbers()
    loader = Accelerator().prepare(DataLoader(dataset, batch_size=4))
    loader.set_epoch(3)
    seen = [dataset.epoch, loader.iteration]
    list(loader)
    return seen, dataset.epoch, loader.iteration


def skipping_a_prepared_loader() -> Any:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2))
    rest = accelerator.skip_first_batches(loader, 3)
    return list(rest), type(rest), list(loader)


def skipping_a_shuffled_loader() -> Any:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1))
    loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2, shuffle=True))
    return list(accelerator.skip_first_batches(loader, 3)), list(loader)


def leaving_a_pass_early() -> Any:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2))
    for batch in loader:
        if batch[0] >= 4:
            break
    return accelerator.gradient_state.in_dataloader, list(loader), accelerator.gradient_state.in_dataloader


def gradient_state_in_nested_loaders() -> Any:
    accelerator = Accelerator()
    outer, inner = accelerator.prepare(DataLoader(torch.arange(4)), DataLoader(torch.arange(2)))
    seen = []
    for _ in outer:
        seen.extend([accelerator.gradient_state.end_of_dataloader for _ in inner])
        seen.append([accelerator.gradient_state.end_of_dataloader])
    return seen


@program(ranks=2)
def remainders_of_streams() -> Any:
    config = DataLoaderConfiguration(dispatch_batches=False)
    loader = Accelerator(dataloader_config=config).prepare(DataLoader(Numbers(), batch_size=3))
    list(loader)
    return loader.remainder, loader.total_batch_size


def _gathered(loader: Any, accelerator: Any) -> Any:
    """Return the results of a pass, gathered for metrics."""
    return [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]


def _results(settings: dict[str, Any] | None = None, skipped: int = 0, **arguments: Any) -> Any:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**(settings or {})))
    loader = accelerator.prepare(DataLoader(**{"batch_size": 3, "dataset": torch.arange(11), **arguments}))
    if skipped:
        loader = accelerator.skip_first_batches(loader, skipped)
    return _gathered(loader, accelerator)


def _repeated(dataset: Any, **settings: Any) -> Any:
    """Repeat the mean of each batch as often as a full batch has samples, like the losses of transformers' Trainer."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**settings))
    loader = accelerator.prepare(DataLoader(dataset, batch_size=4))
    return [accelerator.gather_for_metrics(batch.float().mean().repeat(4)) for batch in loader]


class Announced(Numbers):
    """A stream that announces a wrong length."""

    def __len__(self) -> int:
        return 12


class Uneven:
    """A batch sampler whose batches have several sizes."""

    batch_size = 4

    def __iter__(self) -> Any:
        return iter([[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]])

    def __len__(self) -> int:
        return 3


def results_of_a_stream() -> Any:
    return _repeated(Numbers(10)), _repeated(Numbers(8))


def results_of_a_stream_that_is_not_dispatched() -> Any:
    return _repeated(Numbers(10), dispatch_batches=False)


def results_of_a_stream_with_a_wrong_length() -> Any:
    return _repeated(Announced(10), dispatch_batches=False)


def results_of_batches_of_several_sizes() -> Any:
    return _results(batch_size=1, batch_sampler=Uneven(), dataset=torch.arange(10))


def results_of_a_batch_sampler_that_drops() -> Any:
    return _results(batch_size=1, batch_sampler=_batches(3, drop_last=True))


@program(ranks=2)
def results_of_a_sampler_that_is_shorter_than_the_dataset() -> Any:
    return _results(sampler=SequentialSampler(range(11)), dataset=torch.arange(20))


@program(ranks=2)
def results_of_skipped_batches() -> Any:
    return _results(skipped=1)


@program(ranks=2)
def results_of_ranks_that_were_seeded_apart() -> Any:
    Accelerator()
    set_seed(3, device_specific=True)
    return sorted(_results({"use_seedable_sampler": True}, shuffle=True, dataset=torch.arange(12)))


@program(ranks=2)
def batches_of_one_sample_that_are_split() -> Any:
    return _results({"split_batches": True, "dispatch_batches": True}, batch_size=1, dataset=torch.arange(4))


@program(ranks=2)
def lengths_of_split_batches_that_are_uneven() -> Any:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False))
    loader = accelerator.prepare(DataLoader(torch.arange(9), batch_size=4))
    return len(loader), len(list(loader))


@program(ranks=2)
def texts_of_dispatched_batches() -> Any:
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=True)
    rows = [{"number": number, "text": str(number)} for number in range(8)]
    loader = Accelerator(dataloader_config=config).prepare(DataLoader(rows, batch_size=4))
    return [(batch["number"], batch["text"]) for batch in loader]


def _random_numbers(settings: dict[str, Any], between: int | None = None, skipped: int = 0, **arguments: Any) -> Any:
    """Return a random number drawn after preparing a loader, and one drawn after each batch of two passes."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**settings))
    loader = accelerator.prepare(DataLoader(**{"batch_size": 3, "dataset": torch.arange(11), **arguments}))
    if skipped:
        loader = accelerator.skip_first_batches(loader, skipped)
    found = [torch.rand(1)]
    if between is not None:
        torch.manual_seed(between)
    return found + [(batch, torch.rand(1)) for batch in loader] + [torch.rand(1) for _ in loader]


@program(ranks=2)
def random_numbers_of_a_dispatched_stream() -> Any:
    return _random_numbers({}, dataset=Numbers())


@program(ranks=2)
def random_numbers_of_a_shuffled_dispatched_loader() -> Any:
    return _random_numbers({"dispatch_batches": True}, shuffle=True)


def random_numbers_of_a_dispatched_loader_with_a_generator() -> Any:
    generator = torch.Generator().manual_seed(5)
    return _random_numbers({"dispatch_batches": True}, shuffle=True, generator=generator)


def random_numbers_of_the_rest_of_a_pass() -> Any:
    return _random_numbers({}, skipped=1)


@program(needs="torchdata")
def random_numbers_of_a_stateful_loader() -> Any:
    settings = {"use_stateful_dataloader": True}
    shuffled = _random_numbers(settings, shuffle=True)
    return shuffled, _random_numbers(settings, between=4, shuffle=True), _random_numbers(settings, dataset=Numbers())


@program(needs="torchdata", ranks=2)
def random_numbers_of_stateful_loaders_on_two_ranks() -> Any:
    settings = {"use_stateful_dataloader": True}
    return _random_numbers(settings, between=4, shuffle=True), _random_numbers(settings, dataset=Numbers())


@program(ranks=2)
def order_after_a_pass_that_was_left() -> Any:
    loader = Accelerator().prepare(DataLoader(torch.arange(12), batch_size=2, shuffle=True))
    for _ in loader:
        break
    return list(loader), list(loader)


@program(needs="torchdata")
def stateful_passes_after_a_state_of_the_last_batch() -> Any:
    _, loader = _stateful()
    for _ in loader:
        state = dict(loader.state_dict())
    _, again = _stateful()
    again.load_state_dict(state)
    return list(again), list(again)


def _stateful(**settings: Any) -> tuple[Any, Any]:
    config = DataLoaderConfiguration(use_stateful_dataloader=True, **settings)
    accelerator = Accelerator(dataloader_config=config)
    return accelerator, accelerator.prepare(DataLoader(torch.arange(11), batch_size=2))


@program(needs="torchdata")
def stateful_state_after_some_batches() -> Any:
    _, loader = _stateful()
    states = []
    for _ in loader:
        states.append(dict(loader.state_dict()))
        if len(states) == 3:
            break
    return states


@program(needs="torchdata")
def stateful_state_at_the_end() -> Any:
    _, loader = _stateful()
    before = dict(loader.state_dict())
    list(loader)
    return before, dict(loader.state_dict())


@program(needs="torchdata")
def stateful_loading() -> Any:
    _, loader = _stateful()
    for batch in loader:
        if batch[0] >= 4:
            break
    state = loader.state_dict()
    _, again = _stateful()
    again.load_state_dict(state)
    return list(again), list(again), len(again)


def _resumed_after(rounds: int, shuffle: bool) -> tuple[Any, Any, list[int]]:
    """Resume another loader from an interrupted one's state. Return the Accelerator, the loader and the samples left."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    loaders = []
    for _ in range(2):
        accelerator = Accelerator(dataloader_config=config)
        loaders.append(accelerator.prepare(DataLoader(torch.arange(18), batch_size=2, shuffle=shuffle)))
    interrupted = iter(loaders[0])
    for _ in range(rounds):
        next(interrupted)
    state, numbers = loaders[0].state_dict(), torch.get_rng_state()
    left = [number for batch in interrupted for number in batch.tolist()]
    torch.set_rng_state(numbers)  # In other programs, load_state restores these numbers.
    loaders[1].load_state_dict(state)
    return accelerator, loaders[1], left


@program(needs="torchdata")
def stateful_skipping_the_batches_of_a_loaded_state() -> Any:
    accelerator, loader, left = _resumed_after(3, shuffle=False)
    read = [number for batch in accelerator.skip_first_batches(loader, 3) for number in batch.tolist()]
    return read, read == left


@program(needs="torchdata")
def stateful_epoch_after_a_resumed_one() -> Any:
    accelerator, loader, _ = _resumed_after(3, shuffle=False)
    list(accelerator.skip_first_batches(loader, 3))
    return len(list(loader))


@program(needs="torchdata")
def stateful_resuming_a_shuffled_pass() -> Any:
    _, loader, left = _resumed_after(3, shuffle=True)
    return [number for batch in loader for number in batch.tolist()] == left


@program(needs="torchdata")
def stateful_loading_of_a_seedable_order() -> Any:
    def make() -> Any:
        config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=3)
        return Accelerator(dataloader_config=config).prepare(DataLoader(torch.arange(11), batch_size=2, shuffle=True))

    loader, read = make(), []
    for batch in loader:
        read.append(batch)
        if len(read) == 2:
            break
    again = make()
    again.load_state_dict(loader.state_dict())
    return read, list(again)


@program(needs="torchdata")
def stateful_checkpoint() -> Any:
    accelerator, loader = _stateful()
    for batch in loader:
        if batch[0] >= 4:
            break
    accelerator.save_state("saved")
    accelerator, loader = _stateful()
    accelerator.load_state("saved")
    return Path("saved/dl_state_dict.bin").is_file(), list(loader)


@program(needs="torchdata", ranks=2)
def stateful_state_on_two_ranks() -> Any:
    _, loader = _stateful()
    for _ in loader:
        break
    state = loader.state_dict()
    _, again = _stateful()
    again.load_state_dict(state)
    return dict(state), list(again)


@program(needs="torchdata")
def stateful_dispatched() -> Any:
    _, loader = _stateful(dispatch_batches=True)
    for _ in loader:
        break
    return dict(loader.state_dict())


def _sharded(shards: int) -> Any:
    import datasets

    def generate(shards: list[int]) -> Any:
        for shard in shards:
            for number in range(3):
                yield {"number": 10 * shard + number}

    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(shards))})


@program(needs="datasets", ranks=2)
def sharded_datasets_are_split_by_their_shards() -> Any:
    found = []
    for shards in (1, 2, 3, 4):
        for dispatch in (False, None):
            accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
            loader = accelerator.prepare(DataLoader(_sharded(shards), batch_size=2))
            found.append([shards, dispatch, type(loader.dataset).__name__, [batch["number"] for batch in loader]])
    return found


@program(needs="datasets transformers", ranks=2)
def losses_of_trainers() -> Any:
    """Train as transformers' Trainer does: plainly, grouped by length, and on sharded iterable datasets."""
    import transformers

    class Config(transformers.PretrainedConfig):
        model_type = "tiny"

    class Tiny(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            self.head = torch.nn.Linear(1, 1)
            self.post_init()

        def _init_weights(self, module: Any) -> None: ...

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": torch.nn.functional.mse_loss(self.head(input_ids), labels)}

    def collate(rows: list[Any]) -> Any:
        means = [[sum(each["input_ids"]) / len(each["input_ids"])] for each in rows]
        return {
            "input_ids": torch.tensor(means).float(),
            "labels": torch.tensor([each["labels"] for each in rows]).float(),
        }

    def losses(dataset: Any, **settings: Any) -> Any:
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            "out", per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", max_steps=4, learning_rate=0.01, **settings,
        )  # fmt: skip
        trainer = transformers.Trainer(Tiny(Config()), arguments, train_dataset=dataset, data_collator=collate)
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    table = [{"input_ids": [i % 9] * (1 + i % 7), "labels": [i % 5]} for i in range(24)]
    grouped: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    if "group_by_length" in transformers.TrainingArguments.__dataclass_fields__:
        grouped = {"group_by_length": True}
    columns = ["number"]
    stream = _sharded(4).map(lambda row: {"input_ids": [row["number"]], "labels": [1]}, remove_columns=columns)
    return losses(table), losses(table, **grouped), losses(stream)


@program(needs="datasets", ranks=2)
def datasets_with_maps_are_split() -> Any:
    import datasets

    table = datasets.Dataset.from_dict({"number": list(range(7))}).with_format("torch")
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(table, batch_size=2))
    with accelerator.split_between_processes(table) as share:
        mine = share["number"][:] if len(share) else []
    with accelerator.split_between_processes(table, apply_padding=True) as share:
        padded = share["number"][:]
    return [batch["number"] for batch in loader], list(mine), list(padded)


@program(needs="datasets")
def sharded_datasets_in_one_process() -> Any:
    loader = Accelerator().prepare(DataLoader(_sharded(3), batch_size=2))
    return [batch["number"] for batch in loader]
