from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from notebook_accelerate.accelerator import Accelerator
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.enums import DistributedType, FP8BackendType, PrecisionType
from notebook_accelerate.config.kwargs_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from notebook_accelerate.config.low_precision import AORecipeKwargs
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.scheduler import AcceleratedScheduler
from notebook_accelerate.state import AcceleratorState, GradientState, reset_shared_state
from notebook_accelerate.utils import DeepSpeedOptimizerWrapper, has_compiled_regions


def loader(samples: int = 12, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples, dtype=torch.float32)[:, None]), batch_size=batch_size)


def parts(**kwargs: Any) -> tuple[Any, ...]:
    accelerator = Accelerator(cpu=True, **kwargs)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return accelerator, *accelerator.prepare(model, optimizer, loader(), scheduler)


def dtypes_of(accelerator: Accelerator) -> list[torch.dtype]:
    """Return the dtypes that a layer computes in: first in a prepared model, and then under `autocast`."""
    found: list[torch.dtype] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output.dtype))
    accelerator.prepare_model(nn.Sequential(layer))(torch.ones(1, 2))
    with accelerator.autocast():
        layer(torch.ones(1, 2))
    return found


class TestWrappers:
    """Prepared optimizers and schedulers expose the attributes of the objects that they wrap."""

    def test_hooks_of_an_optimizer_run_in_real_steps(self) -> None:
        accelerator, model, optimizer, batches, _ = parts(gradient_accumulation_steps=2)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        optimizer.register_state_dict_post_hook(lambda *_: calls.append("state"))
        for (batch,) in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
        assert calls == ["before", "after"] * 3
        optimizer.state_dict()
        assert calls[-1] == "state"

    def test_attributes_of_an_optimizer_are_passed_on(self) -> None:
        _, _, optimizer, _, _ = parts()
        optimizer.optimizer.mode = "mine"
        assert optimizer.mode == "mine"
        assert copy.deepcopy(optimizer).defaults["lr"] == 0.1
        with pytest.raises(AttributeError, match="nonsense"):
            optimizer.nonsense  # noqa: B018 - the access is the test

    def test_attributes_of_a_scheduler_are_read_and_set(self) -> None:
        _, _, _, _, scheduler = parts()
        assert (scheduler.step_size, scheduler.last_epoch, scheduler.base_lrs) == (1, 0, [0.1])
        scheduler.gamma = 0.25
        assert scheduler.scheduler.gamma == 0.25
        scheduler.step_with_optimizer = False
        assert "step_with_optimizer" not in vars(scheduler.scheduler)
        assert pickle.loads(pickle.dumps(scheduler)).gamma == 0.25
        assert not hasattr(scheduler, "total_steps")


class TestSettings:
    def test_defaults_describe_one_process(self) -> None:
        accelerator = Accelerator(cpu=True)
        assert accelerator.distributed_type == DistributedType.NO
        assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
        assert accelerator.device == torch.device("cpu")
        assert accelerator.is_main_process
        assert accelerator.is_local_main_process
        assert accelerator.is_last_process
        assert accelerator.mixed_precision == "no"
        assert accelerator.gradient_accumulation_steps == 1
        assert accelerator.sync_gradients
        assert accelerator.scaler is None
        assert accelerator.even_batches
        assert accelerator.dispatch_batches is None
        assert not accelerator.split_batches
        assert not accelerator.use_seedable_sampler
        assert not accelerator.use_stateful_dataloader
        assert not accelerator.non_blocking
        assert not accelerator.multi_device
        assert not accelerator.use_distributed
        assert not accelerator.is_fsdp2
        assert not accelerator.optimizer_step_was_skipped
        assert accelerator.should_save_model
        assert accelerator.fp8_backend == FP8BackendType.NO
        assert accelerator.deepspeed_plugin is None
        assert accelerator.parallelism_config is None
        assert accelerator.torch_device_mesh is None
        assert accelerator.project_dir is None
        assert accelerator.save_iteration == 0
        assert "MULTI" not in repr(accelerator)

    def test_two_accumulation_settings_are_refused(self) -> None:
        with pytest.raises(ValueError, match="GradientAccumulationPlugin\\(num_steps=2\\) alone"):
            Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin())

    def test_accumulation_is_read_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
        assert Accelerator(cpu=True).gradient_accumulation_steps == 3

    def test_precision_may_be_an_enum(self) -> None:
        assert Accelerator(cpu=True, mixed_precision=PrecisionType.BF16).mixed_precision == "bf16"

    def test_a_plugin_of_another_type_is_refused_with_a_clear_error(self) -> None:
        with pytest.raises(ValueError, match="megatron_lm_plugin is a object; pass a MegatronLMPlugin"):
            Accelerator(cpu=True, megatron_lm_plugin=object())

    def test_split_batches_as_an_argument_warns(self) -> None:
        with pytest.warns(FutureWarning, match="DataLoaderConfiguration\\(split_batches=True\\)"):
            assert Accelerator(cpu=True, split_batches=True).split_batches

    def test_handlers_are_sorted(self) -> None:
        handlers = [AutocastKwargs(cache_enabled=False), GradScalerKwargs(init_scale=8.0), ProfileKwargs()]
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
        assert accelerator.autocast_handler is handlers[0]
        assert accelerator.scaler_handler is handlers[1]
        assert accelerator.profile_handler is handlers[2]
        assert accelerator.ddp_handler is None
        assert accelerator.scaler.get_scale() == 8.0

    @pytest.mark.parametrize(
        ("name", "handler"),
        [
            ("ddp_handler", DistributedDataParallelKwargs(find_unused_parameters=True)),
            ("autocast_handler", AutocastKwargs(enabled=False)),
            ("scaler_handler", GradScalerKwargs()),
            ("init_handler", InitProcessGroupKwargs()),
            ("profile_handler", ProfileKwargs()),
        ],
    )
    def test_handlers_are_assigned(self, name: str, handler: Any) -> None:
        accelerator = Accelerator(cpu=True)
        setattr(accelerator, name, handler)
        assert getattr(accelerator, name) is handler
        setattr(accelerator, name, None)
        assert getattr(accelerator, name) is None
        with pytest.raises(
            ValueError, match=rf"{name} takes {type(handler).__name__}\(\.\.\.\) or None; got int \(3\)"
        ):
            setattr(accelerator, name, 3)

    def test_an_assigned_autocast_handler_is_used(self) -> None:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        accelerator.autocast_handler = AutocastKwargs(enabled=False)
        assert dtypes_of(accelerator) == [torch.float32] * 2

    def test_fp8_recipes_are_assigned_by_class(self) -> None:
        pytest.importorskip("torchao")
        accelerator = Accelerator(cpu=True, mixed_precision="fp8")
        assert isinstance(accelerator.ao_recipe_handler, AORecipeKwargs)
        assert accelerator.te_recipe_handler is None
        assert accelerator.msamp_recipe_handler is None
        assert accelerator.fp8_recipe_handler is None
        assert accelerator.fp8_enabled
        recipe = AORecipeKwargs(pad_inner_dim=False)
        accelerator.ao_recipe_handler = recipe
        accelerator.te_recipe_handler = None
        assert accelerator.ao_recipe_handler is recipe
        with pytest.raises(ValueError, match=r"ao_recipe_handler cannot become None: .* fp8 library AO"):
            accelerator.ao_recipe_handler = None

    def test_a_recipe_for_another_precision_is_refused(self) -> None:
        pytest.importorskip("torchao")
        accelerator = Accelerator(cpu=True)
        accelerator.fp8_recipe_handler = None
        with pytest.raises(ValueError, match=r"write Accelerator\(mixed_precision='fp8', kwargs_handlers=\[AORecipe"):
            accelerator.ao_recipe_handler = AORecipeKwargs()

    def test_autocast_can_be_switched_off(self) -> None:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        assert accelerator.native_amp
        accelerator.native_amp = False
        assert dtypes_of(accelerator) == [torch.float32] * 2

    def test_autocast_can_be_switched_on(self) -> None:
        accelerator = Accelerator(cpu=True)
        assert not accelerator.native_amp
        accelerator.native_amp = True
        assert dtypes_of(accelerator) == [torch.get_autocast_dtype("cpu")] * 2

    def test_private_names_that_libraries_call_exist(self) -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare_model(nn.Linear(1, 1))
        assert list(accelerator._get_named_parameters(model)) == ["weight", "bias"]
        assert accelerator._get_named_parameters(model, drop_refs=True)["bias"] == model.bias.data_ptr()
        assert accelerator._prepare_deepspeed(model) == (model,)
        assert accelerator._prepare_device_mesh() is None
        counted = []
        for _ in range(4):
            accelerator._do_sync()
            counted.append(accelerator.sync_gradients)
        assert counted == [False, True, False, True]

    def test_two_handlers_of_one_class_are_refused(self) -> None:
        with pytest.raises(ValueError, match="two AutocastKwargs"):
            Accelerator(cpu=True, kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])

    def test_an_object_that_is_not_a_handler_is_refused(self) -> None:
        with pytest.raises(ValueError, match="kwargs_handlers contains 3, which is not one of"):
            Accelerator(cpu=True, kwargs_handlers=[3])  # type: ignore[list-item]

    def test_project_folders_come_from_either_argument(self, tmp_path: Path) -> None:
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
        config = ProjectConfiguration(logging_dir="logs")
        accelerator = Accelerator(cpu=True, project_config=config, project_dir=tmp_path)
        assert (accelerator.project_dir, accelerator.logging_dir) == (str(tmp_path), "logs")

    def test_two_settings_of_compilation_are_refused(self) -> None:
        with pytest.raises(ValueError, match="dynamo_plugin and dynamo_backend were both given"):
            Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(), dynamo_backend="eager")

    def test_a_second_accelerator_gets_its_settings_and_does_not_change_the_first(self) -> None:
        first = Accelerator(cpu=True)
        model = first.prepare(nn.Linear(1, 1))
        with pytest.warns(UserWarning, match="mixed_precision from no to bf16") as caught:
            second = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        assert len(caught) == 1
        assert (first.mixed_precision, second.mixed_precision) == ("no", "bf16")
        assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (1, 2)
        second.sync_gradients = False
        assert first.sync_gradients
        assert "forward" not in model.__dict__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Accelerator(cpu=True).mixed_precision == "bf16"  # Settings that are not passed stay as they are.
        assert AcceleratorState().mixed_precision == "bf16"

    def test_parallel_ranks_need_a_layout(self) -> None:
        accelerator = Accelerator(cpu=True)
        for name in ("tensor", "pipeline", "context", "data"):
            with pytest.raises(RuntimeError, match="parallelism_config=ParallelismConfig"):
                getattr(accelerator, f"{name}_parallel_rank")
        with accelerator.maybe_context_parallel():
            pass


class TestPrepare:
    def test_objects_are_prepared_in_any_order(self) -> None:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        batches, prepared_scheduler, nothing, prepared_model, prepared_optimizer = accelerator.prepare(
            loader(), scheduler, None, model, optimizer
        )
        assert nothing is None
        assert prepared_model is model
        assert isinstance(prepared_optimizer, AcceleratedOptimizer)
        assert isinstance(prepared_optimizer, torch.optim.Optimizer)
        assert isinstance(prepared_scheduler, AcceleratedScheduler)
        assert prepared_scheduler.optimizers == [prepared_optimizer]
        assert isinstance(batches, DataLoader)
        assert accelerator._models == [model]
        assert accelerator._optimizers == [prepared_optimizer]
        assert accelerator._schedulers == [prepared_scheduler]
        assert accelerator._dataloaders == [batches]

    def test_unknown_objects_are_returned_as_they_are(self) -> None:
        accelerator = Accelerator(cpu=True)
        tokens = [1, 2]
        model, same, nothing = accelerator.prepare(nn.Linear(1, 1), tokens, None)
        assert same is tokens
        assert nothing is None
        assert accelerator._models == [model]

    def test_a_wrong_number_of_placements_is_refused(self) -> None:
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ValueError, match="device_placement has 1 items for 2 objects"):
            accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True])
        assert accelerator._models == []

    def test_preparing_after_a_reset_of_the_state(self) -> None:
        accelerator = Accelerator(cpu=True)
        reset_shared_state()
        with pytest.raises(AttributeError, match="the state was reset"):
            accelerator.prepare(nn.Linear(1, 1))

    def test_a_model_on_the_meta_device_is_refused(self) -> None:
        with pytest.raises(ValueError, match="parameters without values \\(weight, bias"):
            Accelerator(cpu=True).prepare(nn.Linear(1, 1, device="meta"))

    def test_preparing_twice_changes_nothing(self) -> None:
        accelerator, model, optimizer, batches, scheduler = parts()
        again = accelerator.prepare(model, optimizer, batches, scheduler)
        assert all(new is old for new, old in zip(again, (model, optimizer, batches, scheduler), strict=True))
        assert len(accelerator._models) == len(accelerator._optimizers) == len(accelerator._dataloaders) == 1

    def test_objects_of_another_accelerator_are_prepared_again(self) -> None:
        _, model, optimizer, batches, scheduler = parts(mixed_precision="bf16")
        with pytest.warns(UserWarning, match="mixed_precision from bf16 to no"):
            second = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=2)
        model, optimizer, batches, scheduler = second.prepare(model, optimizer, batches, scheduler)
        assert not isinstance(optimizer.optimizer, AcceleratedOptimizer)
        assert not isinstance(scheduler.scheduler, AcceleratedScheduler)
        assert scheduler.optimizers == [optimizer]
        assert batches.gradient_state is optimizer.gradient_state is second.gradient_state
        assert model(torch.ones(1, 1)).dtype == torch.float32
        assert "forward" not in model.__dict__

    def test_evaluation_mode_keeps_a_model_out_of_checkpoints(self) -> None:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
        assert accelerator._models == []
        assert model(torch.ones(1, 1)).shape == (1, 1)

    def test_free_memory_drops_prepared_objects(self) -> None:
        accelerator, model, optimizer, *_ = parts()
        model, optimizer = accelerator.free_memory(model, optimizer)
        assert model is None
        assert optimizer is None
        assert (
            accelerator._models == accelerator._optimizers == accelerator._dataloaders == accelerator._schedulers == []
        )

    def test_the_scheduler_of_a_prepared_optimizer_is_found(self) -> None:
        accelerator, _, optimizer, *_ = parts()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        prepared = accelerator.prepare_scheduler(scheduler)
        assert prepared.optimizers == [optimizer]
        optimizer.step()
        prepared.step()
        assert prepared.get_last_lr() == [0.05]


class TestAccumulation:
    def steps(self, accelerator: Accelerator, model: Any, batches: Any, between: Any = None) -> list[bool]:
        flags = []
        for batch in batches:
            if between is not None:
                between()
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[0]).sum())
            flags.append(accelerator.sync_gradients)
        return flags

    def test_the_last_window_may_be_short(self) -> None:
        accelerator, model, _, batches, _ = parts(gradient_accumulation_steps=4)
        assert self.steps(accelerator, model, batches) == [False, False, False, True, False, True]
        assert self.steps(accelerator, model, batches) == [False, False, False, True, False, True]

    def test_windows_may_span_the_end_of_the_loader(self) -> None:
        plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
        accelerator, model, _, batches, _ = parts(gradient_accumulation_plugin=plugin)
        assert self.steps(accelerator, model, batches) == [False, False, False, True, False, False]
        assert self.steps(accelerator, model, batches) == [False, True, False, False, False, True]

    def test_an_evaluation_in_between_changes_nothing(self) -> None:
        accelerator, model, _, batches, _ = parts(gradient_accumulation_steps=4)
        other = accelerator.prepare(loader(3))

        def evaluate_all() -> None:
            for _ in other:
                pass

        def evaluate_some() -> None:
            for _ in other:
                break

        for between in (evaluate_all, evaluate_some):
            assert self.steps(accelerator, model, batches, between) == [False, False, False, True, False, True]

    def test_optimizer_and_scheduler_wait_for_the_window(self) -> None:
        accelerator, model, optimizer, batches, scheduler = parts(gradient_accumulation_steps=2)
        rates, weights, cleared = [], [], []
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[0]).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(round(scheduler.get_last_lr()[0], 6))
            weights.append(model.weight.item())
            cleared.append(model.weight.grad is None)
        assert rates == [0.1, 0.01, 0.01, 0.001, 0.001, 0.0001]
        assert cleared == [False, True] * 3
        assert len(set(weights)) == 4
        assert optimizer.step_was_skipped is False

    def test_the_loss_is_divided(self) -> None:
        accelerator, model, *_ = parts(gradient_accumulation_steps=4)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.bias.grad.item() == 0.25
        accelerator.gradient_accumulation_steps = 2
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.bias.grad.item() == 0.75
        with pytest.raises(ValueError, match="num_steps=0 is not allowed"):
            accelerator.gradient_accumulation_steps = 0

    def test_a_scheduler_can_be_independent_of_the_optimizer(self) -> None:
        accelerator, _, optimizer, _, scheduler = parts(
            gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
        )
        optimizer.step()
        accelerator.sync_gradients = False
        scheduler.step()
        assert scheduler.get_last_lr() == [0.1 * 0.1]

    def test_no_sync_works_in_one_process(self) -> None:
        accelerator, model, *_ = parts()
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
        with accelerator.trigger_sync_in_backward(model), accelerator.join_uneven_inputs([model]):
            accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.bias.grad.item() == 2.0

    @pytest.mark.parametrize("adjust", [True, False])
    def test_a_schedule_steps_once_per_window(self, adjust: bool) -> None:
        """With either setting, the scheduler makes twelve steps in twelve windows of four batches.

        Accelerate 1.15 has the same rates: its plugin passes on adjust_scheduler only if it differs from the default,
        which is True, so its scheduler never sees True.
        """
        settings = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=adjust)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=settings)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=12)
        model, prepared, schedule = accelerator.prepare(model, optimizer, cycle)
        rates = [schedule.get_last_lr()[0]]
        for _ in range(48):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                prepared.step()
                schedule.step()
                prepared.zero_grad()
            rates.append(schedule.get_last_lr()[0])
        alone = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        reference = torch.optim.lr_scheduler.OneCycleLR(alone, 1.0, total_steps=12)
        expected = [reference.get_last_lr()[0]]
        for _ in range(11):
            alone.step()
            reference.step()
            expected.append(reference.get_last_lr()[0])
        assert rates[:48:4] == expected
        assert all(rates[4 * window : 4 * window + 4] == [expected[window]] * 4 for window in range(12))

    def test_adjust_scheduler_counts_every_batch(self) -> None:
        """If a library sets this flag itself, the count changes after each batch, and the rate after each window."""
        accelerator, model, optimizer, _, scheduler = parts(gradient_accumulation_steps=3)
        GradientState().plugin_kwargs["adjust_scheduler"] = True
        counts, rates = [scheduler.scheduler._step_count], [scheduler.get_last_lr()[0]]
        for _ in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                scheduler.step()
            counts.append(scheduler.scheduler._step_count)
            rates.append(round(scheduler.get_last_lr()[0], 6))
        assert counts == [1, 2, 3, 4, 5, 6, 7]
        assert rates == [0.1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.001]


class TestOptimizer:
    def test_the_wrapper_shows_the_optimizers_attributes(self) -> None:
        _, _, optimizer, *_ = parts()
        assert optimizer.param_groups is optimizer.optimizer.param_groups
        assert optimizer.defaults["lr"] == 0.1
        assert optimizer.state is optimizer.optimizer.state
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert len(optimizer.param_groups) == 2
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        optimizer.train()
        optimizer.eval()
        again = pickle.loads(pickle.dumps(optimizer))
        assert again.param_groups[0]["lr"] == 0.1
        assert copy.deepcopy(optimizer).state_dict().keys() == state.keys()
        assert "AcceleratedOptimizer" in repr(optimizer)

    @pytest.mark.parametrize("wrapper", [AcceleratedOptimizer, DeepSpeedOptimizerWrapper])
    def test_the_mode_of_an_optimizer_inside_an_engines_optimizer_is_switched(self, wrapper: Any) -> None:
        class ScheduleFree(torch.optim.SGD):
            mode = "new"

            def train(self) -> None:
                self.mode = "train"

            def eval(self) -> None:
                self.mode = "eval"

        class Engine(torch.optim.SGD):
            def __init__(self, optimizer: torch.optim.Optimizer) -> None:
                super().__init__(optimizer.param_groups)
                self.optimizer = optimizer

        Accelerator(cpu=True)
        inner = ScheduleFree(nn.Linear(1, 1).parameters())
        for outer in (inner, Engine(inner)):
            prepared = wrapper(outer)
            prepared.train()
            assert inner.mode == "train"
            prepared.eval()
            assert inner.mode == "eval"

    def test_a_closure_is_called(self) -> None:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        optimizer = accelerator.prepare(torch.optim.LBFGS(model.parameters(), max_iter=2))
        calls = []

        def closure() -> torch.Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).pow(2).sum()
            accelerator.backward(loss)
            return loss

        assert optimizer.step(closure).item() >= 0
        assert len(calls) >= 2

    def test_zero_grad_passes_its_argument(self) -> None:
        _, model, optimizer, *_ = parts()
        model.weight.grad = torch.ones(1, 1)
        optimizer.zero_grad(set_to_none=False)
        assert model.weight.grad.item() == 0

    def test_a_scheduler_created_later_still_sees_the_steps(self, recwarn: pytest.WarningsRecorder) -> None:
        _, _, optimizer, *_ = parts()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
        optimizer.step()
        scheduler.step()
        assert [str(warning.message) for warning in recwarn if "lr_scheduler.step" in str(warning.message)] == []


class TestScaler:
    def test_an_overflow_skips_optimizer_and_schedule(self) -> None:
        handlers = [GradScalerKwargs(init_scale=4.0)]
        accelerator, model, optimizer, _, scheduler = parts(mixed_precision="fp16", kwargs_handlers=handlers)
        before = model.weight.item()
        accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
        optimizer.step()
        scheduler.step()
        assert accelerator.optimizer_step_was_skipped
        assert model.weight.item() == before
        assert scheduler.get_last_lr() == [0.1]
        assert accelerator.scaler.get_scale() == 2.0
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        accelerator.unscale_gradients()
        assert model.bias.grad.item() == 1.0
        optimizer.step()
        scheduler.step()
        assert not accelerator.optimizer_step_was_skipped
        assert model.weight.item() != before
        assert scheduler.get_last_lr() == [0.1 * 0.1]

    def test_clipping_unscales_first(self) -> None:
        handlers = [GradScalerKwargs(init_scale=1024.0)]
        accelerator, model, *_ = parts(mixed_precision="fp16", kwargs_handlers=handlers)
        accelerator.backward(model(torch.ones(1, 1)).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.item() == pytest.approx(2**0.5, rel=1e-3)
        assert model.bias.grad.item() == pytest.approx(0.5**0.5, rel=1e-3)

    def test_clipping_by_value(self) -> None:
        accelerator, model, *_ = parts()
        accelerator.backward(model(torch.ones(1, 1)).sum() * 3)
        accelerator.clip_grad_value_(model.parameters(), 0.5)
        assert model.bias.grad.item() == 0.5


class TestModels:
    def test_unwrapping_removes_the_precision_wrapper(self) -> None:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = nn.Linear(2, 2)
        prepared = accelerator.prepare(model)
        inputs = torch.randn(1, 2)
        expected = nn.functional.linear(inputs.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16()).float()
        assert torch.equal(prepared(inputs), expected)
        assert accelerator.unwrap_model(prepared) is model
        assert "forward" in model.__dict__
        bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert bare is model
        assert "forward" not in model.__dict__
        assert "_original_forward" not in model.__dict__

    def test_a_model_in_mixed_precision_pickles_and_copies(self) -> None:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(nn.Linear(2, 2))
        inputs = torch.randn(1, 2)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(inputs), model(inputs))
        assert copied.forward.model_forward.__self__ is copied
        copied.weight.data.zero_()
        assert not torch.equal(copied(inputs), model(inputs))
        text = pickle.dumps(model)
        assert b"notebook_accelerate" not in text
        plain = nn.Linear(2, 2)
        plain.load_state_dict(model.state_dict())
        # The unpickled model computes in full precision, as with Accelerate.
        assert torch.equal(pickle.loads(text)(inputs), plain(inputs))

    def test_compiled_models_can_be_unwrapped(self) -> None:
        accelerator = Accelerator(cpu=True, dynamo_backend="eager")
        model = nn.Linear(2, 2)
        compiled = accelerator.prepare(model)
        assert compiled is not model
        assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
        assert accelerator.unwrap_model(compiled) is compiled
        assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model
        assert list(accelerator.get_state_dict(compiled)) == ["weight", "bias"]

    def test_blocks_are_compiled_by_region(self) -> None:
        plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)  # type: ignore[arg-type]
        accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
        model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        prepared = accelerator.prepare(model)
        assert prepared is model
        assert has_compiled_regions(model)
        assert [block._compiled_call_impl is not None for block in (*model[1], model[0])] == [True, True, True]
        assert torch.equal(model[1][0](torch.ones(1, 2)), model[1][0].forward(torch.ones(1, 2)))
        assert list(accelerator.get_state_dict(model)) == ["0.weight", "0.bias"] + [
            f"1.{index}.{name}" for index in (0, 1) for name in ("weight", "bias")
        ]

    def test_device_maps_are_verified(self) -> None:
        accelerator = Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        assert not accelerator.verify_device_map(model)
        model.hf_device_map = {"0": "cpu", "1": "disk"}
        assert accelerator.verify_device_map(model)

    def test_autocast_uses_the_precision_or_a_handler(self) -> None:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        left = torch.ones(2, 2)
        with accelerator.autocast():
            assert (left @ left).dtype == torch.bfloat16
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (left @ left).dtype == torch.float32

    def test_objects_for_checkpoints_are_registered(self) -> None:
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ValueError, match="1 of 2 do not have them: int"):
            accelerator.register_for_checkpointing(nn.Linear(1, 1), 3)
        model = nn.Linear(1, 1)
        accelerator.register_for_checkpointing(model)
        assert accelerator._custom_objects == [model]

    def test_hooks_can_be_removed(self) -> None:
        accelerator = Accelerator(cpu=True)
        handle = accelerator.register_save_state_pre_hook(lambda *_: None)
        other = accelerator.register_load_state_pre_hook(lambda *_: None)
        assert len(accelerator._save_model_state_pre_hook) == len(accelerator._load_model_state_pre_hook) == 1
        handle.remove()
        other.remove()
        assert not accelerator._save_model_state_pre_hook
        assert not accelerator._load_model_state_pre_hook

    def test_lomo_optimizers_step_in_backward(self) -> None:
        class Lomo(torch.optim.SGD):
            calls: ClassVar[list[tuple[float, float]]] = []

            def fused_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
                self.calls.append((loss.item(), learning_rate))

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match="Lomo"):
            accelerator.lomo_backward(torch.ones(1), 0.1)
        accelerator.prepare(Lomo([nn.Parameter(torch.ones(1))], lr=1.0))
        assert accelerator.has_lomo_optimizer
        accelerator.backward(torch.tensor(4.0), learning_rate=0.3)
        assert Lomo.calls == [(2.0, 0.3)]


class TestOthers:
    def test_a_trigger_is_reset_when_read(self) -> None:
        accelerator = Accelerator(cpu=True)
        assert not accelerator.check_trigger()
        accelerator.set_trigger()
        assert accelerator.check_trigger()
        assert not accelerator.check_trigger()

    def test_profile_writes_a_trace(self, tmp_path: Path) -> None:
        handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        with accelerator.profile() as profiler:
            torch.ones(2) @ torch.ones(2)
        assert "aten::dot" in {event.key for event in profiler.key_averages()}
        assert (tmp_path / "traces" / "profile_0.json").stat().st_size > 100

    def test_metrics_of_one_process_are_unchanged(self) -> None:
        accelerator = Accelerator(cpu=True)
        data = {"a": torch.ones(2)}
        assert accelerator.gather_for_metrics(data) is data
        assert accelerator.gather_for_metrics(["x"], use_gather_object=True) == ["x"]
        assert accelerator.gather(data) is data
        assert accelerator.reduce(data) is data
        assert accelerator.pad_across_processes(data) is data

    def test_processes_are_trivial_on_one_rank(self, capsys: pytest.CaptureFixture[str]) -> None:
        accelerator = Accelerator(cpu=True)
        with accelerator.split_between_processes([1, 2]) as share:
            assert share == [1, 2]
        with accelerator.main_process_first(), accelerator.local_main_process_first():
            accelerator.print("once")
        assert accelerator.on_main_process(lambda: 3)() == 3
        assert capsys.readouterr().out == "once\n"
        accelerator.wait_for_everyone()
        accelerator.end_training()

    def test_batches_can_be_skipped(self) -> None:
        accelerator, _, _, batches, _ = parts()
        rest = accelerator.skip_first_batches(batches, 4)
        assert [batch[0].flatten().tolist() for batch in rest] == [[8, 9], [10, 11]]

    def test_a_loader_configuration_reaches_the_loaders(self) -> None:
        config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data = TensorDataset(torch.arange(8))
        orders = []
        for _ in range(2):
            prepared = accelerator.prepare(DataLoader(data, batch_size=8, shuffle=True))
            orders.append(next(iter(prepared))[0].tolist())
        assert orders[0] == orders[1] != sorted(orders[0])

    def test_an_unused_ddp_handler_is_accepted(self) -> None:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
        assert accelerator.prepare(nn.Linear(1, 1)) is not None

    def test_a_new_gradient_state_has_the_shared_state(self) -> None:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
        assert GradientState().num_steps == 3
        accelerator.sync_gradients = False
        assert GradientState().sync_gradients is False
