"""The estimated memory of a run by part, and the device of each module."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.hardware import nvml
from notebook_accelerate.launch.report.markup import Markup, element, join

if TYPE_CHECKING:
    from notebook_accelerate.hardware import HardwareInfo
    from notebook_accelerate.launch import LaunchPlan
    from notebook_accelerate.widgets.training_options import TrainingOptions


_COLOURS = {
    "weights": "#4269d0",
    "gradients": "#efb118",
    "optimizer": "#ff725c",
    "activations": "#6cc5b0",
    "buffers": "#9c6b4e",
    "strategy": "#9498a0",
}
_OFFLOADED = "repeating-linear-gradient(45deg, #b4b8bf 0 4px, #d0d3d8 4px 8px)"
_WIDTH = 720
"""The width of the longest bar, in pixels."""
_BOX = f"font:13px sans-serif;max-width:{_WIDTH}px"
_TRACK = "position:relative;white-space:nowrap;font-size:0;background:rgba(128,128,128,.15)"
_NOTES = "margin:4px 0 12px;padding-left:18px;opacity:.75"
_PIECE = "display:inline-block;height:18px"
_SWATCH = "display:inline-block;width:10px;height:10px;margin-right:5px"
_ENTRY = "margin-right:14px;white-space:nowrap"
_MARK = "position:absolute;top:-4px;bottom:-4px;width:2px;background:currentColor"
_BLOCK = (
    "display:inline-block;box-sizing:border-box;height:22px;line-height:22px;vertical-align:top;overflow:hidden;"
    "text-align:center;font-size:11px;border-right:1px solid #fff"
)


def estimate_html(estimate: Any, available: int | None = None) -> Markup:
    """Return an estimate as two bars with a legend, for a saved notebook.

    Args:
        estimate: The result of `estimate_memory`, whose class the kernel's side must not import.
        available: The memory of the device in bytes. If None, the estimate is not compared with it.
    """
    bars = {"training": estimate.training, "inference": estimate.inference}
    limits = dict.fromkeys(bars, available)
    if estimate.main_memory:
        bars["training, in this machine's memory"] = estimate.main_memory
    longest = max([*(sum(parts.values()) for parts in bars.values()), available or 0, 1])
    rows = [_bar(title, parts, longest, limits.get(title)) for title, parts in bars.items()]
    notes = element("ul", *(element("li", line) for line in estimate.assumptions), style=_NOTES)
    return element("div", *rows, notes, class_="na-memory", style=_BOX)


def _bar(title: str, parts: Mapping[str, int], longest: int, available: int | None) -> Markup:
    total = sum(parts.values())
    pieces, legend, label = [], [], []
    for name, size in parts.items():
        if not size:
            continue
        text, colour = f"{name} {size_text(size)}", f"background:{_COLOURS.get(name, '#97bbf5')}"
        width = f"width:{100 * size / longest:.2f}%"
        pieces.append(element("span", title=f"{name}: {size_text(size)}", style=f"{_PIECE};{width};{colour}"))
        legend.append(element("span", element("span", style=f"{_SWATCH};{colour}"), text, style=_ENTRY))
        label.append(text)
    verdict: list[str] = []
    if available is not None:
        too_much = [element("b", "does not fit"), f": {size_text(total - available)} too much"]
        verdict = [" – ", *(["fits"] if total <= available else too_much), f" in {size_text(available)}"]
    heading = [element("b", f"{title}: {size_text(total)} per rank"), *verdict]
    track = _track(heading, ", ".join(label), pieces, available, longest)
    return join([track, element("p", *legend, style="margin:4px 0 12px")])


def _track(heading: Sequence[str], label: str, pieces: Sequence[str], limit: int | None, longest: int) -> Markup:
    """Return a bar below its heading, with a line at the limit."""
    mark = Markup()
    if limit is not None:
        position = f"left:calc({100 * limit / longest:.2f}% - 1px)"
        mark = element("span", title=size_text(limit), style=f"{_MARK};{position}")
    bar = element("div", *pieces, mark, style=_TRACK, role="img", aria_label=label)
    return join([element("p", *heading, style="margin:8px 0 4px"), bar])


def device_map_html(placed: Any) -> Markup:
    """Return a device map as HTML: modules are blocks on their devices, with widths by size, and hatched if they move.

    Args:
        placed: The result of `measure_device_map`, whose class the kernel's side must not import.
    """
    devices = list(dict.fromkeys(block.device for block in placed.blocks))
    totals = {device: sum(b.size for b in placed.blocks if b.device == device) for device in devices}
    longest = max([*totals.values(), *placed.limits.values(), 1])
    rows = [_device_row(device, totals[device], longest, placed) for device in devices]
    swatch = element("span", style=f"{_SWATCH};width:22px;background:{_OFFLOADED}")
    moves = [swatch, f"{size_text(placed.moves)} move to the computing device on each forward"]
    note = element("p", *(moves if placed.moves else ["Nothing moves."]), style="margin:4px 0")
    return element("div", *rows, note, class_="na-memory", style=_BOX)


def _device_row(device: str, total: int, longest: int, placed: Any) -> Markup:
    blocks = [block for block in placed.blocks if block.device == device]
    limit = placed.limits.get(device)
    size = size_text(total) if limit is None else f"{size_text(total)} of {size_text(limit)}"
    heading = [
        element("b", f"device {device}" if device.isdigit() else device),
        f": {size}, {len(blocks)} module{'s' * (len(blocks) != 1)}",
    ]
    if limit is not None and total > limit:
        heading += [" – ", element("b", "more than it holds")]
    label = ", ".join(f"{_module_name(block)} {size_text(block.size)}" for block in blocks)
    return _track(
        heading, label, [_module_block(block, 100 * block.size / longest) for block in blocks], limit, longest
    )


def _module_name(block: Any) -> str:
    return block.name or "the whole model"


def _module_block(block: Any, percent: float) -> Markup:
    """Return a module's block, with its name if there is room."""
    name = _module_name(block)
    room = percent / 100 * _WIDTH - 6
    colours = f"background:{_OFFLOADED};color:#222" if block.moves else f"background:{_COLOURS['weights']};color:#fff"
    style = f"{_BLOCK};width:{percent:.2f}%;{colours}"
    return element("span", name if len(name) * 7 <= room else "", title=f"{name}: {size_text(block.size)}", style=style)


class MemoryPanel:
    """Shows an estimate and, if given, a device map.

    Args:
        estimate: The result of `estimate_memory`.
        placed: The result of `measure_device_map`. If None, only the estimate is shown.
        available: The memory of the device in bytes.
    """

    def __init__(self, estimate: Any, placed: Any = None, available: int | None = None) -> None:
        self.estimate, self.placed, self.available = estimate, placed, available
        self.widget = ipywidgets.HTML(self.html())

    def html(self) -> str:
        """Return the static form."""
        drawing = device_map_html(self.placed) if self.placed is not None else ""
        return estimate_html(self.estimate, self.available) + drawing

    def text(self) -> str:
        """Return the plain-text form."""
        return "\n".join(str(part) for part in (self.estimate, self.placed) if part is not None)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.text()}


# ---- the estimate before a launch

_ESTIMATE = "notebook_accelerate.big_modeling.estimate"
"""The module that estimates memory. It is loaded on first use, because it belongs to the workers and needs torch."""


class MemoryCheck:
    """Compares the memory that training needs, according to an estimate, with the available memory.

    Args:
        model: An argument of `estimate_memory`: a model, a function that returns one, or a transformers configuration.
        memory: Further arguments of `estimate_memory`, such as optimizer, sequence_length and inputs.
    """

    def __init__(self, model: Any, memory: Mapping[str, Any] | None = None) -> None:
        self._model, self._options = model, dict(memory or {})
        self._known: dict[str, Any] = {}

    def warning(
        self,
        plan: LaunchPlan,
        training: TrainingOptions,
        machine: HardwareInfo,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Return a warning if the training does not fit, or "" if it fits or the memory of the devices is unknown.

        Args:
            plan: The plan of the launch.
            training: The training options.
            machine: The machine's hardware.
            variables: The environment variables of the launch, which may select the devices.
        """
        available, where = _available(plan, machine, {**os.environ, **(variables or {})})
        if available is None:
            return ""
        try:
            estimate = self._estimate(plan, training)
        except Exception as error:  # noqa: BLE001 - the model's own code; the launch can still be configured
            return f"The memory of the model could not be estimated ({type(error).__name__}: {error})."
        if where:
            offloaded = estimate.main_memory_total * plan.num_processes
            return _too_much(estimate.training, where, available, available) or _too_much_offloaded(offloaded, machine)
        parts = Counter(estimate.training) + Counter(estimate.main_memory)
        together = f"{size_text(parts.total() * plan.num_processes)} for {plan.num_processes} on this machine"
        return _too_much(parts, together, available // plan.num_processes, available)

    def _estimate(self, plan: LaunchPlan, training: TrainingOptions) -> Any:
        given = {
            **distribution_of(training, plan.world_size, plan.num_processes),
            "num_processes": plan.world_size,
            "batch_size": training.batch_size or 1,
        }
        key = repr(given)
        if key not in self._known:
            estimate = importlib.import_module(_ESTIMATE).estimate_memory
            self._known[key] = estimate(self._model, **{**given, **self._options})
        return self._known[key]


def _too_much(parts: Mapping[str, int], where: str, limit: int, available: int) -> str:
    """Return a warning if one process needs more bytes than ``limit``, or "" otherwise."""
    needed = sum(parts.values())
    if needed <= limit:
        return ""
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"This will not fit: training needs about {size_text(needed)} per process, most of it for {largest}, "
        f"{where}; available: {size_text(available)}."
    )


def _too_much_offloaded(needed: int, machine: HardwareInfo) -> str:
    """Return a warning if the offloaded tensors of all processes do not fit in CPU memory, or "" otherwise."""
    if needed <= machine.memory_bytes:
        return ""
    return (
        f"This will not fit: offloaded tensors need about {size_text(needed)} of this machine's memory; available: "
        f"{size_text(machine.memory_bytes)}."
    )


def distribution_of(training: TrainingOptions, ranks: int, local: int) -> dict[str, Any]:
    """Return how the model is distributed across ranks, as arguments of `estimate_memory`.

    Args:
        training: The training options.
        ranks: The number of processes on all machines.
        local: The number of processes on this machine.

    Returns:
        The argument "strategy", and "degrees" and "offload" if they are not empty.
    """
    degrees = _degrees(training)
    offload: dict[str, str] = {}
    if training.megatron_lm_plugin is not None:
        strategy, offload = _megatron(training.megatron_lm_plugin)
    elif training.deepspeed_plugin is not None:
        strategy, offload = _deepspeed(training.deepspeed_plugin, ranks)
    elif training.fsdp_plugin is not None:
        strategy, offload = _fsdp(training.fsdp_plugin, ranks)
        if _HYBRID in _strategy_names(training.fsdp_plugin):
            degrees["dp_replicate"] = ranks // local
    elif degrees.keys() & {"dp_shard", "cp"}:
        strategy = "fsdp"
    else:
        strategy = next((name for name in ("tp", "ep", "pp") if name in degrees), _plain(ranks))
    found = {"strategy": strategy, "degrees": {name: size for name, size in degrees.items() if size > 1}}
    return {name: value for name, value in {**found, "offload": offload}.items() if value}


_HYBRID = "HYBRID"


def _plain(ranks: int) -> str:
    return "ddp" if ranks > 1 else "single"


def _degrees(training: TrainingOptions) -> dict[str, int]:
    if (plugin := training.megatron_lm_plugin) is not None:
        given = {"tp": plugin.tp_degree, "pp": plugin.pp_degree, "cp": plugin.context_parallel_size}
        return {name: int(degree) for name, degree in given.items() if degree}
    if (config := training.parallelism_config) is not None:
        return {name: int(getattr(config, f"{name}_size")) for name in config.active_mesh_dims}
    return {"tp": training.torch_tp_plugin.tp_size} if training.torch_tp_plugin is not None else {}


def _megatron(plugin: Any) -> tuple[str, dict[str, str]]:
    strategy = "megatron_distributed_optimizer" if plugin.use_distributed_optimizer else "megatron"
    return strategy, {"optimizer": "cpu"} if plugin.optimizer_cpu_offload else {}


def _deepspeed(plugin: Any, ranks: int) -> tuple[str, dict[str, str]]:
    """Return the stage and the offloaded tensors. Gradients are offloaded with the optimizer that consumes them."""
    stage = int(plugin.zero_stage or 0)
    devices = {"cpu": "cpu", "nvme": "disk"}
    offload = {}
    if (device := devices.get(str(plugin.offload_optimizer_device))) and stage:
        offload = {"optimizer": device, **({"gradients": "cpu"} if stage > 1 else {})}
    if (device := devices.get(str(plugin.offload_param_device))) and stage == 3:
        offload["weights"] = device
    return (f"zero{stage}" if stage else _plain(ranks)), offload


def _fsdp(plugin: Any, ranks: int) -> tuple[str, dict[str, str]]:
    offload = dict.fromkeys(("weights", "gradients", "optimizer"), "cpu") if plugin.offloads else {}
    named = _strategy_names(plugin)
    if "NO_SHARD" in named:
        return _plain(ranks), offload
    gathered = "SHARD_GRAD_OP" in named or f"{_HYBRID}_SHARD_ZERO2" in named
    gathered = gathered or (plugin.fsdp_version == 2 and plugin.reshard_after_forward is False)
    return ("shard_grad_op" if gathered else "fsdp"), offload


def _strategy_names(plugin: Any) -> str:
    return f"{plugin.sharding_strategy} {plugin.reshard_after_forward}".upper()


def _available(plan: LaunchPlan, machine: HardwareInfo, variables: Mapping[str, str]) -> tuple[int | None, str]:
    """Return the available bytes, and the name of the device, or "" if processes share the memory."""
    if plan.accelerator in ("cpu", "mps"):
        return machine.memory_bytes, ""
    if plan.accelerator == "cuda":
        gpus = [nvml.visible_gpu(rank, variables) for rank in range(plan.num_processes)]
        if known := [gpu.memory_bytes for gpu in gpus if gpu is not None]:
            return min(known), "on a GPU of its own"
    return None, ""
