"""The questions of ``config``: a table, each with the answers that it allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.config.environ import parse_flag

Answers = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        name: Key of the answer: "section.key" for a section of the configuration file.
        text: The question.
        default: The answer of an empty line; a function of the answers so far, or a value.
        type: Converts the answer.
        choices: The allowed answers; None: any.
        when: Whether to ask, from the answers so far.
    """

    name: str
    text: str
    default: Any = None
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    when: Callable[[Answers], bool] = lambda _: True

    def ask(self, answers: Answers, read: Callable[[str], str], show: Callable[[str], None]) -> Any:
        """Ask until the answer is allowed, and return it.

        Args:
            answers: The answers so far.
            read: Shows a prompt and returns a line.
            show: Shows a line.
        """
        default = self.default(answers) if callable(self.default) else self.default
        allowed = f" ({'/'.join(self.choices)})" if self.choices else ""
        shown = "yes" if default is True else "no" if default is False else default
        while True:
            line = read(f"{self.text}{allowed}{'' if shown in (None, '') else f' [{shown}]'}: ").strip()
            if not line:
                return default
            try:
                return self._convert(line)
            except ValueError as error:
                show(f"  {error}")

    def _convert(self, line: str) -> Any:
        if self.choices is None:
            return self.type(line)
        found = [choice for choice in self.choices if choice.lower() == line.lower()]
        if not found:
            raise ValueError(f"{line!r} is not allowed; type one of {', '.join(self.choices)}")
        return self.type(found[0])


def _yes(name: str, text: str, default: bool = False, when: Callable[[Answers], bool] = lambda _: True) -> Question:
    return Question(name, text, default, parse_flag, when=when)


def _several(answers: Answers) -> bool:
    return bool(answers["num_machines"] > 1)


def _uses(strategy: str) -> Callable[[Answers], bool]:
    return lambda answers: bool(answers["strategy"] == strategy)


def _wraps_layers(answers: Answers) -> bool:
    return bool(answers.get("fsdp_config.fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP")


def questions(devices: int) -> tuple[Question, ...]:
    """Return the questions in their order.

    Args:
        devices: Accelerators of this machine.
    """
    deepspeed, fsdp, megatron = _uses("deepspeed"), _uses("fsdp"), _uses("megatron_lm")
    return (
        Question("num_machines", "How many machines train together?", 1, int),
        Question("machine_rank", "Which is this one, counted from 0?", 0, int, when=_several),
        Question("main_process_ip", "What is the address of machine 0?", "127.0.0.1", when=_several),
        Question("main_process_port", "Which of its ports is free?", 29500, int, when=_several),
        Question("rdzv_backend", "How do they find each other?", "static", choices=("static", "c10d"), when=_several),
        _yes("use_cpu", "Train on the CPU only?", default=not devices),
        Question(
            "num_processes",
            "How many processes on all machines?",
            lambda answers: (1 if answers["use_cpu"] else max(devices, 1)) * answers["num_machines"],
            int,
        ),
        Question("mixed_precision", "Which precision?", "no", choices=("no", "fp16", "bf16", "fp8")),
        Question("strategy", "How is the model split?", "none", choices=("none", "fsdp", "deepspeed", "megatron_lm")),
        Question("fsdp_config.fsdp_version", "Which version of FSDP?", 2, int, ("1", "2"), fsdp),
        Question(
            "fsdp_config.fsdp_sharding_strategy", "What is sharded?", "FULL_SHARD",
            choices=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
            when=lambda answers: answers.get("fsdp_config.fsdp_version") == 1,
        ),
        _yes(
            "fsdp_config.fsdp_reshard_after_forward", "Shard parameters again after forward, which saves memory?", True,
            when=lambda answers: answers.get("fsdp_config.fsdp_version") == 2,
        ),
        Question(
            "fsdp_config.fsdp_auto_wrap_policy", "What are its units?", "TRANSFORMER_BASED_WRAP",
            choices=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), when=fsdp,
        ),
        Question(
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            "Classes of the layers, separated by commas (empty: as the model says)?", when=_wraps_layers,
        ),
        _yes("fsdp_config.fsdp_offload_params", "Keep parameters and gradients on the CPU?", when=fsdp),
        _yes("fsdp_config.fsdp_activation_checkpointing", "Recompute activations in backward?", when=fsdp),
        Question(
            "fsdp_config.fsdp_state_dict_type", "How are checkpoints saved?", "SHARDED_STATE_DICT",
            choices=("SHARDED_STATE_DICT", "FULL_STATE_DICT"), when=fsdp,
        ),
        Question("deepspeed_config.deepspeed_config_file", "JSON file of DeepSpeed (empty: none)?", when=deepspeed),
        *_deepspeed(),
        Question("megatron_lm_config.megatron_lm_tp_degree", "Ranks that split each layer?", 1, int, when=megatron),
        Question("megatron_lm_config.megatron_lm_pp_degree", "Stages of the pipeline?", 1, int, when=megatron),
        Question("megatron_lm_config.megatron_lm_num_micro_batches", "Micro-batches per step?", 1, int, when=megatron),
        Question("megatron_lm_config.megatron_lm_gradient_clipping", "Norm of gradients?", 1.0, float, when=megatron),
        _yes("dynamo", "Compile models with torch.compile?"),
        Question("dynamo_config.dynamo_backend", "Which back end?", "inductor", when=lambda answers: answers["dynamo"]),
    )  # fmt: skip


def _deepspeed() -> tuple[Question, ...]:
    def when(answers: Answers) -> bool:
        return bool(answers["strategy"] == "deepspeed" and not answers["deepspeed_config.deepspeed_config_file"])

    devices = ("none", "cpu", "nvme")
    return (
        Question("deepspeed_config.zero_stage", "Which stage of ZeRO?", 2, int, ("0", "1", "2", "3"), when),
        Question("deepspeed_config.offload_optimizer_device", "Optimizer offloaded to?", "none", str, devices, when),
        Question("deepspeed_config.offload_param_device", "Parameters offloaded to?", "none", str, devices, when),
        Question("deepspeed_config.gradient_accumulation_steps", "Batches per step?", 1, int, when=when),
        Question("deepspeed_config.gradient_clipping", "Norm of gradients?", 1.0, float, when=when),
    )
