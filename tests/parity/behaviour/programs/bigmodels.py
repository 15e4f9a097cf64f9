"""Models larger than a device: their sizes, device maps, offloading, loading and saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import (
    Accelerator,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    utils,
)
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from torch import nn

from tests.parity.behaviour.programs._parts import Net, files, logged, model, raised

INPUTS = torch.arange(6.0).view(2, 3)


class Three(nn.Module):
    """Three linear layers of 200, 80 and 160 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(10, 4)
        self.linear2 = nn.Linear(4, 4)
        self.linear3 = nn.Linear(4, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear3(self.linear2(self.linear1(inputs)))


def _nested() -> nn.Module:
    outer = nn.Module()
    outer.module = Three()
    return outer


def _tied() -> nn.Module:
    net = Three()
    net.linear4 = nn.Linear(4, 4)
    net.linear4.weight = net.linear2.weight
    return net


CALLS = [
    "utils.compute_module_sizes(model())",
    "utils.compute_module_sizes(model(), dtype=torch.float16)",
    "utils.compute_module_sizes(model(), dtype='float16')",
    "utils.compute_module_sizes(model(), buffers_only=True)",
    "utils.compute_module_sizes(model(), special_dtypes={'first.weight': torch.float64})",
    "[(name, tensor.shape) for name, tensor in utils.named_module_tensors(model().norm)]",
    "[name for name, _ in utils.named_module_tensors(model(), recurse=True)]",
    "[name for name, _ in utils.named_module_tensors(model(), include_buffers=False, recurse=True)]",
    "utils.get_max_layer_size(list(model().named_children()), utils.compute_module_sizes(model()), [])",
    "utils.get_max_layer_size([('', model())], utils.compute_module_sizes(model()), ['Net'])",
    "utils.get_balanced_memory(Three(), {0: 300, 1: 300})",
    "utils.get_balanced_memory(Three(), {0: 300, 1: 300, 'cpu': 100})",
    "utils.get_balanced_memory(Three(), {0: 300, 1: 300}, low_zero=True)",
    "utils.get_balanced_memory(Three(), {0: 0, 1: 300})",
    "utils.get_balanced_memory(Three(), {'cpu': 100})",
    "infer_auto_device_map(Three(), {0: 1000})",
    "infer_auto_device_map(Three(), {0: 300, 1: 300})",
    "infer_auto_device_map(Three(), {0: 300, 'cpu': 200})",
    "infer_auto_device_map(Three(), {0: 300})",
    "infer_auto_device_map(Three(), {0: 300.5, 'cpu': 1e4})",
    "infer_auto_device_map(Three(), {0: 0, 'cpu': 10000})",
    "infer_auto_device_map(Three(), {'cpu': 10000})",
    "infer_auto_device_map(Three(), {0: '1KB', 'cpu': '1GB'})",
    "infer_auto_device_map(Three(), {0: 200}, dtype=torch.float16)",
    "infer_auto_device_map(Three(), {0: 600}, no_split_module_classes='Three')",
    "infer_auto_device_map(nn.Sequential(Three(), Three()), {0: 600, 1: 900}, no_split_module_classes=['Three'])",
    "infer_auto_device_map(nn.Sequential(Three(), Three()), {0: 900, 1: 900})",
    "infer_auto_device_map(Three(), {0: 500}, clean_result=False)",
    "infer_auto_device_map(Three(), {0: 300}, offload_buffers=True)",
    "infer_auto_device_map(Three(), {0: 300}, reserve_max_layer=False)",
    "infer_auto_device_map(_tied(), {0: 500, 'cpu': 1000})",
    "infer_auto_device_map(_tied(), {0: 250, 'cpu': 1000})",
    "sorted(infer_auto_device_map(_nested(), {0: 256}, fallback_allocation=True).items())",
    "infer_auto_device_map(_nested(), {0: 256}, fallback_allocation=False)",
    "sorted(infer_auto_device_map(_nested(), {0: 10}, fallback_allocation=True).items())",
    "sorted(infer_auto_device_map(_nested(), {0: 256, 1: 256}, fallback_allocation=True).items())",
    "sorted(infer_auto_device_map(Three(), {0: 256}, fallback_allocation=True).items())",
    "sorted(infer_auto_device_map(nn.Sequential(Three(), Three()), {0: 600, 'cpu': 300}, fallback_allocation=True).items())",
    "logged(lambda: infer_auto_device_map(_nested(), {0: 10}, fallback_allocation=True))",
    "logged(lambda: infer_auto_device_map(_nested(), {0: 10}))",
    "logged(lambda: infer_auto_device_map(_nested(), {0: 256}))",
    "logged(lambda: infer_auto_device_map(_nested(), {0: 256}, fallback_allocation=True))",
    "_empty()",
    "_empty(include_buffers=True)",
    "_on_meta()",
    "init_empty_weights().__enter__()",
    "_run(cpu_offload(model(), torch.device('cpu')))",
    "_run(cpu_offload(model(), torch.device('cpu'), offload_buffers=True))",
    "_run(disk_offload(model(), 'off', torch.device('cpu')))",
    "sorted(files('off')) if _run(disk_offload(model(), 'off', torch.device('cpu'))) is not None else None",
    "_run(dispatch_model(model(), {'first': 'cpu', 'norm': 'cpu', 'second': 'disk'}, main_device='cpu', offload_dir='off'))",
    "_run(dispatch_model(model(), {'': 'cpu'}))",
    "_run(dispatch_model(model(), {'': 'disk'}, offload_dir='off'))",
    "dispatch_model(model(), {'': 'disk'})",
    "dispatch_model(model(), {'first': 'cpu'})",
    "dispatch_model(model(), {'first': 'cpu', 'norm': 'cpu', 'second': 'cpu'}).hf_device_map",
    "raised(lambda: dispatch_model(model(), {'first': 'cpu', 'norm': 'cpu', 'second': 'disk'}, offload_dir='off').to('cpu'))",
    "raised(lambda: dispatch_model(model(), {'first': 'cpu', 'norm': 'cpu', 'second': 'disk'}, offload_dir='off').cuda())",
    "logged(lambda: dispatch_model(model(), {'first': 'cpu', 'norm': 'cpu', 'second': 'disk'}, offload_dir='off').to('cpu'))",
    "utils.set_module_tensor_to_device(net := model(), 'first.weight', 'meta'), net.first.weight.device",
    "utils.set_module_tensor_to_device(net := model(), 'first.weight', 'cpu', value=torch.zeros(4, 3)), net.first.weight",
    "utils.set_module_tensor_to_device(net := model(), 'first.weight', 'cpu', value=torch.zeros(4, 3), dtype=torch.float16), net.first.weight",
    "utils.set_module_tensor_to_device(model(), 'first.weight', 'cpu', value=torch.zeros(2))",
    "utils.set_module_tensor_to_device(model(), 'first.absent', 'cpu')",
    "utils.set_module_tensor_to_device(model(), 'absent.weight', 'cpu')",
    "utils.set_module_tensor_to_device(_empty(), 'first.weight', 'cpu')",
    "utils.load_state_dict(_weights('x.safetensors'))",
    "utils.load_state_dict(_weights('x.safetensors'), device_map={'': 'cpu'})",
    "utils.load_state_dict(_weights('x.bin'))",
    "utils.has_offloaded_params(cpu_offload(nn.Linear(2, 2), torch.device('cpu')))",
    "_aligned()",
    "_retied()",
    "_weak()",
]


def _run(net: nn.Module) -> Any:
    net.eval()
    with torch.no_grad():
        return net(INPUTS)


def _empty(**settings: Any) -> nn.Module:
    with init_empty_weights(**settings):
        return Net()


def _on_meta() -> Any:
    with init_on_device(torch.device("meta"), include_buffers=True):
        net = Net()
    return net, [each.device.type for each in net.buffers()]


def _weights(name: str) -> str:
    Accelerator().save(model().state_dict(), name, safe_serialization=name.endswith("safetensors"))
    return name


def _aligned() -> Any:
    net = cpu_offload(model(), torch.device("cpu"))
    before = net.first.weight.device.type
    with utils.align_module_device(net.first):
        inside = net.first.weight.clone()
    return before, inside, net.first.weight.device.type


def _retied() -> Any:
    net = _tied()
    names = utils.find_tied_parameters(net)
    net.linear4.weight = nn.Parameter(torch.zeros(4, 4))
    utils.retie_parameters(net, names)
    return net.linear4.weight is net.linear2.weight


def _weak() -> Any:
    with init_empty_weights():
        net = _tied()
    net.tie_weights = lambda: None
    return utils.check_tied_parameters_in_config(net)


def index_that_is_the_map_itself() -> Any:
    weights = model().state_dict()
    names = list(weights)
    torch.save({name: weights[name] for name in names[:3]}, "a.bin")
    torch.save({name: weights[name] for name in names[3:]}, "b.bin")
    table = {name: "a.bin" if name in names[:3] else "b.bin" for name in names}
    Path("weights.index.json").write_text(json.dumps(table))
    net = Net()
    load_checkpoint_in_model(net, "weights.index.json")
    return net


def index_with_a_weight_map_in_a_folder() -> Any:
    Accelerator().save_model(model(), "saved", max_shard_size=100)
    net = Net()
    load_checkpoint_in_model(net, "saved")
    other = load_checkpoint_and_dispatch(Net(), "saved/model.safetensors.index.json", device_map={"": "cpu"})
    return net, other, files("saved")


def _unexpected() -> nn.Module:
    torch.save({**model().state_dict(), "absent.weight": torch.ones(1)}, "weights.bin")
    return Net()


def unexpected_keys() -> Any:
    net = _unexpected()
    return logged(lambda: load_checkpoint_in_model(net, "weights.bin")), net


def unexpected_keys_when_strict() -> Any:
    net = _unexpected()
    return raised(lambda: load_checkpoint_in_model(net, "weights.bin", strict=True))


def unexpected_keys_of_a_dispatched_model() -> Any:
    net = _unexpected()
    found = logged(lambda: load_checkpoint_and_dispatch(net, "weights.bin", device_map={"": "cpu"}))
    return found, raised(lambda: load_checkpoint_and_dispatch(Net(), "weights.bin", {"": "cpu"}, strict=True))


def missing_keys() -> Any:
    state = model().state_dict()
    state.pop("first.weight")
    torch.save(state, "weights.bin")
    torch.manual_seed(3)
    return raised(lambda: load_checkpoint_in_model(Net(), "weights.bin")), raised(
        lambda: load_checkpoint_in_model(Net(), "weights.bin", strict=True)
    )


def checkpoints_that_do_not_exist() -> Any:
    Path("empty").mkdir()
    calls = ("absent", "empty", "absent.bin")
    return [raised(lambda each=each: load_checkpoint_in_model(Net(), each)) for each in calls]


def checkpoints_in_another_dtype() -> Any:
    torch.save(model().state_dict(), "weights.bin")
    net = Net()
    load_checkpoint_in_model(net, "weights.bin", dtype=torch.float16)
    other = load_checkpoint_and_dispatch(Net(), "weights.bin", device_map={"": "cpu"}, dtype="float16")
    return net, other


def loading_with_a_device_map_to_disk() -> Any:
    torch.save(model().state_dict(), "weights.bin")
    places = {"first": "cpu", "norm": "cpu", "second": "disk"}
    net = load_checkpoint_and_dispatch(_empty(), "weights.bin", device_map=places, offload_folder="off")
    return _run(net), sorted(files("off"))


def loading_with_automatic_maps() -> Any:
    torch.save(model().state_dict(), "weights.bin")
    found = []
    for kind in ("auto", "balanced", "balanced_low_0", "sequential"):
        net = load_checkpoint_and_dispatch(_empty(), "weights.bin", device_map=kind, max_memory={"cpu": 10000})
        found.append([_run(net), net.hf_device_map])
    return found, raised(lambda: load_checkpoint_and_dispatch(_empty(), "weights.bin", device_map="nonsense"))


def loading_without_a_folder_for_the_disk() -> Any:
    torch.save(model().state_dict(), "weights.bin")
    places = {"first": "cpu", "norm": "cpu", "second": "disk"}
    return raised(lambda: load_checkpoint_in_model(_empty(), "weights.bin", device_map=places))


def save_model_of_offloaded_models() -> Any:
    accelerator = Accelerator()
    places = {"first": "cpu", "norm": "cpu", "second": "disk"}
    accelerator.save_model(cpu_offload(model(), torch.device("cpu")), "a")
    accelerator.save_model(dispatch_model(model(), places, main_device="cpu", offload_dir="off"), "b")
    accelerator.save_model(disk_offload(model(), "off2", torch.device("cpu")), "c", max_shard_size="100KB")
    return files("a"), files("b"), files("c")


def save_model_into_the_folder_that_it_is_offloaded_to() -> Any:
    accelerator = Accelerator()
    net = disk_offload(model(), "off", torch.device("cpu"))
    accelerator.save_model(net, "off")
    again = Net()
    load_checkpoint_in_model(again, "off/model.safetensors")
    return _run(net), _run(again)


def save_model_of_a_loaded_and_offloaded_model() -> Any:
    accelerator = Accelerator()
    accelerator.save_model(model(), "saved")
    places = {"first": "cpu", "norm": "cpu", "second": "disk"}
    net = load_checkpoint_and_dispatch(_empty(), "saved", device_map=places, offload_folder="off")
    accelerator.save_model(net, "again", safe_serialization=False)
    accelerator.save_model(net, "saved")
    return _run(net), files("again"), files("saved")


def state_dict_of_an_offloaded_model() -> Any:
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    net = cpu_offload(model(), torch.device("cpu"))
    return get_state_dict_offloaded_model(net), Accelerator().get_state_dict(net)["norm.running_mean"]


def hooks_around_a_forward() -> Any:
    class Twice(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] * 2,), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output + 1

    net = model()
    plain = _run(net)
    add_hook_to_module(net, Twice())
    once = _run(net)
    add_hook_to_module(net, Twice(), append=True)
    both = _run(net)
    kind = type(net._hf_hook)
    remove_hook_from_module(net)
    return once, both, kind, torch.equal(plain, _run(net)), hasattr(net, "_hf_hook"), hasattr(net, "_old_forward")


def hooks_of_submodules() -> Any:
    net = model()
    attach_align_device_hook(net, torch.device("cpu"), offload=True)
    kinds = [type(getattr(each, "_hf_hook", None)) for each in net.modules()]
    found = _run(net)
    remove_hook_from_submodules(net)
    return kinds, found, [hasattr(each, "_hf_hook") for each in net.modules()]


def hooks_in_sequence() -> Any:
    net = model()
    hook = SequentialHook(ModelHook(), AlignDevicesHook(execution_device="cpu"))
    add_hook_to_module(net, hook)
    return _run(net), len(net._hf_hook.hooks), net._hf_hook.no_grad, list(vars(AlignDevicesHook()))[:3]


def hooks_without_gradients() -> Any:
    net = model()
    hook = ModelHook()
    hook.no_grad = True
    add_hook_to_module(net, hook)
    return net(INPUTS).requires_grad


def offload_with_a_hook() -> Any:
    first, hook = cpu_offload_with_hook(model(), "cpu")
    second, other = cpu_offload_with_hook(model(), "cpu", prev_module_hook=hook)
    found = _run(first), _run(second)
    other.offload()
    hook.remove()
    return found, type(hook), hasattr(first, "_hf_hook")


def layers_cast_by_hooks() -> Any:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(4, 4)
            self.conv = nn.Conv1d(1, 1, 1)
            self.norm = nn.LayerNorm(4)
            self.linear = nn.Linear(4, 2)
            self.skipped = nn.Linear(4, 2)

    net = Mixed()
    attach_layerwise_casting_hooks(net, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=["skip", "norm"])
    return [(name, each.dtype) for name, each in net.named_parameters()], net.linear(torch.ones(1, 4)).dtype


def layers_cast_except_of_classes() -> Any:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    attach_layerwise_casting_hooks(net, torch.bfloat16, torch.float32, skip_modules_classes=(nn.Sequential,))
    return [each.dtype for each in net.parameters()]


def prepare_of_a_dispatched_model() -> Any:
    accelerator = Accelerator()
    net = dispatch_model(model(), {"first": "cpu", "norm": "cpu", "second": "cpu"})
    return type(accelerator.prepare(net)), accelerator.verify_device_map(net)


def prepare_of_an_offloaded_model() -> Any:
    net = cpu_offload(model(), torch.device("cpu"))
    return raised(lambda: type(Accelerator().prepare(net)).__name__)


def quantization_settings() -> Any:
    from accelerate.utils import BnbQuantizationConfig

    return (
        BnbQuantizationConfig(load_in_8bit=True),
        BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        raised(lambda: BnbQuantizationConfig(load_in_8bit=True, load_in_4bit=True)),
        raised(BnbQuantizationConfig),
        raised(lambda: BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="x")),
        raised(lambda: BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=1)),
    )
