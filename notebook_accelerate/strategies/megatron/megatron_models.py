"""Creates megatron-core's models, optimizers and schedules from a plugin's arguments."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.errors import CheckpointMismatchError
from notebook_accelerate.strategies.megatron import megatron_setup

if TYPE_CHECKING:
    from notebook_accelerate.strategies.megatron.megatron_engine import MegatronEngine


Chunks = list[torch.nn.Module]
"""This rank's parts of the model: one, or several where the schedule interleaves them."""


def _core(module: str) -> Any:
    return import_module(f"megatron.core.{module}")


def _from_arguments(kind: Any, arguments: Mapping[str, Any], **more: Any) -> Any:
    """Create one of Megatron's dataclasses from the arguments that are its fields."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    known = {name: value for name, value in arguments.items() if name in names and value is not None}
    return kind(**(known | more))


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
        # Fused kernels of Apex and Transformer Engine; an argument of the same name turns them on.
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
    }
    return _from_arguments(_core("transformer.transformer_config").TransformerConfig, {**defaults, **arguments}, **more)


def padded_vocabulary_size(arguments: Mapping[str, Any]) -> int:
    """Return the rows of the embedding: the tokens, padded to a multiple of the ranks that share tensors."""
    unit = arguments.get("make_vocab_size_divisible_by", 1) * arguments["tensor_model_parallel_size"]
    return int(arguments.get("padded_vocab_size") or -(-arguments["orig_vocab_size"] // unit) * unit)


def _has_transformer_engine(device: torch.device) -> bool:
    return device.type == "cuda" and bool(_core("utils").is_te_min_version("1.0.0"))


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
"""Functions that create a model, by `model_type_name` of the arguments."""


def virtual_stage_count(plugin: MegatronLMPlugin, arguments: Mapping[str, Any]) -> int | None:
    """Return the number of interleaved parts of the model per rank; None: one part, without interleaving.

    Args:
        plugin: The plugin.
        arguments: Its arguments.

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
        plugin: The plugin, with the shape of the network.
        device: This rank's device.
    """
    arguments = plugin.megatron_lm_default_args
    groups = megatron_setup.import_parallel_state()
    count = virtual_stage_count(plugin, arguments) if plugin.custom_model_provider_function is None else None
    groups.set_virtual_pipeline_model_parallel_world_size(count)
    if count is not None:
        arguments["virtual_pipeline_model_parallel_size"] = count
    seed = megatron_setup.seed_generators(device)
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
        chunks: The parts.
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
    """Return the overrides of weight decay and learning rate by parameter; None: Megatron's default."""
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
    """Create Megatron's schedule of learning rate and weight decay, counted in samples.

    Args:
        optimizer: Megatron's optimizer.
        plugin: The plugin, with the schedule's settings.
        scheduled: Whether the learning rate follows a schedule; otherwise it is constant.

    Returns:
        An `OptimizerParamScheduler`.

    Raises:
        ValueError: The length of the schedule is not known, or the warm-up is not shorter.
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
            f"the schedule warms up for {warmup} samples and lasts {decay}; it must last longer than the warm-up"
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


# The parts of a Megatron-LM model: saving each in a file (the older format), and gathering the whole model.

FILE = "model_optim_rng.pt"


def unwrap_chunk(chunk: Any) -> Any:
    """Return a part of a model without Megatron-LM's wrappers.

    Args:
        chunk: The part.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def named_parts(engine: MegatronEngine) -> dict[str, Any]:
    """Return this rank's parts of the model, by their names in files.

    Args:
        engine: The engine.
    """
    chunks = [unwrap_chunk(chunk) for chunk in engine.module]
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{index}": part for index, part in enumerate(chunks)}


def rng_tracker() -> Any:
    """Return Megatron's random number generators of ranks that share a layer's tensors."""
    return import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()


# ---- a file for each part


def part_name(engine: MegatronEngine) -> str:
    """Return the name of this rank's folder: mp_rank_01, or with stages mp_rank_01_000.

    Args:
        engine: The engine.
    """
    groups = megatron_setup.import_parallel_state()
    name = f"mp_rank_{groups.get_tensor_model_parallel_rank():02d}"
    if (engine.plugin.pp_degree or 1) > 1:
        name += f"_{groups.get_pipeline_model_parallel_rank():03d}"
    if (engine.plugin.expert_model_parallel_size or 1) > 1:
        name += f"_{groups.get_expert_model_parallel_rank():03d}"
    return name


def save_part(engine: MegatronEngine, target: Path, common: dict[str, Any], with_optimizer: bool) -> None:
    """Write this rank's part, on the first of the ranks with the same part; every rank must call this.

    Args:
        engine: The engine.
        target: The folder of an iteration.
        common: The entries that all files share.
        with_optimizer: Whether to write the optimizer's state.

    Raises:
        ValueError: The optimizer's state is distributed over ranks.
    """
    if with_optimizer and engine.plugin.use_distributed_optimizer:
        raise ValueError(
            "use_distributed_optimizer=True distributes the optimizer's state over ranks, which one file for each part "
            "of the model cannot contain; leave other_megatron_args={'ckpt_format': 'torch'} out"
        )
    groups = megatron_setup.import_parallel_state()
    if groups.get_data_parallel_rank() and (engine.plugin.expert_model_parallel_size or 1) == 1:
        return
    state = dict(common, rng_state=[_generators()])
    state.update({name: part.state_dict_for_save_checkpoint() for name, part in named_parts(engine).items()})
    if with_optimizer:
        state["optimizer"] = engine.optimizer.state_dict()
        state["opt_param_scheduler"] = engine.scheduler.state_dict()
    folder = target / part_name(engine)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / FILE)


def _generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),  # noqa: NPY002 - the generator of Megatron-LM's data
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": cuda,
        "rng_tracker_states": rng_tracker().get_states(),
    }


def load_part(engine: MegatronEngine, source: Path, strict: bool = True) -> None:
    """Read this rank's part; every rank must call this.

    Args:
        engine: The engine.
        source: The folder of an iteration, written with the same degrees.
        strict: Whether the names must be those of the model.

    Raises:
        CheckpointMismatchError: The folder does not contain this part, or contains objects that are unsafe to load.
    """
    file = source / part_name(engine) / FILE
    if not file.exists():
        present = ", ".join(sorted(path.name for path in source.glob("mp_rank_*"))) or "nothing"
        raise CheckpointMismatchError(
            f"{source} contains {present}, and this rank's part is {part_name(engine)}: files of this format load only "
            f"with the degrees with which they were written (now tp_degree={engine.plugin.tp_degree}, "
            f"pp_degree={engine.plugin.pp_degree}). Load it with those degrees, and save it in the format torch_dist"
        )
    state = _read_safely(file)
    for name, part in named_parts(engine).items():
        if name not in state:
            raise CheckpointMismatchError(f"{file} contains no {name!r}: the model had other stages")
        part.load_state_dict(state[name], strict=strict)
    if "optimizer" in state and not engine.plugin.no_load_optim:
        engine.optimizer.load_state_dict(state["optimizer"])
        engine.scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        engine.optimizer.reload_model_params()
    engine.iteration = int(state.get("iteration", 0))
    generators = state.get("rng_state") or []
    if generators and generators[0].get("rng_tracker_states"):
        rng_tracker().set_states(generators[0]["rng_tracker_states"])


def _read_safely(file: Path) -> dict[str, Any]:
    """Read a file; only tensors, plain values and Megatron's own settings are created."""
    known: list[Any] = list(import_module("megatron.core.safe_globals").SAFE_GLOBALS)
    core: Any = getattr(np, "_core", None)  # numpy 2's name of a module that numpy 1 wrote
    if core is not None:
        known.append((core.multiarray._reconstruct, "numpy.core.multiarray._reconstruct"))
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CheckpointMismatchError(
            f"{file} contains objects that are not loaded, because loading them could run code: {error}"
        ) from error


# ---- the whole model


def gather_state(engine: MegatronEngine) -> dict[str, Any]:
    """Gather a model's whole state, as one rank with degrees of 1 has it; every rank must call this.

    Args:
        engine: The engine.

    Returns:
        With degrees of 1, the state on every rank; else the state in main memory on rank 0, and {} on other ranks.
    """
    if (engine.plugin.tp_degree, engine.plugin.pp_degree, len(engine.module)) == (1, 1, 1):
        return unwrap_chunk(engine.module[0]).state_dict()  # type: ignore[no-any-return]
    groups = megatron_setup.import_parallel_state()
    if groups.get_data_parallel_rank():
        return {}
    group, local = groups.get_model_parallel_group(), _local_pieces(engine)
    first = dist.get_global_rank(group, 0)
    found: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank() == first else None
    dist.gather_object(local, found, dst=first, group=group)
    if found is None or dist.get_rank() != 0:
        return {}
    return _assemble([piece for pieces in found for piece in pieces], _embedding_rows(engine))


class _Piece(NamedTuple):
    """A rank's piece of an entry of the whole state."""

    name: str
    shape: tuple[int, ...] = ()
    """Shape of the whole tensor."""
    offset: tuple[int, ...] = ()
    """Index of the piece's first element."""
    padded: bool = False
    """Whether the whole tensor may be padded."""
    data: torch.Tensor | None = None
    """The piece; None: the entry has no value."""


def _local_pieces(engine: MegatronEngine) -> list[_Piece]:
    """Return this rank's pieces of the whole state."""
    mapping: Any = import_module("megatron.core.dist_checkpointing.mapping")
    pieces: list[_Piece] = []
    for part in named_parts(engine).values():
        layers = {name: module for name, module in part.named_modules() if hasattr(module, "layer_number")}
        empty = [name for name, value in part.state_dict().items() if value is None]
        pieces += [_Piece(_global_name(name, layers)) for name in empty]
        for name, described in part.sharded_state_dict().items():
            if name == "output_layer.weight" and described.key.endswith("word_embeddings.weight"):
                continue  # the last stage's copy of the embedding
            whole = [described.build()] if isinstance(described, mapping.ShardedTensorFactory) else [described]
            for tensor in _flatten(whole):
                if isinstance(tensor, mapping.ShardedTensor) and tensor.data is not None:
                    skip = tensor.prepend_axis_num
                    shape, offset = tensor.global_shape[skip:], tensor.global_offset[skip:]
                    padded, data = tensor.allow_shape_mismatch, tensor.data.detach().cpu()
                    pieces.append(_Piece(_global_name(name, layers), shape, offset, padded, data))
    return pieces


def _flatten(nested: Any) -> list[Any]:
    if isinstance(nested, dict):
        nested = list(nested.values())
    return [item for inner in nested for item in _flatten(inner)] if isinstance(nested, (list, tuple)) else [nested]


def _global_name(name: str, layers: dict[str, Any]) -> str:
    """Return the name of a parameter in a model with all layers."""
    found = re.match(r"(.*?\.?layers\.)(\d+)(\..*)", name)
    if found is None or (layer := layers.get(f"{found[1]}{found[2]}")) is None:
        return name
    return f"{found[1]}{layer.layer_number - 1}{found[3]}"


def _embedding_rows(engine: MegatronEngine) -> int:
    """Return the rows of the embedding of a model on one rank."""
    arguments = {**vars(engine.args), "tensor_model_parallel_size": 1, "padded_vocab_size": None}
    return padded_vocabulary_size(arguments) if arguments.get("orig_vocab_size") else 0


def _assemble(pieces: list[_Piece], rows: int) -> dict[str, Any]:
    state: dict[str, Any] = {}
    padded_names = set()
    for name, shape, offset, padded, data in pieces:
        if data is None:
            state[name] = None
            continue
        if name not in state:
            state[name] = torch.empty(shape, dtype=data.dtype)
        region = tuple(slice(start, start + length) for start, length in zip(offset, data.shape, strict=True))
        state[name][region] = data
        if padded:
            padded_names.add(name)
    for name in padded_names:
        if rows and state[name].shape[0] > rows:
            state[name] = state[name][:rows].clone()
    return state
