"""Prepared objects keep the protocols of the originals: copies, pickles, classes, attributes and hooks."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.parity.behaviour.program_table import program
from tests.parity.behaviour.programs._parts import Net, data, files, loader, model, parts, raised, train

Prepared = tuple[Any, Any, Any, Any, Any]
INPUTS = torch.arange(6.0).view(2, 3)


def _prepared(**settings: Any) -> Prepared:
    accelerator = Accelerator(**settings)
    return accelerator, *accelerator.prepare(*parts())


def _trained(**settings: Any) -> Prepared:
    prepared = _prepared(**settings)
    train(*prepared)
    return prepared


def _output(net: Any) -> Any:
    net.eval()
    with torch.no_grad():
        return net(INPUTS)


def deepcopy_of_the_model() -> Any:
    _, net, *_ = _trained()
    copied = copy.deepcopy(net)
    return type(copied), _output(copied), copied.first.weight is net.first.weight


def deepcopy_of_the_unwrapped_model() -> Any:
    accelerator, net, *_ = _trained()
    copied = copy.deepcopy(accelerator.unwrap_model(net))
    return type(copied), _output(copied), copied.extra()


def deepcopy_of_the_model_in_bf16() -> Any:
    accelerator, net, *_ = _trained(mixed_precision="bf16")
    copied = copy.deepcopy(accelerator.unwrap_model(net))
    return type(copied), _output(copied), _output(copy.deepcopy(net))


def a_copy_in_bf16_computes_with_its_own_weights() -> Any:
    accelerator, net, *_ = _trained(mixed_precision="bf16")
    copied = copy.deepcopy(net)
    before = _output(copied)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    return torch.equal(before, _output(copied)), "_original_forward" in vars(copied)


def averaged_model() -> Any:
    accelerator, net, opt, batches, _ = _prepared()
    average = AveragedModel(accelerator.unwrap_model(net), multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for inputs, targets in batches:
        accelerator.backward(nn.functional.mse_loss(net(inputs), targets))
        opt.step()
        average.update_parameters(net)
    return _output(average), average.n_averaged


def averaged_model_in_bf16() -> Any:
    accelerator, net, *_ = _trained(mixed_precision="bf16")
    average = AveragedModel(accelerator.unwrap_model(net))
    average.update_parameters(accelerator.unwrap_model(net))
    return _output(average)


@program(ranks=2)
def deepcopy_on_two_ranks() -> Any:
    accelerator, net, *_ = _trained()
    copied = copy.deepcopy(accelerator.unwrap_model(net))
    whole = copy.deepcopy(net)
    return type(copied), _output(copied), type(whole), _output(whole)


@program(ranks=2)
def averaged_model_on_two_ranks() -> Any:
    accelerator, net, *_ = _trained()
    average = AveragedModel(accelerator.unwrap_model(net))
    average.update_parameters(net.module)
    return _output(average)


@program(ranks=2)
def pickle_of_ddp_in_bf16() -> Any:
    accelerator, net, *_ = _trained(mixed_precision="bf16")
    return _output(pickle.loads(pickle.dumps(accelerator.unwrap_model(net))))


@program(ranks=2)
def attributes_of_a_ddp_model() -> Any:
    accelerator, net, *_ = _prepared()
    return type(net), raised(lambda: net.extra()), net.module.extra(), list(net.state_dict()), net.training


@program(ranks=2)
def unwrapping_twice() -> Any:
    accelerator, net, *_ = _prepared()
    once = accelerator.unwrap_model(net)
    return type(once), accelerator.unwrap_model(once) is once, net.module is once


def shallow_copy_of_the_model() -> Any:
    _, net, *_ = _trained()
    copied = copy.copy(net)
    return type(copied), _output(copied), copied.first is net.first


def pickle_of_the_model() -> Any:
    _, net, *_ = _trained()
    return _output(pickle.loads(pickle.dumps(net)))


def pickle_of_the_model_in_bf16() -> Any:
    _, net, *_ = _trained(mixed_precision="bf16")
    return _output(pickle.loads(pickle.dumps(net)))


def pickle_of_the_unwrapped_model_in_bf16() -> Any:
    accelerator, net, *_ = _trained(mixed_precision="bf16")
    inner = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    return _output(pickle.loads(pickle.dumps(inner)))


def torch_save_of_the_model() -> Any:
    _, net, *_ = _trained()
    torch.save(net, "whole.pt")
    return _output(torch.load("whole.pt", weights_only=False))


def torch_save_of_the_model_in_bf16() -> Any:
    accelerator, net, *_ = _trained(mixed_precision="bf16")
    torch.save(accelerator.unwrap_model(net), "whole.pt")
    return _output(torch.load("whole.pt", weights_only=False))


def torch_save_of_the_state_dicts() -> Any:
    _, *prepared = _trained()
    torch.save([each.state_dict() for each in prepared if hasattr(each, "state_dict")], "states.pt")
    return torch.load("states.pt", weights_only=False)


def classes_of_the_prepared() -> Any:
    _, *prepared = _prepared()
    net, opt, batches, schedule = prepared
    kinds = (nn.Module, torch.optim.Optimizer, DataLoader, torch.optim.lr_scheduler.LRScheduler, Net)
    return [[isinstance(each, kind) for kind in kinds] for each in prepared], [type(each) for each in prepared]


def named_modules_of_the_model() -> Any:
    _, net, *_ = _prepared()
    return [(name, type(each)) for name, each in net.named_modules()], [name for name, _ in net.named_children()]


def hooks_of_the_model() -> Any:
    _, net, *_ = _prepared()
    seen: list[str] = []
    net.register_forward_hook(lambda *_: seen.append("forward"))
    net.register_forward_pre_hook(lambda *_: seen.append("pre"))
    net.register_full_backward_hook(lambda *_: seen.append("backward"))
    net.first.register_forward_hook(lambda *_: seen.append("inner"))
    net(INPUTS).sum().backward()
    return seen, len(net._forward_hooks)


def hooks_of_the_model_in_bf16() -> Any:
    _, net, *_ = _prepared(mixed_precision="bf16")
    seen: list[Any] = []
    net.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    net.first.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    net(INPUTS)
    return seen, net.first.weight.dtype


def attributes_of_the_model() -> Any:
    _, net, *_ = _prepared()
    net.note = "changed"
    net.added = 1
    return net.extra(), net.added, raised(lambda: net.absent), hasattr(net, "forward"), repr(net).splitlines()[0]


def the_model_is_changed_in_place() -> Any:
    accelerator = Accelerator()
    net = model()
    prepared = accelerator.prepare(net)
    return prepared is net, sorted(set(vars(net)) - set(vars(model())))


def the_model_is_changed_in_place_in_bf16() -> Any:
    accelerator = Accelerator(mixed_precision="bf16")
    net = model()
    prepared = accelerator.prepare(net)
    return prepared is net, sorted(set(vars(net)) - set(vars(model()))), net.forward is prepared.forward


def forward_replaced_by_the_user() -> Any:
    net = model()
    original = net.forward
    net.forward = lambda inputs: original(inputs) * 0  # type: ignore[method-assign]
    accelerator = Accelerator(mixed_precision="bf16")
    prepared = accelerator.prepare(net)
    return _output(prepared), _output(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False))


def forward_of_the_wrapped_model() -> Any:
    accelerator = Accelerator(mixed_precision="bf16")
    net = accelerator.prepare(model())
    inner = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    return inner(INPUTS).dtype, inner.forward.__name__, "_original_forward" in vars(inner)


def signature_of_the_wrapped_forward() -> Any:
    import inspect

    net = Accelerator(mixed_precision="bf16").prepare(model())
    return inspect.signature(net.forward), net.forward.__name__


def unwrap_keeps_the_wrapper() -> Any:
    accelerator = Accelerator(mixed_precision="bf16")
    net = accelerator.prepare(model())
    kept = accelerator.unwrap_model(net)
    return kept is net, kept(INPUTS).dtype, accelerator.unwrap_model(net, False)(INPUTS).dtype


def optimizer_is_an_optimizer() -> Any:
    _, _, opt, _, _ = _trained()
    return isinstance(opt, torch.optim.Optimizer), type(opt.optimizer), opt.param_groups[0]["lr"], len(opt.state)


def optimizer_attributes() -> Any:
    _, _, opt, _, _ = _prepared()
    names = ("defaults", "param_groups", "state", "step_was_skipped", "optimizer", "scaler", "device_placement")
    return [hasattr(opt, name) for name in names], raised(lambda: opt.absent), callable(opt.register_step_post_hook)


def optimizer_private_attributes() -> Any:
    _, _, opt, _, _ = _prepared()
    return [
        raised(lambda name=name: type(getattr(opt, name)).__name__)
        for name in ("_optimizer_step_pre_hooks", "_zero_grad_profile_name")
    ]


def optimizer_step_hooks() -> Any:
    _, net, opt, batches, _ = _prepared()
    seen: list[str] = []
    opt.optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    net(INPUTS).sum().backward()
    opt.step()
    return seen


def optimizer_state_dict_hooks() -> Any:
    _, _, opt, _, _ = _trained()
    seen: list[str] = []
    opt.optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    opt.state_dict()
    return seen


def optimizer_pickles() -> Any:
    _, _, opt, _, _ = _trained()
    loaded = pickle.loads(pickle.dumps(opt))
    return type(loaded), loaded.state_dict(), loaded.step_was_skipped


def optimizer_deepcopies() -> Any:
    _, _, opt, _, _ = _trained()
    copied = copy.deepcopy(opt)
    return type(copied), copied.state_dict()


def optimizer_torch_save() -> Any:
    _, _, opt, _, _ = _trained()
    torch.save(opt, "optimizer.pt")
    return torch.load("optimizer.pt", weights_only=False).state_dict()


def optimizer_text() -> Any:
    _, _, opt, _, _ = _prepared()
    return type(repr(opt)), "lr: 0.1" in repr(opt)


def optimizer_closure() -> Any:
    accelerator, net, _, batches, _ = _prepared()
    opt = accelerator.prepare(torch.optim.LBFGS(net.parameters(), max_iter=2))
    inputs, targets = next(iter(batches))

    def closure() -> Any:
        opt.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        accelerator.backward(loss)
        return loss

    return opt.step(closure), dict(net.named_parameters())


def optimizer_zero_grad_arguments() -> Any:
    accelerator, net, opt, batches, _ = _prepared()
    found = []
    for keep in (None, True, False):
        net(INPUTS).sum().backward()
        opt.zero_grad(set_to_none=keep)
        found.append(net.first.weight.grad)
    return found


def optimizer_step_returns() -> Any:
    _, net, opt, _, _ = _prepared()
    net(INPUTS).sum().backward()
    return opt.step(), opt.step(None)


def optimizer_add_param_group() -> Any:
    _, _, opt, _, _ = _prepared()
    more = nn.Parameter(torch.ones(1))
    opt.add_param_group({"params": [more], "lr": 0.5})
    return [group["lr"] for group in opt.param_groups], len(opt.optimizer.param_groups)


def optimizer_setters() -> Any:
    _, _, opt, _, _ = _prepared()
    opt.defaults = {"lr": 1}
    opt.param_groups = []
    opt.state = {}
    return opt.optimizer.defaults, opt.optimizer.param_groups, opt.optimizer.state


def schedulers_take_a_prepared_optimizer() -> Any:
    _, net, opt, batches, _ = _prepared()
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    for _ in range(3):
        net(INPUTS).sum().backward()
        opt.step()
        schedule.step()
    return schedule.get_last_lr(), opt.param_groups[0]["lr"]


def one_cycle_on_a_prepared_optimizer() -> Any:
    _, net, opt, _, _ = _prepared()
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.5, total_steps=5)
    rates = []
    for _ in range(5):
        net(INPUTS).sum().backward()
        opt.step()
        schedule.step() if len(rates) < 4 else None
        rates.append(schedule.get_last_lr())
    return rates


def scheduler_attributes() -> Any:
    *_, schedule = _prepared()
    names = ("base_lrs", "last_epoch", "optimizer", "optimizers", "scheduler", "step_with_optimizer", "split_batches")
    return [hasattr(schedule, name) for name in names], raised(lambda: schedule.gamma), raised(lambda: schedule.absent)


def scheduler_pickles() -> Any:
    *_, schedule = _trained()
    loaded = pickle.loads(pickle.dumps(schedule))
    return type(loaded), loaded.get_last_lr(), loaded.state_dict()


def scheduler_deepcopies() -> Any:
    *_, schedule = _trained()
    return copy.deepcopy(schedule).get_last_lr()


def scheduler_is_a_scheduler() -> Any:
    *_, schedule = _prepared()
    return isinstance(schedule, torch.optim.lr_scheduler.LRScheduler), schedule.scheduler.__class__


def loader_attributes() -> Any:
    _, _, _, batches, _ = _prepared()
    names = (
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "num_workers",
        "collate_fn",
        "pin_memory",
        "drop_last",
    )
    names += ("timeout", "worker_init_fn", "generator", "prefetch_factor", "persistent_workers", "device")
    names += (
        "total_batch_size",
        "total_dataset_length",
        "end_of_dataloader",
        "remainder",
        "iteration",
        "gradient_state",
    )
    names += (
        "multiprocessing_context",
        "skip_batches",
        "rng_types",
        "synchronized_generator",
        "use_stateful_dataloader",
    )
    return {name: raised(lambda name=name: type(getattr(batches, name)).__name__) for name in names}


def loader_values() -> Any:
    _, _, _, batches, _ = _prepared()
    return [batches.batch_size, len(batches), batches.total_batch_size, batches.total_dataset_length, batches.remainder]


def loader_pickles() -> Any:
    _, _, _, batches, _ = _prepared()
    return len(list(pickle.loads(pickle.dumps(batches))))


def loader_deepcopies() -> Any:
    _, _, _, batches, _ = _prepared()
    return list(copy.deepcopy(batches))


def loader_copies() -> Any:
    _, _, _, batches, _ = _prepared()
    return list(copy.copy(batches))


def loader_set_attribute() -> Any:
    _, _, _, batches, _ = _prepared()
    batches.note = 1
    found = [batches.note]
    for name, value in (
        ("batch_size", 3),
        ("dataset", data()),
        ("sampler", None),
        ("num_workers", 0),
        ("collate_fn", list),
    ):
        found.append(raised(lambda name=name, value=value: setattr(batches, name, value)))
    return found


def loader_is_not_indexable() -> Any:
    _, _, _, batches, _ = _prepared()
    return raised(lambda: batches[0]), raised(lambda: next(batches)), raised(lambda: batches.absent)


def loader_weakrefs() -> Any:
    prepared = _prepared()
    return [weakref.ref(each)() is each for each in prepared]


def two_iterators_of_one_loader() -> Any:
    _, _, _, batches, _ = _prepared()
    return [[a, b] for a, b in zip(batches, batches, strict=True)]


def the_accelerator_pickles() -> Any:
    return raised(lambda: type(pickle.loads(pickle.dumps(Accelerator()))).__name__)


def the_accelerator_deepcopies() -> Any:
    return raised(lambda: type(copy.deepcopy(Accelerator())).__name__)


def the_states_pickle() -> Any:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    Accelerator()
    return [type(pickle.loads(pickle.dumps(kind()))) for kind in (PartialState, AcceleratorState, GradientState)]


def equality_and_hashes() -> Any:
    prepared = _prepared()
    return [each == each for each in prepared], [isinstance(hash(each), int) for each in prepared]  # noqa: PLR0124


def lambda_as_model_attribute_pickles_as_before() -> Any:
    net = Accelerator().prepare(model())
    net.note = "x"
    return pickle.loads(pickle.dumps(net)).extra()


def compiled_model_keeps_its_state_dict() -> Any:
    accelerator = Accelerator(dynamo_backend="eager")
    net = accelerator.prepare(model())
    return (
        type(net),
        list(net.state_dict()),
        type(accelerator.unwrap_model(net)),
        type(accelerator.unwrap_model(net, keep_torch_compile=False)),
    )


def compiled_model_deepcopies() -> Any:
    accelerator = Accelerator(dynamo_backend="eager")
    net = accelerator.prepare(model())
    return _output(copy.deepcopy(accelerator.unwrap_model(net, keep_torch_compile=False)))


def jit_script_of_the_unwrapped_model() -> Any:
    accelerator = Accelerator()
    net = accelerator.prepare(nn.Sequential(nn.Linear(3, 2)))
    return torch.jit.script(accelerator.unwrap_model(net))(INPUTS)


def dataparallel_like_wrappers_are_unwrapped() -> Any:
    from accelerate.utils import extract_model_from_parallel

    net = model()
    wrapped = nn.DataParallel(net)
    return extract_model_from_parallel(wrapped) is net, extract_model_from_parallel(net) is net


def recursive_unwrapping() -> Any:
    from accelerate.utils import extract_model_from_parallel

    net = nn.Sequential(nn.DataParallel(nn.Linear(3, 2)), nn.ReLU())
    return [type(each) for each in extract_model_from_parallel(net, recursive=True)]


def has_compiled_regions_and_kin() -> Any:
    from accelerate.utils import is_compiled_module
    from accelerate.utils.other import has_compiled_regions

    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    compiled = torch.compile(nn.Linear(3, 2), backend="eager")
    return [
        is_compiled_module(net),
        is_compiled_module(compiled),
        has_compiled_regions(net),
        has_compiled_regions(nn.Sequential(compiled)),
    ]


def optimizer_trains_in_ordinary_torch_loop() -> Any:
    _, net, opt, batches, schedule = _prepared()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for inputs, targets in batches:
        scaler.scale(nn.functional.mse_loss(net(inputs), targets)).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return dict(net.named_parameters())


def swa_scheduler_on_a_prepared_optimizer() -> Any:
    from torch.optim.swa_utils import SWALR

    _, net, opt, _, _ = _prepared()
    schedule = SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    rates: list[Callable[[], Any] | Any] = []
    for _ in range(3):
        net(INPUTS).sum().backward()
        opt.step()
        schedule.step()
        rates.append(opt.param_groups[0]["lr"])
    return rates


def saved_whole_objects() -> Any:
    accelerator, net, *_ = _trained()
    accelerator.save(accelerator.unwrap_model(net), "net.pt")
    accelerator.save(net.state_dict(), "state.pt")
    accelerator.save(net.state_dict(), "state.safetensors", safe_serialization=True)
    return sorted(files()), torch.load("state.pt", weights_only=True), _output(torch.load("net.pt", weights_only=False))


def a_prepared_loader_prepared_by_another_accelerator() -> Any:
    _, _, _, batches, _ = _prepared()
    again = Accelerator().prepare(batches)
    return again is batches, len(list(again)), len(list(loader()))
