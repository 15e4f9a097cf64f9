"""A plan and the machine it runs on as short texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate.config.plain_values import convert_bytes
from notebook_accelerate.launch.report.markup import Markup, element

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.hardware import HardwareInfo
    from notebook_accelerate.launch import LaunchPlan
    from notebook_accelerate.widgets.training_options import TrainingOptions

_HOSTS = {"jupyter": "Jupyter", "colab": "Colab", "kaggle": "Kaggle", "vscode": "VS Code", "terminal": "terminal"}


def plan_sentence(plan: LaunchPlan, config: LaunchConfig, training: TrainingOptions) -> str:
    """Return the plan in a sentence, as "2 processes on cpu, fork, gloo, bf16; effective batch: 64".

    Args:
        plan: The launch.
        config: The configuration it was made from.
        training: The training's options.
    """
    processes = "1 process" if plan.num_processes == 1 else f"{plan.num_processes} processes"
    if plan.world_size != plan.num_processes:
        processes += f" of {plan.world_size}"
    precision = "fp32" if config.mixed_precision == "no" else config.mixed_precision
    parts = [
        f"{processes} on {plan.where or plan.accelerator}",
        plan.start_method,
        plan.backend,
        training.strategy,
        precision,
    ]
    return f"{', '.join(part for part in parts if part)}; {training.effective_batch(plan.world_size)}"


def machine_summary(machine: HardwareInfo) -> str:
    """Return the hardware of a machine in one line.

    Args:
        machine: The hardware.
    """
    return " · ".join(_facts_of(machine))


def _facts_of(machine: HardwareInfo) -> list[str]:
    devices = f"{machine.count} × {machine.accelerator}" if machine.count else "no accelerator"
    cores = f"{machine.cpu_count} CPU core{'s' * (machine.cpu_count != 1)}"
    return [devices, cores, f"{convert_bytes(machine.memory_bytes)} memory", _HOSTS.get(machine.host, machine.host)]


def chips(machine: HardwareInfo) -> Markup:
    """Return the hardware of a machine as a row of labels."""
    items = [element("li", fact) for fact in _facts_of(machine)]
    return element("ul", *items, class_="na-facts", aria_label="This machine")


def details(plan: LaunchPlan, training: TrainingOptions) -> list[str]:
    """Return the texts below the sentence: the reason for the start method, the batch size, the threads.

    Args:
        plan: The launch.
        training: The training's options.
    """
    found = [f"{plan.start_method}: {plan.reason}"]
    if total := training.batch_sum(plan.world_size):
        found.append(total)
    if plan.threads is not None:
        found.append(f"{plan.threads} CPU thread{'s' * (plan.threads != 1)} per process")
    return found
