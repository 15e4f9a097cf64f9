"""Create megatron-core's process groups, models, optimizers and schedules from a plugin's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib import import_module, util
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.hardware import device_table
from notebook_accelerate.state import AcceleratorState, process_group

_initialized_for: tuple[Any, tuple[int, int, int]] | None = None
"""The default process group, and the degrees that Megatron's current groups were created with."""


def import_parallel_state() -> Any:
    """Import the module with megatron-core's process groups.

    Returns:
        `megatron.core.parallel_state`.

    Raises:
        ImportError: megatron-core is not installed.
    """
    if util.find_spec("megatron") is None or util.find_spec("megatron.core") is None:
        raise ImportError(
            "training with a MegatronLMPlugin needs megatron-core, which is not installed: pip install "
            "'megatron-core>=0.16,<0.17'"
        )
    return import_module("megatron.core.parallel_state")


def active_plugin(state: AcceleratorState) -> MegatronLMPlugin:
    """Return the Megatron-LM plugin.

    Args:
        state: This process's `AcceleratorState`.

    Raises:
        ValueError: The ranks do not train with Megatron-LM.
    """
    plugin: object = state.megatron_lm_plugin
    if not isinstance(plugin, MegatronLMPlugin):
        raise ValueError(f"megatron_lm_plugin is a {type(plugin).__name__}; pass a MegatronLMPlugin")
    return plugin


def check_degrees(plugin: MegatronLMPlugin, world_size: int) -> int:
    """Check the degrees of a plugin, and return the number of groups of ranks that each read different data.

    Args:
        plugin: The plugin to check.
        world_size: The number of ranks.

    Raises:
        ValueError: The degrees do not fit the number of ranks.
    """
    tensors, stages, experts = plugin.tp_degree or 1, plugin.pp_degree or 1, plugin.expert_model_parallel_size or 1
    groups = world_size // (tensors * stages)
    if groups < 1 or world_size != tensors * stages * groups:
        raise ValueError(
            f"tp_degree={tensors} x pp_degree={stages} = {tensors * stages} ranks share one model, but the number of "
            f"ranks ({world_size}) is not a multiple of that; start {tensors * stages} ranks or a multiple "
            f"(num_processes={tensors * stages}), or change the degrees"
        )
    if groups % experts:
        raise ValueError(
            f"expert_model_parallel_size={experts} must divide the number of groups of ranks that read different data, "
            f"{groups} (= {world_size} / ({tensors} x {stages}))"
        )
    return int(groups)


def initialize_groups(state: AcceleratorState, plugin: MegatronLMPlugin) -> None:
    """Initialize Megatron's process groups with the degrees of a plugin; every rank must call this.

    Args:
        state: The `AcceleratorState`. A single process gets a process group of one rank, because Megatron-LM requires a
            group.
        plugin: The plugin with the degrees.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The degrees do not fit the number of ranks.
    """
    global _initialized_for  # noqa: PLW0603 - Megatron has one set of groups per process
    check_degrees(plugin, state.num_processes)
    groups = import_parallel_state()
    if not process_group.group_exists():
        process_group.start_group_of_one(device_table.row(state.device.type).backend, state.device)
    degrees = (plugin.tp_degree or 1, plugin.pp_degree or 1, plugin.expert_model_parallel_size or 1)
    now = (dist.group.WORLD, degrees)
    if groups.model_parallel_is_initialized():
        if _initialized_for is None or (_initialized_for[0] is now[0] and _initialized_for[1] == degrees):
            _initialized_for = now
            _check_existing_groups(groups, plugin)
            return
        groups.destroy_model_parallel()
    groups.initialize_model_parallel(
        tensor_model_parallel_size=plugin.tp_degree,
        pipeline_model_parallel_size=plugin.pp_degree,
        expert_model_parallel_size=plugin.expert_model_parallel_size or 1,
        expert_tensor_parallel_size=plugin.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    _initialized_for = now


def _check_existing_groups(groups: Any, plugin: MegatronLMPlugin) -> None:
    """Check that process groups created by the user's code have the plugin's degrees."""
    existing = (groups.get_tensor_model_parallel_world_size(), groups.get_pipeline_model_parallel_world_size())
    if existing != (plugin.tp_degree, plugin.pp_degree):
        raise ValueError(
            f"Megatron-LM's groups exist already, with tensor x pipeline = {existing[0]} x {existing[1]}, but the "
            f"plugin has {plugin.tp_degree} x {plugin.pp_degree}; call "
            "megatron.core.parallel_state.destroy_model_parallel() first, or give the plugin the same degrees"
        )


def seed_generators(device: torch.device) -> int:
    """Seed Megatron's generators for layers whose tensors are split across ranks; every rank must call this.

    Args:
        device: This rank's device.

    Returns:
        The seed for the weights of this rank's pipeline stage: rank 0's seed, plus 100 times the stage.
    """
    groups = import_parallel_state()
    first = torch.tensor([torch.initial_seed() % (1 << 31)], device=device)
    dist.broadcast(first, src=0)
    seed = int(first.item()) + 100 * groups.get_pipeline_model_parallel_rank()
    random: Any = import_module("megatron.core.tensor_parallel.random")
    random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return int(seed)


# ---- models, optimizers and schedules

Chunks = list[torch.nn.Module]
"""This rank's parts of the model: one, or several if the schedule interleaves stages."""


def _core(module: str) -> Any:
    return import_module(f"megatron.core.{module}")


def transformer_config(arguments: Mapping[str, Any], device: torch.device, **more: Any) -> Any:
    """Create Megatron's configuration of a transformer.

    Args:
        arguments: The plugin's arguments.
        device: This rank's device.
        more: Settings that override the arguments.

    Returns:
        A `TransformerConfig`.
    """
    precision = torch.bfloat16 if arguments.get("bf16") else torch.float16 if arguments.get("fp16") else torch.float32
    activation = torch.nn.functional.silu if arguments.get("gated_linear_unit") else torch.nn.functional.gelu
    if arguments.get("sequence_parallel") and not _has_transformer_engine(device):
        raise ValueError(
            "sequence_parallelism=True needs the norms of Transformer Engine on a GPU, which are not available here; "
            "leave it out, or install Transformer Engine: pip install 'transformer-engine[pytorch]'"
        )
    defaults = {
        "pipeline_dtype": precision,
        "params_dtype": precision,
        "activation_func": activation,
        "use_cpu_initialization": device.type == "cpu",
        # Turn off the fused kernels of Apex and Transformer Engine. Arguments of the same names turn them on.
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
    }
    return _from_arguments(_core("transformer.transformer_config").TransformerConfig, {**defaults, **arguments}, **more)


def _from_arguments(kind: Any, arguments: Mapping[str, Any], **more: Any) -> Any:
    """Create one of Megatron's dataclasses from the arguments that have the names of its fields."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    known = {name: value for name, value in arguments.items() if name in names and value is not None}
    return kind(**(known | more))


def _has_transformer_engine(device: torch.device) -> bool:
    return device.type == "cuda" and bool(_core("utils").is_te_min_version("1.0.0"))


def padded_vocabulary_size(arguments: Mapping[str, Any]) -> int:
    """Return the number of rows in the embedding: the vocabulary's size, padded so that ranks get equal parts."""
    unit = arguments.get("make_vocab_size_divisible_by", 1) * arguments["tensor_model_parallel_size"]
    return int(arguments.get("padded_vocab_size") or -(-arguments["orig_vocab_size"] // unit) * unit)


def _common_arguments(config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "config": config,
        "vocab_size": padded_vocabulary_size(arguments),
        "max_sequence_length": arguments["max_position_embeddings"],
        "fp16_lm_cross_entropy": bool(arguments.get("fp16_lm_cross_entropy")),
        "share_embeddings_and_output_weights": not arguments["untie_embeddings_and_output_weights"],
        "position_embedding_type": arguments.get("position_embedding_type", "learned_absolute"),
    }


def _gpt(arguments: Mapping[str, Any], device: torch.device, **stage: Any) -> torch.nn.Module:
    config = transformer_config(arguments, device)
    specs = _core("models.gpt.gpt_layer_specs")
    kernels = _has_transformer_engine(device)
    spec = specs.get_gpt_layer_with_transformer_engine_spec if kernels else specs.get_gpt_layer_local_spec
    experts = {"num_experts": arguments["num_moe_experts"]} if arguments.get("num_moe_experts") else {}
    more = {} if kernels else {"normalization": config.normalization}
    return _core("models.gpt").GPTModel(  # type: ignore[no-any-return]
        **_common_arguments(config, arguments),
        transformer_layer_spec=spec(**experts, **more),
        rotary_base=arguments.get("rotary_base", 10000),
        **stage,
    )


def _bert(arguments: Mapping[str, Any], device: torch.device, **stage: Any) -> torch.nn.Module:
    config = transformer_config(arguments, device)
    specs = _core("models.bert.bert_layer_specs")
    spec = (
        specs.get_bert_layer_with_transformer_engine_spec()
        if _has_transformer_engine(device)
        else specs.bert_layer_local_spec
    )
    head = bool(arguments.get("bert_binary_head")) or not arguments.get("pretraining_flag", True)
    model: torch.nn.Module = _core("models.bert.bert_model").BertModel(
        **_common_arguments(config, arguments),
        num_tokentypes=2 if head else 0,
        transformer_layer_spec=spec,
        add_binary_head=head,
        **stage,
    )
    labels = arguments.get("num_labels", 2)
    if not arguments.get("pretraining_flag", True) and labels != 2 and stage["post_process"]:
        make = _core("transformer.utils").get_linear_layer
        model.binary_head = make(config.hidden_size, labels, config.init_method, config.perform_initialization)
    return model


def _t5(arguments: Mapping[str, Any], device: torch.device, **stage: Any) -> torch.nn.Module:
    if arguments["pipeline_model_parallel_size"] > 1:
        raise ValueError(
            f"pp_degree={arguments['pipeline_model_parallel_size']} is not available for T5: megatron-core keeps "
            "encoder and decoder on one stage; use pp_degree=1 with a larger tp_degree"
        )
    stage.pop("vp_stage")
    layers = arguments.get("encoder_num_layers", arguments["num_layers"])
    specs = _core("models.T5.t5_spec")
    kind = "transformer_engine" if _has_transformer_engine(device) else "local"
    return _core("models.T5.t5_model").T5Model(  # type: ignore[no-any-return]
        **_common_arguments(transformer_config(arguments, device), arguments),
        encoder_config=transformer_config(arguments, device, num_layers=layers),
        transformer_encoder_layer_spec=getattr(specs, f"get_t5_encoder_with_{kind}_block_spec")(layers),
        transformer_decoder_layer_spec=getattr(specs, f"get_t5_decoder_with_{kind}_block_spec")(
            arguments["num_layers"]
        ),
        **stage,
    )


MODELS: dict[str, Callable[..., torch.nn.Module]] = {"gpt": _gpt, "bert": _bert, "t5": _t5}
"""The functions that create a model, by Megatron's argument `model_type_name`."""


def virtual_stage_count(plugin: MegatronLMPlugin, arguments: Mapping[str, Any]) -> int | None:
    """Return the number of interleaved parts of the model per rank, or None if stages are not interleaved.

    Args:
        plugin: The plugin with the degrees.
        arguments: The plugin's arguments.

    Raises:
        ValueError: The layers cannot be divided equally.
    """
    each, stages = plugin.num_layers_per_virtual_pipeline_stage, plugin.pp_degree or 1
    if each is None or stages == 1:
        return None
    layers = arguments["num_layers"]
    if layers % (stages * each):
        raise ValueError(
            f"num_layers={layers} is not a multiple of pp_degree={stages} x "
            f"num_layers_per_virtual_pipeline_stage={each}"
        )
    parts = int(layers // stages // each)
    return parts if parts > 1 else None


def make_chunks(plugin: MegatronLMPlugin, device: torch.device) -> Chunks:
    """Create this rank's parts of the model, on its device; every rank must call this.

    Args:
        plugin: The plugin, with the sizes of the model set.
        device: This rank's device.
    """
    arguments = plugin.megatron_lm_default_args
    groups = import_parallel_state()
    count = virtual_stage_count(plugin, arguments) if plugin.custom_model_provider_function is None else None
    groups.set_virtual_pipeline_model_parallel_world_size(count)
    if count is not None:
        arguments["virtual_pipeline_model_parallel_size"] = count
    seed = seed_generators(device)
    chunks = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for stage in range(count or 1):
            virtual = {} if count is None else {"ignore_virtual": False, "vp_stage": stage}
            first, last = groups.is_pipeline_first_stage(**virtual), groups.is_pipeline_last_stage(**virtual)
            chunks.append(_make_chunk(plugin, device, first, last, None if count is None else stage))
    return chunks


def _make_chunk(
    plugin: MegatronLMPlugin, device: torch.device, first: bool, last: bool, stage: int | None
) -> torch.nn.Module:
    arguments = plugin.megatron_lm_default_args
    if plugin.custom_model_provider_function is not None:
        model = plugin.custom_model_provider_function(
            pre_process=first, post_process=last, add_encoder=True, add_decoder=True
        )
    else:
        make = MODELS[arguments["model_type_name"]]
        model = make(arguments, device, pre_process=first, post_process=last, vp_stage=stage)
    for parameter in model.parameters():
        _core("tensor_parallel").set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model.to(device)  # type: ignore[no-any-return]


def wrap_chunks(chunks: Chunks, arguments: Mapping[str, Any]) -> Chunks:
    """Wrap the parts of a model for Megatron's precision and data parallelism; every rank must call this.

    Args:
        chunks: This rank's parts of the model.
        arguments: The plugin's arguments.
    """
    distributed = _core("distributed")
    wrapped: Chunks = []
    for index, chunk in enumerate(chunks):
        config: Any = chunk.config
        half = config.fp16 or config.bf16
        inner = _core("transformer.module").Float16Module(config, chunk) if half else chunk
        settings = _from_arguments(
            distributed.DistributedDataParallelConfig, {"grad_reduce_in_fp32": bool(config.bf16), **arguments}
        )
        wrapped.append(distributed.DistributedDataParallel(config, settings, inner, disable_bucketing=index > 0))
    for item in wrapped:
        item.broadcast_params()  # type: ignore[operator]
    wrapped[0].config.finalize_model_grads_func = distributed.finalize_model_grads  # type: ignore[union-attr]
    return wrapped


def make_optimizer(chunks: Chunks, plugin: MegatronLMPlugin) -> Any:
    """Create Megatron's optimizer; every rank must call this.

    Args:
        chunks: The wrapped parts of the model.
        plugin: The plugin, with the optimizer's settings.

    Returns:
        A `MegatronOptimizer`.
    """
    optimizers = _core("optimizer")
    arguments = plugin.megatron_lm_default_args
    config = _from_arguments(optimizers.OptimizerConfig, {"params_dtype": chunks[0].config.params_dtype, **arguments})  # type: ignore[union-attr]
    optimizer = optimizers.get_megatron_optimizer(
        config, chunks, config_overrides=_overrides(plugin, config), use_gloo_process_groups=False
    )
    for chunk in chunks:
        if config.fp16 or config.bf16:
            chunk.config.grad_scale_func = optimizer.scale_loss  # type: ignore[union-attr]
    return optimizer


def _overrides(plugin: MegatronLMPlugin, config: Any) -> Any:
    """Return weight decay and learning rate for parameters that the plugin selects, or None for Megatron's defaults."""
    if plugin.no_wd_decay_cond is None and plugin.scale_lr_cond is None:
        return None
    kinds = _core("optimizer.optimizer_config")
    overrides = {} if plugin.no_wd_decay_cond else _core("optimizer").get_standard_config_overrides(config)
    for name, condition, settings in (
        ("no_wd_decay_cond", plugin.no_wd_decay_cond, {"wd_mult": 0.0}),
        ("scale_lr_cond", plugin.scale_lr_cond, {"max_lr": config.lr * plugin.lr_mult, "min_lr": config.min_lr}),
    ):
        if condition is not None:
            predicate = kinds.ParamWithNamePredicate(
                name=name, fn=lambda parameter, text, test=condition: bool(test(text, parameter))
            )
            overrides[kinds.ParamKey(with_name_predicate=predicate)] = settings
    return overrides


def make_schedule(optimizer: Any, plugin: MegatronLMPlugin, scheduled: bool) -> Any:
    """Create Megatron's schedule of learning rate and weight decay, which counts samples.

    Args:
        optimizer: Megatron's optimizer.
        plugin: The plugin, with the schedule's settings.
        scheduled: Whether the learning rate follows a schedule. If False, it is constant.

    Returns:
        An `OptimizerParamScheduler`.

    Raises:
        ValueError: The length of the schedule is unknown, or the warm-up is not shorter than the schedule.
    """
    each = plugin.global_batch_size
    decay = (
        plugin.lr_decay_samples
        or (plugin.lr_decay_iters or plugin.train_iters or 0) * each
        or plugin.train_samples
        or 0
    )
    warmup: float = plugin.lr_warmup_samples or (plugin.lr_warmup_iters or 0) * each
    if scheduled and not decay:
        raise ValueError(
            "the length of the learning rate's schedule is not known; pass MegatronLMDummyScheduler(optimizer, "
            "total_num_steps=...), or MegatronLMPlugin(lr_decay_iters=...)"
        )
    if plugin.lr_warmup_fraction is not None and decay:
        warmup = plugin.lr_warmup_fraction * decay
    if scheduled and warmup >= decay:
        raise ValueError(
            f"the schedule lasts {decay} samples, but its warm-up takes {warmup}; it must last longer than the warm-up"
        )
    arguments = plugin.megatron_lm_default_args
    rate, weight_decay = arguments["lr"], arguments["weight_decay"]
    return _core("optimizer_param_scheduler").OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=rate,
        min_lr=plugin.min_lr,
        lr_warmup_steps=warmup if scheduled else 0,
        lr_decay_steps=decay or each,
        lr_decay_style=plugin.lr_decay_style if scheduled else "constant",
        start_wd=weight_decay if plugin.start_weight_decay is None else plugin.start_weight_decay,
        end_wd=weight_decay if plugin.end_weight_decay is None else plugin.end_weight_decay,
        wd_incr_steps=(plugin.train_iters or 0) * each or decay or each,
        wd_incr_style=plugin.weight_decay_incr_style,
    )
