"""What will happen, and on what machine, in words."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from notebook_accelerate.config.plain_values import convert_bytes

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.hardware import HardwareInfo
    from notebook_accelerate.launch import LaunchPlan
    from notebook_accelerate.widgets.training_options import TrainingOptions

_HOSTS = {"jupyter": "Jupyter", "colab": "Colab", "kaggle": "Kaggle", "vscode": "VS Code", "terminal": "terminal"}


def sentence(plan: LaunchPlan, config: LaunchConfig, training: TrainingOptions) -> str:
    """Return what will happen in a sentence, as "2 processes on cpu, fork, gloo, bf16; effective batch 64".

    Args:
        plan: The launch.
        config: What it was planned from.
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


def described(machine: HardwareInfo) -> str:
    """Return what a machine has, in a line.

    Args:
        machine: The hardware.
    """
    return " · ".join(_facts_of(machine))


def _facts_of(machine: HardwareInfo) -> list[str]:
    devices = f"{machine.count} × {machine.accelerator}" if machine.count else "no accelerator"
    cores = f"{machine.cpu_count} CPU core{'s' * (machine.cpu_count != 1)}"
    return [devices, cores, f"{convert_bytes(machine.memory_bytes)} memory", _HOSTS.get(machine.host, machine.host)]


def chips(machine: HardwareInfo) -> str:
    """Return what a machine has, as a row of short labels in HTML."""
    items = "".join(f"<li>{escape(fact)}</li>" for fact in _facts_of(machine))
    return f'<ul class="na-facts" aria-label="This machine">{items}</ul>'


def details(plan: LaunchPlan, training: TrainingOptions) -> list[str]:
    """Return what stands below the sentence: the reason of the start method, the sum of the batch, the threads.

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


def alert(text: str) -> str:
    """Return a text as the HTML of something that is wrong."""
    return f'<span class="na-error" role="alert">{escape(text)}</span>'


def notice(text: str, kind: str = "na-help") -> str:
    """Return a text as the HTML of something worth knowing.

    Args:
        text: The text.
        kind: na-help or na-good.
    """
    return f'<span class="{kind}" role="status">{escape(text)}</span>'


__all__ = ["alert", "chips", "described", "details", "notice", "sentence"]
