from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_accelerate.accelerator import Accelerator
from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.config.kwargs_handlers import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from notebook_accelerate.local_sgd import LocalSGD
from notebook_accelerate.state import PartialState, reset_shared_state
from tests.support.ranks import RankError, run_ranks


def model_of(value: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def inputs_of(accelerator: Accelerator) -> torch.Tensor:
    """Return 1 on rank 0 and 3 on rank 1, so that separate gradients are 1 and 3, and averaged ones are 2."""
    return torch.full((1, 1), 1.0 + 2.0 * accelerator.process_index)


# ---- process group and state


def the_world() -> Any:
    accelerator = Accelerator()
    state = PartialState()
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    assert accelerator.use_distributed
    assert not accelerator.multi_device
    assert state.backend == dist.get_backend() == "gloo"
    with state.split_between_processes(["a", "b", "c"]) as share:
        pass
    return accelerator.num_processes, accelerator.process_index, accelerator.is_last_process, share


def test_an_accelerator_sees_all_ranks() -> None:
    assert run_ranks(the_world) == [(2, 0, False, ["a", "b"]), (2, 1, True, ["c"])]


def main_first() -> Any:
    accelerator = Accelerator()
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.2)
        moment = [time.monotonic()]  # All processes on a machine share this clock.
    return moment.pop()


def test_the_main_process_enters_first() -> None:
    first, second = run_ranks(main_first)
    assert first <= second


def triggered() -> Any:
    accelerator = Accelerator()
    before = accelerator.check_trigger()
    if not accelerator.is_main_process:
        accelerator.set_trigger()
    return before, accelerator.check_trigger(), accelerator.check_trigger()


def test_a_trigger_of_one_rank_reaches_all_ranks() -> None:
    assert run_ranks(triggered) == [(False, True, False)] * 2


def other_settings() -> Any:
    from datetime import timedelta

    first = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=60))])
    second = Accelerator(
        mixed_precision="bf16", kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=50))]
    )
    return first.num_processes, second.num_processes, second.mixed_precision, second.gather(torch.ones(1)).tolist()


def test_process_group_settings_apply_to_the_first_accelerator_only() -> None:
    assert run_ranks(other_settings) == [(2, 2, "bf16", [1, 1])] * 2


def leave() -> Any:
    accelerator = Accelerator()
    group = dist.new_group([0, 1])
    accelerator.state.destroy_process_group(group)
    kept = dist.is_initialized()
    accelerator.end_training()
    return kept, dist.is_initialized()


def test_end_of_training_destroys_the_group() -> None:
    assert run_ranks(leave) == [(True, False)] * 2
    # If a notebook launched the ranks, the launcher destroys their group, not end_training.
    assert run_ranks(leave, env={"FORK_LAUNCHED": "1"}) == [(True, True)] * 2


def adopt_a_group() -> Any:
    state = PartialState()
    model = Accelerator().prepare(model_of())
    return state.num_processes, state.process_index, state.backend, isinstance(model, DistributedDataParallel)


def test_an_existing_group_is_used() -> None:
    wanted = [(2, 0, "gloo", True), (2, 1, "gloo", True)]
    assert run_ranks(adopt_a_group, process_group=True) == wanted


def forked_child_forgets(folder: str) -> Any:
    """Fork a rank that has a process group. The child starts without state, and the parent's group stays alive."""
    import os

    rank = PartialState().process_index
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
                os.environ.pop(name)
            reset_shared_state()
            code = 0 if not dist.is_initialized() and PartialState().num_processes == 1 else 2
            Path(folder, f"child{rank}").write_text("alone")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), Accelerator().gather(torch.tensor([rank])).tolist()


@pytest.mark.parametrize("own", [False, True], ids=["made by the state", "made by the user"])
def test_a_forked_child_forgets_an_inherited_group(tmp_path: Path, own: bool) -> None:
    assert run_ranks(forked_child_forgets, str(tmp_path), process_group=own) == [(0, [0, 1])] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child0", "child1"]


# ---- gradients


def grads_of_a_window(plugin: dict[str, Any]) -> Any:
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, **plugin))
    first, second = accelerator.prepare(model_of(), model_of())
    seen = []
    for _ in range(2):
        with accelerator.accumulate(first, second):
            accelerator.backward((first(inputs_of(accelerator)) + second(inputs_of(accelerator))).sum())
        seen.append([float(model.module.weight.grad) for model in (first, second)])
    return seen


def test_gradients_are_exchanged_in_the_last_batch_of_a_window() -> None:
    one, other = run_ranks(grads_of_a_window, {})
    # After the first batch, the gradient is half of the rank's own. After the second, it is the average over ranks of
    # half of the window's sum.
    assert one == [[0.5, 0.5], [2.0, 2.0]]
    assert other == [[1.5, 1.5], [2.0, 2.0]]


def test_gradients_may_be_exchanged_in_every_batch() -> None:
    one, other = run_ranks(grads_of_a_window, {"sync_each_batch": True})
    assert one == other == [[1.0, 1.0], [2.0, 2.0]]


def apart_and_together() -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(model_of())
    seen = []
    with accelerator.no_sync(model):
        accelerator.backward(model(inputs_of(accelerator)).sum())
    seen.append(float(model.module.weight.grad))
    assert model.require_backward_grad_sync
    with accelerator.no_sync(model):
        loss = model(inputs_of(accelerator)).sum()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss)
    seen.append(float(model.module.weight.grad))
    accelerator.backward(model(inputs_of(accelerator)).sum())
    seen.append(float(model.module.weight.grad))
    return seen


def test_gradients_can_be_synchronised_by_hand() -> None:
    # At first, each rank keeps its own gradient (1 or 3). The second pass doubles the gradients and averages them (4),
    # and the third adds the average of one batch (2).
    assert run_ranks(apart_and_together) == [[1.0, 4.0, 6.0], [3.0, 4.0, 6.0]]


def uneven_inputs() -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(model_of())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = accelerator.prepare(DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=2))
    counts = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for (inputs,) in batches:
            optimizer.zero_grad()
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            counts += 1
    assert batches.batch_sampler.even_batches
    return counts, model.module.weight.item()


def test_ranks_may_have_different_numbers_of_batches() -> None:
    (first, weight), (second, other) = run_ranks(uneven_inputs)
    assert (first, second) == (2, 1)
    assert weight == other
    # In the last step, one rank has no batch, so its gradient counts as zero.
    assert weight == pytest.approx(1.0 - 0.1 * 2 - 0.1 * 1)


def frozen_model() -> Any:
    accelerator = Accelerator()
    model = model_of()
    model.weight.requires_grad_(False)
    evaluated = accelerator.prepare_model(model_of(), evaluation_mode=True)
    return type(accelerator.prepare(model)).__name__, type(evaluated).__name__


def test_models_without_trainable_parameters_are_not_wrapped() -> None:
    assert run_ranks(frozen_model) == [("Linear", "Linear")] * 2


def prepared_before() -> Any:
    """Prepare a model and a loader without other ranks, as in a kernel, and then prepare the results on two ranks."""
    import os

    world = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    alone = Accelerator()
    data = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    model, batches = alone.prepare(model_of(), data)
    reset_shared_state()
    os.environ.update(world)
    accelerator = Accelerator()
    model, batches = accelerator.prepare(model, batches)
    return isinstance(model, DistributedDataParallel), [batch[0].tolist() for batch in batches]


def test_objects_prepared_alone_are_prepared_again_for_all_ranks() -> None:
    first, second = run_ranks(prepared_before)
    assert first == (True, [[0, 1], [4, 5]])
    assert second == (True, [[2, 3], [6, 7]])


def comm_hook(name: str, wrapper: str) -> Any:
    handler = DistributedDataParallelKwargs(
        comm_hook=name,  # type: ignore[arg-type]
        comm_wrapper=wrapper,  # type: ignore[arg-type]
        comm_state_option={"matrix_approximation_rank": 1, "start_powerSGD_iter": 2} if "power" in name else {},
    )
    torch.manual_seed(0)
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = accelerator.prepare(nn.Linear(4, 4))
    torch.manual_seed(accelerator.process_index)
    for _ in range(4):
        model.zero_grad()
        accelerator.backward(model(torch.randn(8, 4)).pow(2).mean())
    return [parameter.grad.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        ("fp16", "no"),
        ("power_sgd", "no"),
        ("power_sgd", "fp16"),
        ("batched_power_sgd", "no"),
    ],
)
def test_communication_hooks_approximate_the_exact_gradients(name: str, wrapper: str) -> None:
    first, second = run_ranks(comm_hook, name, wrapper)
    assert first == second
    plain = run_ranks(comm_hook, "no", "no")[0]
    tolerance = 0.01 if "power" not in name else 1.0
    for mine, exact in zip(first, plain, strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(exact), atol=tolerance)


@pytest.mark.skipif(dist.is_nccl_available(), reason="a torch with NCCL has this hook, for gloo too")
def test_a_hook_that_this_device_lacks_is_refused() -> None:
    with pytest.raises(RankError, match="on CPU pass comm_hook='fp16' or 'power_sgd'"):
        run_ranks(comm_hook, "bf16", "no")


# ---- metrics


class Stream(IterableDataset[torch.Tensor]):
    """A dataset without a length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.samples):
            yield torch.tensor(index)


def metrics(samples: int, batch_size: int, kind: str, dispatch: bool | None, split: bool) -> Any:
    config = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
    accelerator = Accelerator(dataloader_config=config)
    data: Any = Stream(samples) if kind == "stream" else torch.arange(samples)
    batches = accelerator.prepare(DataLoader(data, batch_size=batch_size))
    tensors, objects = [], []
    for batch in batches:
        gathered = accelerator.gather_for_metrics({"x": batch, "y": [batch * 2]})
        assert torch.equal(gathered["x"] * 2, gathered["y"][0])
        tensors += gathered["x"].tolist()
        objects += accelerator.gather_for_metrics([str(int(value)) for value in batch])
        forced = accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
        assert forced == gathered["x"].tolist()
    return sorted(tensors), sorted(map(int, objects))


@pytest.mark.parametrize(
    ("kind", "dispatch", "split"),
    [
        ("map", None, False),
        ("map", None, True),
        ("map", True, False),
        ("stream", None, False),
        ("stream", False, False),
    ],
)
@pytest.mark.parametrize(("samples", "batch_size"), [(16, 4), (17, 4), (21, 4), (3, 4), (9, 2)])
def test_each_sample_counts_once(kind: str, dispatch: bool | None, split: bool, samples: int, batch_size: int) -> None:
    for tensors, objects in run_ranks(metrics, samples, batch_size, kind, dispatch, split):
        assert tensors == objects == list(range(samples))


# ---- models


def unwrapped() -> Any:
    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="eager")
    model = model_of()
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(1, 1)).dtype == torch.float32
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    compiled = accelerator.unwrap_model(prepared)
    assert compiled._orig_mod is model
    assert list(accelerator.get_state_dict(prepared)) == ["weight"]
    assert "forward" in model.__dict__
    accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    return "forward" in model.__dict__, type(prepared._orig_mod).__name__


def test_unwrapping_removes_ddp_precision_and_compilation() -> None:
    assert run_ranks(unwrapped) == [(False, "DistributedDataParallel")] * 2


def several_devices() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model.hf_device_map = {"0": "cpu", "1": "disk"}  # type: ignore[assignment]
    Accelerator().prepare(model)


def test_a_model_on_several_devices_cannot_be_wrapped() -> None:
    with pytest.raises(RankError, match="several devices cannot be trained by several processes"):
        run_ranks(several_devices)


def cannot_join() -> None:
    accelerator = Accelerator()
    with accelerator.join_uneven_inputs([3]):
        pass


def test_objects_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(RankError, match="int cannot be joined; pass prepared models"):
        run_ranks(cannot_join)


def join_a_plain_model() -> tuple[int, list[str]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(10), batch_size=2))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([nn.Linear(1, 1)], even_batches=False):
            batches = len(list(loader))
    return batches, [str(warning.message) for warning in caught]


def test_a_plain_model_has_nothing_to_join() -> None:
    (first, warned), (second, _) = run_ranks(join_a_plain_model)
    assert (first, second) == (3, 2)
    assert warned == ["join_uneven_inputs() has no effect on Linear: it is not a model from prepare()"]


def plateau() -> Any:
    accelerator = Accelerator()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.5)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    rates = []
    for _ in range(5):
        scheduler.step(1.0)
        rates.append(scheduler.get_last_lr()[0])
    cycle = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer.optimizer, 1.0, total_steps=3))
    for _ in range(4):
        optimizer.step()
        cycle.step()
    return rates, cycle.scheduler.last_epoch


def test_schedules_advance_once_per_step() -> None:
    assert run_ranks(plateau) == [([1.0, 1.0, 1.0, 0.5, 0.5], 3)] * 2


def local_sgd(enabled: bool) -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(model_of())
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=enabled) as local:
        for _ in range(3):
            accelerator.backward(model(inputs_of(accelerator)).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(round(model.module.weight.item(), 6))
    return [*seen, round(model.module.weight.item(), 6)]


def test_local_sgd_averages_parameters_periodically() -> None:
    # The ranks take steps of 0.1 and 0.3. Their parameters are averaged after the second step and at the end.
    assert run_ranks(local_sgd, True) == [[0.9, 0.6, 0.5, 0.4], [0.7, 0.6, 0.3, 0.4]]
    assert run_ranks(local_sgd, False) == [[0.8, 0.6, 0.4, 0.4]] * 2


def local_sgd_fails() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(model_of())
    with LocalSGD(accelerator, model, 2):
        raise ZeroDivisionError("mine") if accelerator.is_main_process else ZeroDivisionError("theirs")


def test_local_sgd_does_not_hide_an_error() -> None:
    with pytest.raises(RankError, match=r"ZeroDivisionError: (mine|theirs)"):
        run_ranks(local_sgd_fails)
    reset_shared_state()  # An earlier test in this process may have left a process group behind.
    with pytest.raises(ValueError, match="local_sgd_steps=0"):
        LocalSGD(Accelerator(cpu=True), model_of(), 0)
    reset_shared_state()


def profiled(folder: str) -> Any:
    from notebook_accelerate.config.kwargs_handlers import ProfileKwargs

    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile():
        torch.ones(2).sum()
    return sorted(path.name for path in Path(folder).iterdir())


def test_each_rank_leaves_a_trace(tmp_path: Path) -> None:
    assert run_ranks(profiled, str(tmp_path)) == [["profile_0.json", "profile_1.json"]] * 2
