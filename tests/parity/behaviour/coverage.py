"""List the public names in Accelerate that no program uses: `python -m tests.parity.behaviour.coverage`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.parity.surface.compare import AREAS, rows

_PROGRAMS = Path(__file__).parent / "programs"

NEEDS_OTHER_PACKAGES = {
    "Megatron-LM": """
        AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep MegatronEngine MegatronLMDummyDataLoader
        MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper megatron_lm_initialize
        megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler megatron_lm_prepare_optimizer
        megatron_lm_prepare_scheduler add_model_config_to_megatron_parser avg_losses_across_data_parallel_group
        gather_across_data_parallel_groups
    """,
    "DeepSpeed": """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper GatheredParameters HfDeepSpeedConfig
        compile_regions_deepspeed deepspeed_required map_pytorch_optim_to_deepspeed
    """,
    "Transformer Engine": "apply_fp8_autowrap contextual_fp8_autocast convert_model",
    "a GPU": """
        convert_model_to_fp8_ao filter_first_and_last_linear_layers torchao_required fsdp2_apply_ac fsdp2_prepare_model
        compile_regions_fsdp2 load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer
        load_and_quantize_model build_pipeline find_pippy_batch_size pippy_forward
    """,
    "a TPU, or SageMaker": "prepare_tpu prepare_sagemager_args_inputs",
    "an installation of Accelerate": "test_launch",
}
"""Names that need no program, because Accelerate's functions run only with the given package or device."""


def names_in_programs() -> set[str]:
    """Return the identifiers that programs use, and the words of their strings."""
    found: set[str] = set()
    for path in _PROGRAMS.glob("*.py"):
        found.update(_identifiers(ast.parse(path.read_text())))
    return found


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _words(node.value)


def _words(text: str) -> Iterator[str]:
    try:
        yield from _identifiers(ast.parse(text.strip(), mode="eval"))
    except SyntaxError:
        yield from text.split()


def public_names() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each name of a public function or class of Accelerate, with its row in the table of the API."""
    for _, name, row in rows(AREAS):
        yield name, row


def names_without_programs() -> set[str]:
    """Return the public functions and classes that no program uses, except for `NEEDS_OTHER_PACKAGES`."""
    excused = {name for names in NEEDS_OTHER_PACKAGES.values() for name in names.split()}
    return {name for name, _ in public_names()} - names_in_programs() - excused


if __name__ == "__main__":
    print("\n".join(sorted(names_without_programs())) or "every public name has a program")
