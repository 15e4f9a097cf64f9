"""Accelerate's guides to DeepSpeed with real DeepSpeed on the CPU, where Accelerate supports only one process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, utils
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, is_deepspeed_available
from torch import nn

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import loader, raised

ZERO3 = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
ZERO3 |= {"stage3_param_persistence_threshold": "auto"}
BATCHES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True}}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
DECAY = {"type": "WarmupDecayLR", "params": WARMUP}


class Sized(nn.Sequential):
    """A model whose configuration may contain a hidden size, which the guide requires."""

    def __init__(self, **sizes: Any) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.config = SimpleNamespace(**sizes)


def _on_cpu() -> None:
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops

    # Compiling this operator takes minutes, and nothing uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _config(stage: int = 2, **more: Any) -> dict[str, Any]:
    return {**BATCHES, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage}, **more}


def _accelerator(plugin: Any, **settings: Any) -> Any:
    _on_cpu()
    return Accelerator(deepspeed_plugin=plugin, **settings)


def _adam(net: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), **{"lr": 0.05, **settings})


def _train(accelerator: Any, net: Any, opt: Any, batches: Any, schedule: Any = None) -> Any:
    losses, rates = [], []
    for inputs, targets in batches:
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(inputs), targets)
            accelerator.backward(loss)
            opt.step()
            if schedule is not None:
                schedule.step()
                rates.append(schedule.get_last_lr())
            opt.zero_grad()
        losses.append(loss.item())
    return losses, rates


def _by_plugin(stage: int, steps: int = 1) -> Any:
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1.0, gradient_accumulation_steps=steps)
    accelerator = _accelerator(plugin)
    net = Sized(hidden_size=4)
    opt = _adam(net)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.9)
    net, opt, batches, schedule = accelerator.prepare(net, opt, loader(16), schedule)
    kinds = accelerator.distributed_type == DistributedType.DEEPSPEED, type(net).__name__, len(batches)
    return kinds, _train(accelerator, net, opt, batches, schedule)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def stage_1_of_a_plugin() -> Any:
    return _by_plugin(1)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def stage_2_of_a_plugin() -> Any:
    return _by_plugin(2)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def stage_3_of_a_plugin() -> Any:
    return _by_plugin(3)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def stage_2_accumulates() -> Any:
    return _by_plugin(2, steps=2)


# ---- configuration files


def _by_file(config: dict[str, Any], opt: Any = None, schedule: Any = None, **settings: Any) -> Any:
    """Train with a configuration file. Return losses, rates and the values that replaced `auto`."""
    Path("ds.json").write_text(json.dumps(config))
    accelerator = _accelerator(DeepSpeedPlugin(hf_ds_config="ds.json"), **settings)
    net = Sized(hidden_size=4)
    opt = utils.DummyOptim(net.parameters(), lr=0.05, weight_decay=0.1) if opt is None else opt(net)
    parts = [net, opt, loader(16)]
    if schedule is not None:
        parts.append(schedule(opt))
    prepared = accelerator.prepare(*parts)
    found = accelerator.state.deepspeed_plugin.deepspeed_config
    values = {name: found.get(name) for name in (*BATCHES, "gradient_clipping", "optimizer", "scheduler")}
    return _train(accelerator, *prepared), values, accelerator.gradient_accumulation_steps


def _dummy_schedule(opt: Any) -> Any:
    return utils.DummyScheduler(opt, total_num_steps=8, warmup_num_steps=2)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def optimizer_and_scheduler_of_the_file() -> Any:
    return _by_file(_config(optimizer=ADAM, scheduler=DECAY), schedule=_dummy_schedule)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def optimizer_and_scheduler_of_the_script() -> Any:
    return _by_file(_config(), opt=_adam, schedule=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5))


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def scheduler_of_the_file_alone() -> Any:
    return _by_file(_config(scheduler=DECAY), opt=_adam, schedule=_dummy_schedule)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def optimizer_of_the_file_with_a_schedule_of_the_script() -> Any:
    def schedule(_: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(_adam(nn.Linear(2, 2)), 1)

    return raised(lambda: _by_file(_config(optimizer=ADAM), schedule=schedule))


@program(ranks=1, needs="deepspeed")
def optimizer_of_the_script_beside_that_of_the_file() -> Any:
    return raised(lambda: _by_file(_config(optimizer=ADAM), opt=_adam))


@program(ranks=1, needs="deepspeed")
def placeholder_without_an_optimizer_in_the_file() -> Any:
    return raised(lambda: _by_file(_config()))


@program(ranks=1, needs="deepspeed")
def placeholder_without_a_scheduler_in_the_file() -> Any:
    return raised(lambda: _by_file(_config(optimizer=ADAM), schedule=_dummy_schedule))


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def steps_of_the_accelerator_where_the_file_says_auto() -> Any:
    return _by_file(_config(), opt=_adam, gradient_accumulation_steps=2)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def steps_of_the_file_win() -> Any:
    return _by_file({**_config(), "gradient_accumulation_steps": 4}, opt=_adam, gradient_accumulation_steps=2)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def steps_of_the_plugin_win() -> Any:
    accelerator = _accelerator(DeepSpeedPlugin(gradient_accumulation_steps=4), gradient_accumulation_steps=2)
    net = Sized(hidden_size=4)
    accelerator.prepare(net, _adam(net), loader())
    return accelerator.gradient_accumulation_steps


@program(ranks=1, needs="deepspeed")
def clipping_that_nothing_names() -> Any:
    accelerator = _accelerator(DeepSpeedPlugin())
    net = Sized(hidden_size=4)
    accelerator.prepare(net, _adam(net), loader())
    return accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"]


def _buckets(**sizes: Any) -> Any:
    accelerator = _accelerator(DeepSpeedPlugin(hf_ds_config={**_config(), "zero_optimization": dict(ZERO3)}))
    net = Sized(**sizes)
    accelerator.prepare(net, _adam(net), loader())
    zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    return {name: zero[name] for name in ZERO3}


@program(ranks=1, needs="deepspeed")
def buckets_follow_the_hidden_size() -> Any:
    return _buckets(hidden_size=10)


@program(ranks=1, needs="deepspeed")
def buckets_follow_the_largest_hidden_size() -> Any:
    return _buckets(hidden_sizes=[4, 20])


@program(ranks=1, needs="deepspeed")
def buckets_without_a_hidden_size() -> Any:
    return raised(lambda: _buckets(other=1))


def _from_environment(config: dict[str, Any], in_file: bool = False, **fields: str) -> Any:
    """Start like a launch with a configuration file. The fields stand for options on the command line."""
    _on_cpu()
    Path("ds.json").write_text(json.dumps(config))
    names = {"mixed_precision": "ACCELERATE_MIXED_PRECISION", "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING"}
    names |= {"gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"}
    for name, value in fields.items():
        os.environ[names.get(name, f"ACCELERATE_DEEPSPEED_{name.upper()}")] = value
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}
    os.environ["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields) if in_file else ""
    accelerator = Accelerator()
    found = accelerator.state.deepspeed_plugin.deepspeed_config
    zero = found["zero_optimization"]
    names_of_zero = ("stage", "stage3_gather_16bit_weights_on_model_save", "offload_optimizer", "offload_param")
    values = {name: found.get(name) for name in (*BATCHES, "gradient_clipping", "bf16", "fp16")}
    devices = {name: value["device"] if isinstance(value := zero.get(name), dict) else value for name in names_of_zero}
    return values, devices, accelerator.mixed_precision


COMPLETE = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    },
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 10,
}
OPEN = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto"},
        "offload_param": {"device": "auto"},
    },
    "gradient_clipping": "auto",
    **BATCHES,
}
FIELDS = {"zero_stage": "3", "offload_param_device": "cpu", "offload_optimizer_device": "nvme"}
FIELDS |= {"gradient_accumulation_steps": "5", "gradient_clipping": "1.0"}


@program(ranks=1, needs="deepspeed")
def fields_beside_a_complete_file() -> Any:
    return raised(lambda: _from_environment(COMPLETE, True, **FIELDS))


@program(ranks=1, needs="deepspeed")
def a_complete_file() -> Any:
    return _from_environment(COMPLETE)


@program(ranks=1, needs="deepspeed")
def fields_fill_an_open_file() -> Any:
    os.environ["ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"] = "true"
    return _from_environment(OPEN, mixed_precision="bf16", **FIELDS)


@program(ranks=1, needs="deepspeed")
def an_open_file_without_fields() -> Any:
    return raised(lambda: _from_environment(OPEN))


# ---- saving, loading, evaluation


def _trained(stage: int, save_16bit: bool = False) -> Any:
    plugin = DeepSpeedPlugin(zero_stage=stage, zero3_save_16bit_model=save_16bit, gradient_clipping=1.0)
    accelerator = _accelerator(plugin)
    net = Sized(hidden_size=4)
    net, opt, batches = accelerator.prepare(net, _adam(net), loader(8))
    _train(accelerator, net, opt, batches)
    return accelerator, net, opt, batches


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def weights_of_stage_2() -> Any:
    accelerator, net, *_ = _trained(2)
    return accelerator.get_state_dict(net), sorted(accelerator.unwrap_model(net).state_dict())


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def weights_of_stage_3() -> Any:
    accelerator, net, *_ = _trained(3, save_16bit=True)
    return accelerator.get_state_dict(net)


@program(ranks=1, needs="deepspeed")
def weights_of_stage_3_that_may_not_be_gathered() -> Any:
    accelerator, net, *_ = _trained(3)
    return raised(lambda: accelerator.get_state_dict(net))


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def a_state_of_stage_3_resumes() -> Any:
    accelerator, net, opt, batches = _trained(3)
    accelerator.save_state("../state")
    first = _train(accelerator, net, opt, batches)
    accelerator.load_state("../state")
    return first, _train(accelerator, net, opt, batches)


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def full_weights_from_the_engines_checkpoint() -> Any:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    accelerator, net, *_ = _trained(3)
    done = net.save_checkpoint("../saved", "here", {"epoch": 3})
    accelerator.wait_for_everyone()
    script = (Path("../saved") / "zero_to_fp32.py").exists()
    return done, script, dict(get_fp32_state_dict_from_zero_checkpoint("../saved"))


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def evaluation_alone_in_stage_3() -> Any:
    accelerator = _accelerator(DeepSpeedPlugin(zero_stage=3))
    net, batches = accelerator.prepare(Sized(hidden_size=4), loader(6))
    net.eval()
    with torch.no_grad():
        return type(net).__name__, torch.cat([accelerator.gather_for_metrics(net(inputs)) for inputs, _ in batches])


@program(ranks=1, needs="deepspeed")
def a_model_without_a_loader() -> Any:
    accelerator = _accelerator(DeepSpeedPlugin(hf_ds_config=_config(3)))
    return raised(lambda: type(accelerator.prepare(Sized(hidden_size=4))).__name__)


@program(ranks=1, needs="deepspeed")
def a_model_with_a_micro_batch_size() -> Any:
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    accelerator = _accelerator(DeepSpeedPlugin(hf_ds_config=config))
    return type(accelerator.prepare(Sized(hidden_size=4))).__name__


@program(ranks=1, needs="deepspeed")
def two_models_at_once() -> Any:
    accelerator = _accelerator(DeepSpeedPlugin())
    return raised(lambda: len(accelerator.prepare(Sized(), Sized(), loader())))


# ---- several plugins


def _plugins() -> dict[str, Any]:
    teacher = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    return {"student": DeepSpeedPlugin(hf_ds_config=_config()), "teacher": DeepSpeedPlugin(hf_ds_config=teacher)}


@program(ranks=1, needs="deepspeed")
def the_first_plugin_is_active() -> Any:
    from accelerate.utils.deepspeed import get_active_deepspeed_plugin

    plugins = _plugins()
    accelerator = _accelerator(plugins)
    found = [get_active_deepspeed_plugin(accelerator.state) is plugins["student"]]
    found.append(accelerator.deepspeed_plugin is plugins["student"])
    found.append(accelerator.state.get_deepspeed_plugin("teacher") is plugins["teacher"])
    accelerator.state.select_deepspeed_plugin("teacher")
    found += [get_active_deepspeed_plugin(AcceleratorState()) is plugins["teacher"], plugins["student"].selected]
    absent = raised(lambda: accelerator.state.select_deepspeed_plugin("absent"))
    return found, absent, raised(lambda: plugins["student"].select())


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def a_student_learns_from_a_teacher() -> Any:
    accelerator = _accelerator(_plugins())
    net = Sized(hidden_size=4)
    net, opt, batches = accelerator.prepare(net, _adam(net), loader(8))
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(Sized(hidden_size=4))
    teacher.eval()
    losses = []
    for inputs, _ in batches:
        with torch.no_grad():
            targets = teacher(inputs) + 1
        loss = nn.functional.mse_loss(net(inputs), targets)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@program(ranks=1, needs="deepspeed", tolerance=1e-5)
def two_accelerators_train_two_models() -> Any:
    plugins = {"first": DeepSpeedPlugin(hf_ds_config=_config(2)), "second": DeepSpeedPlugin(hf_ds_config=_config(1))}
    one = _accelerator(plugins)
    other = Accelerator()
    net = Sized(hidden_size=4)
    net, opt, batches = one.prepare(net, _adam(net), loader(8))
    other.state.select_deepspeed_plugin("second")
    second = Sized(hidden_size=4)
    second, second_opt = other.prepare(second, _adam(second, lr=0.2))
    losses = []
    for inputs, targets in batches:
        for accelerator, each, its in ((one, net, opt), (other, second, second_opt)):
            loss = nn.functional.mse_loss(each(inputs), targets)
            accelerator.backward(loss)
            its.step()
            its.zero_grad()
            losses.append(loss.item())
    return losses, other.deepspeed_plugin is plugins["second"], raised(lambda: Accelerator(deepspeed_plugin=plugins))


@program(ranks=1, needs="deepspeed")
def placeholders() -> Any:
    opt = utils.DummyOptim([nn.Parameter(torch.ones(2))], lr=0.5, weight_decay=0.1, extra=3)
    schedule = utils.DummyScheduler(opt, total_num_steps=5, warmup_num_steps=2, lr_scheduler_callable=len)
    return is_deepspeed_available(), vars(opt)["kwargs"], opt.lr, schedule.total_num_steps, schedule.optimizer is opt
