"""Settings of Megatron-LM, under their names in Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.config.plain_values import check_one_of, check_whole_number
from notebook_accelerate.config.settings import SettingsSection, fill_unset, setting, settings_of

_PREFIX = "MEGATRON_LM_"


@dataclass
class MegatronLMPlugin:
    """Tensor, pipeline, sequence and data parallelism with Megatron-LM.

    Most fields are arguments of Megatron, which megatron-core 0.16 documents in its ``TransformerConfig``,
    ``OptimizerConfig`` and ``ModelParallelConfig``. None means Megatron's default.

    Attributes:
        megatron_lm_default_args: Megatron's arguments by name. `prepare` adds those that follow from the model, the
            optimizer and the loader.

    Raises:
        ValueError: A value is not allowed, or is not available with Megatron-LM.
    """

    settings = SettingsSection(
        "megatron_lm_config", "megatron_lm_", _PREFIX, "megatron_lm", "Megatron-LM", arguments=True
    )

    tp_degree: int | None = setting(
        unset=1, ask="How many ranks split each layer?", argument="tensor_model_parallel_size"
    )
    """Number of ranks across which each layer's tensors are split."""
    pp_degree: int | None = setting(unset=1, ask="How many pipeline stages?", argument="pipeline_model_parallel_size")
    """Number of ranks across which the layers are distributed."""
    use_custom_fsdp: bool | None = setting(variable=None, preset=False, argument=None)
    """Accepted for compatibility; has no effect."""
    overlap_cpu_optimizer_d2h_h2d: bool | None = setting(variable=None, preset=False)
    """Whether copies between the GPU and an offloaded optimizer overlap with the optimizer's step."""
    no_load_optim: bool | None = setting(variable=None, preset=False)
    """Whether ``load_state`` skips the optimizer."""
    eod_mask_loss: bool | None = setting(variable=None, preset=False)
    """Whether end-of-document tokens are excluded from the loss, with Megatron's datasets."""
    no_save_optim: bool | None = setting(variable=None, preset=False)
    """Whether ``save_state`` skips the optimizer."""
    optimizer_cpu_offload: bool | None = setting(variable=None, preset=False)
    """Whether optimizer states are offloaded to CPU memory."""
    use_precision_aware_optimizer: bool | None = setting(variable=None, preset=False)
    """Whether optimizer states may have a dtype other than float32."""
    decoder_last_pipeline_num_layers: int | None = setting(variable=None, argument=None)
    """Accepted for compatibility; has no effect."""
    recompute_granularity: str | None = setting(variable=None)
    """Recomputation in backward: full (whole layers) or selective (attention). If None, nothing is recomputed."""
    recompute_method: str | None = setting(variable=None)
    """Which layers are recomputed if the granularity is full: uniform or block."""
    recompute_num_layers: int | None = setting(variable=None)
    """Number of layers in each recomputed group (uniform), or in each pipeline stage (block)."""
    attention_backend: bool | None = setting(variable=None, parse=str)
    """Megatron's implementation of attention."""
    expert_model_parallel_size: int | None = setting(variable=None)
    """Number of ranks across which experts are split. It must divide the number of data-parallel ranks."""
    context_parallel_size: int | None = setting(variable=None)
    """Must be 1, because context parallelism is not available with Megatron-LM."""
    attention_dropout: float | None = setting(variable=None)
    """Dropout probability in attention. If None, as in the model."""
    hidden_dropout: float | None = setting(variable=None)
    """Dropout probability outside attention. If None, as in the model."""
    attention_softmax_in_fp32: bool | None = setting(variable=None, parse=environ.flag_text)
    """Whether the softmax of attention is computed in float32."""
    expert_tensor_parallel_size: int | None = setting(variable=None)
    """Number of ranks across which the tensors of each expert are split."""
    calculate_per_token_loss: bool | None = setting(variable=None, parse=environ.flag_text)
    """Whether the loss is averaged over the tokens of the accumulation window instead of over its micro-batches."""
    use_rotary_position_embeddings: bool | None = setting(variable=None, parse=environ.flag_text, argument=None)
    """Whether position embeddings are rotary. If None, as in the model."""
    num_micro_batches: int | None = setting(unset=1, preset=None, ask="How many micro-batches per optimizer step?")
    """Number of micro-batches per optimizer step, which pass through the pipeline one after the other."""
    gradient_clipping: float | None = setting(unset=1.0, ask="Which maximum norm of gradients?", argument="clip_grad")
    """Maximum norm of gradients."""
    sequence_parallelism: bool | None = setting(
        unset=False, preset=None, parse=environ.flag_text, argument="sequence_parallel"
    )
    """Whether norms and dropouts are split across the tensor-parallel ranks."""
    recompute_activations: bool | None = setting(unset=False, preset=None, parse=environ.flag_text, argument=None)
    """Whether attention is recomputed in the backward pass."""
    use_distributed_optimizer: bool | None = setting(unset=False, preset=None, parse=environ.flag_text)
    """Whether optimizer states are sharded across the data-parallel ranks."""
    pipeline_model_parallel_split_rank: int | None = None
    """Accepted for compatibility; has no effect."""
    num_layers_per_virtual_pipeline_stage: int | None = setting(variable=None, option=None)
    """Number of layers in each virtual stage of an interleaved pipeline. If None, the pipeline is not interleaved."""
    is_train_batch_min: bool = True
    """Accepted for compatibility; has no effect."""
    train_iters: int | None = None
    """Number of steps of the whole training run."""
    train_samples: int | None = None
    """Number of samples of the whole training run, instead of ``train_iters``."""
    weight_decay_incr_style: str = "constant"
    """How weight decay changes from start to end: constant, linear or cosine."""
    start_weight_decay: float | None = None
    """Weight decay at the start. If None, the optimizer's."""
    end_weight_decay: float | None = None
    """Weight decay at the end. If None, the optimizer's."""
    lr_decay_style: str = "linear"
    """How the learning rate decays: constant, linear, cosine, inverse-square-root or WSD."""
    lr_decay_iters: int | None = None
    """Number of steps until the learning rate reaches ``min_lr``. If None, the scheduler's number."""
    lr_decay_samples: int | None = None
    """Number of samples until the learning rate reaches ``min_lr``, instead of ``lr_decay_iters``."""
    lr_warmup_iters: int | None = None
    """Number of warm-up steps, during which the learning rate rises from 0. If None, the scheduler's number."""
    lr_warmup_samples: int | None = None
    """Number of warm-up samples, instead of ``lr_warmup_iters``."""
    lr_warmup_fraction: float | None = None
    """Length of the warm-up as a fraction of the decay, from 0 to 1, instead of ``lr_warmup_iters``."""
    min_lr: float = 0
    """Smallest learning rate of the schedule."""
    consumed_samples: list[int] | None = None
    """Numbers of samples that earlier runs used from Megatron's datasets, for training, validation and test."""
    no_wd_decay_cond: Callable[..., Any] | None = None
    """Called with the name of a parameter and the parameter; returns whether to exclude it from weight decay."""
    scale_lr_cond: Callable[..., Any] | None = None
    """Called like ``no_wd_decay_cond``; returns whether to multiply the parameter's learning rate by ``lr_mult``."""
    lr_mult: float = 1.0
    """Factor for the learning rate of the parameters that ``scale_lr_cond`` selects."""
    megatron_dataset_flag: bool = False
    """Whether batches come from Megatron's datasets."""
    seq_length: int | None = setting(variable=None, option=None)
    """Number of tokens per sequence. If None, as in the first batch, or else the model's number of positions."""
    encoder_seq_length: int | None = setting(variable=None, option=None)
    """Number of tokens per sequence of the encoder (T5)."""
    decoder_seq_length: int | None = setting(variable=None, option=None)
    """Number of tokens per sequence of the decoder (T5), if ``seq_length`` is None."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard's files, which is passed on to Megatron."""
    set_all_logging_options: bool = False
    """With ``tensorboard_dir``: whether norms, zeros in gradients, memory and world size are logged."""
    eval_iters: int = 100
    """Number of batches per evaluation, with Megatron's datasets."""
    eval_interval: int = 1000
    """Number of steps between evaluations, with Megatron's datasets."""
    return_logits: bool = False
    """Whether the model returns its logits together with the loss."""
    custom_train_step_class: Any = None
    """A subclass of `AbstractTrainStep`. If None, the one for the type of model."""
    custom_train_step_kwargs: dict[str, Any] | None = None
    """Keyword arguments of ``custom_train_step_class``, in addition to Megatron's arguments."""
    custom_model_provider_function: Callable[..., Any] | None = None
    """Creates a rank's part of the model, instead of building it from the model's configuration."""
    custom_prepare_model_function: Callable[..., Any] | None = None
    """Called with the Accelerator; returns the model."""
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    """Called with the numbers of samples for training, validation and test; returns their datasets."""
    custom_get_batch_function: Callable[..., Any] | None = None
    """Called with an iterator; returns the values of a batch that the train step needs."""
    custom_loss_function: Callable[..., Any] | None = None
    """A function that replaces the train step's loss function."""
    other_megatron_args: dict[str, Any] | None = None
    """Further arguments of Megatron by name, which override the other fields."""

    def __post_init__(self) -> None:
        self._clipping_given = self.gradient_clipping is not None or bool(environ.text(f"{_PREFIX}GRADIENT_CLIPPING"))
        self._micro_batches_given = self.num_micro_batches is not None or bool(
            environ.text(f"{_PREFIX}NUM_MICRO_BATCHES")
        )
        if self.other_megatron_args is not None:
            self.other_megatron_args = _named_as_in_core(self.other_megatron_args)
        self.scheduled = False  # Its presence decides whether the learning rate follows a schedule.
        fill_unset(self)
        self._check()
        self.megatron_lm_default_args: dict[str, Any] = {
            each.argument: value
            for each in settings_of(MegatronLMPlugin).values()
            if each.argument is not None and (value := getattr(self, each.name)) is not None
        }
        if self.recompute_activations and self.recompute_granularity is None:
            self.megatron_lm_default_args["recompute_granularity"] = "selective"
        if self.tensorboard_dir is not None:
            self.set_tensorboard_logging_options()
        self.megatron_lm_default_args |= self.other_megatron_args or {}

    def _check(self) -> None:
        for name in _DEGREES:
            value = getattr(self, name)
            if value is not None:
                check_whole_number(name, value)
        if self.sequence_parallelism and self.tp_degree == 1:
            raise ValueError(
                "sequence_parallelism=True splits sequences across the ranks that share tensors, but with tp_degree=1 "
                "no ranks do; set tp_degree above 1, or leave sequence_parallelism out"
            )
        if (self.context_parallel_size or 1) > 1:
            raise ValueError(
                f"context_parallel_size={self.context_parallel_size} is not available with Megatron-LM; use 1, or "
                "FSDP 2 with ParallelismConfig(cp_size=...)"
            )

    # -- settings that the strategy fills in --------------------------------------------------------------------------

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Copy a model's sizes from its configuration.

        Args:
            model: A model with a `config` like that of transformers models.
            batch_data: A batch, whose sequence length is used if no other length is given.

        Raises:
            ValueError: The type of model is unknown.
        """
        kind = getattr(getattr(model, "config", None), "model_type", None)
        parser = MODEL_CONFIGS_TO_MEGATRON_PARSERS.get(str(kind))
        if parser is None:
            raise ValueError(
                f"{type(model).__name__} has config.model_type={kind!r}, but Megatron-LM builds only models of "
                f"{', '.join(sorted(MODEL_CONFIGS_TO_MEGATRON_PARSERS))}; register it with "
                "@add_model_config_to_megatron_parser(model_type), or pass "
                "MegatronLMPlugin(custom_model_provider_function=...)"
            )
        parser(self, model, batch_data)
        self.megatron_lm_default_args |= self.other_megatron_args or {}

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision of the model.

        Args:
            mixed_precision: no, bf16 or fp16.

        Raises:
            ValueError: The precision is not one of these.
        """
        if mixed_precision not in {"no", "bf16", "fp16"}:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} is not available with Megatron-LM; pass 'no', 'bf16' or 'fp16'"
            )
        for name in ("bf16", "fp16"):
            self.megatron_lm_default_args[name] = mixed_precision == name

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes.

        Args:
            micro_batch_size: Samples per rank in one micro-batch.
            dp_degree: Number of groups of ranks that read different data.
        """
        self.dp_degree, self.micro_batch_size = dp_degree, micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * (self.num_micro_batches or 1)
        self.megatron_lm_default_args |= {
            "data_parallel_size": dp_degree,
            "micro_batch_size": micro_batch_size,
            "global_batch_size": self.global_batch_size,
        }

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Copy the settings of an optimizer.

        Args:
            optimizer: torch's Adam, AdamW or SGD, or an optimizer with the same settings.

        Raises:
            ValueError: Megatron-LM has no such optimizer.
        """
        name, settings = type(optimizer).__name__, optimizer.defaults
        kind = next((known for known in ("adam", "sgd") if known in name.lower()), None)
        if kind is None:
            raise ValueError(f"Megatron-LM has no {name}; prepare torch.optim.AdamW, Adam or SGD")
        arguments = {
            "optimizer": kind,
            "lr": max(group["lr"] for group in optimizer.param_groups),
            "weight_decay": max(group.get("weight_decay", 0.0) for group in optimizer.param_groups),
        }
        if kind == "adam":
            arguments["adam_beta1"], arguments["adam_beta2"] = settings["betas"]
            arguments |= {"adam_eps": settings["eps"], "decoupled_weight_decay": "adamw" in name.lower()}
        else:
            arguments["sgd_momentum"] = settings.get("momentum", 0.0)
        self.megatron_lm_default_args |= {**arguments, "min_lr": self.min_lr, **(self.other_megatron_args or {})}

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Copy a schedule's lengths, unless this plugin sets them.

        Args:
            scheduler: A `MegatronLMDummyScheduler`, whose steps count the batches of all ranks.
        """
        ranks = getattr(self, "dp_degree", 1)
        if self.lr_decay_iters is None and self.lr_decay_samples is None:
            total = scheduler.total_num_steps
            self.train_iters = self.train_iters or (None if total is None else -(-total // ranks))
            self.lr_decay_iters = self.train_iters
        if self.lr_warmup_iters is None and self.lr_warmup_samples is None and self.lr_warmup_fraction is None:
            self.lr_warmup_iters = -(-(scheduler.warmup_num_steps or 0) // ranks)
        self.megatron_lm_default_args |= {
            name: getattr(self, name) for name in _SCHEDULE if getattr(self, name) is not None
        }

    def set_tensorboard_logging_options(self) -> None:
        """Set the folder for TensorBoard's files and, with `set_all_logging_options`, the values to log."""
        self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
        if self.set_all_logging_options:
            self.megatron_lm_default_args |= dict.fromkeys(_LOGGED, True)


_POSITIONS = {"absolute": "learned_absolute", "rotary": "rope"}
_DEGREES = ("tp_degree", "pp_degree", "expert_model_parallel_size", "context_parallel_size", "num_micro_batches")
_SCHEDULE = (
    *("train_iters", "train_samples", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
    *("lr_warmup_samples", "lr_warmup_fraction", "min_lr", "start_weight_decay", "end_weight_decay"),
    "weight_decay_incr_style",
)
_LOGGED = ("log_params_norm", "log_num_zeros_in_grad", "log_memory_to_tensorboard", "log_world_size_to_tensorboard")

# These functions translate a model's configuration to Megatron's arguments, by model type.
MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Callable[..., Any]] = {}


def _named_as_in_core(arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert former names and values of Megatron-LM's arguments, which megatron-core would ignore, to its own."""
    found = dict(arguments)
    if "position_embedding_type" in found:
        kind = _POSITIONS.get(found["position_embedding_type"], found["position_embedding_type"])
        check_one_of("position_embedding_type", kind, ("learned_absolute", "rope", "mrope", "yarn", "none"))
        found["position_embedding_type"] = kind
    heads = found.pop("attention_head_type", "multihead")
    check_one_of("attention_head_type", heads, ("multihead", "multiquery"))
    return {"num_query_groups": 1, **found} if heads == "multiquery" else found


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that translates a model type's configuration to Megatron's arguments.

    Args:
        model_type: The type, as in ``model.config.model_type``.

    Returns:
        A decorator for the function.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = function
        return function

    return register


def _first_set(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of several attributes that a configuration sets."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return default


def _set_shape(plugin: MegatronLMPlugin, config: Any, batch_data: Any, **more: Any) -> None:
    """Set the arguments that all types of models derive from their configurations in the same way."""
    width = _first_set(config, "hidden_size", "n_embd", "d_model")
    positions = _first_set(config, "max_position_embeddings", "n_positions")
    length = plugin.seq_length or plugin.decoder_seq_length
    if length is None and batch_data:
        length = batch_data["input_ids"].shape[1]
    arguments = {
        "num_layers": _first_set(config, "num_hidden_layers", "n_layer", "num_layers"),
        "hidden_size": width,
        "num_attention_heads": _first_set(config, "num_attention_heads", "n_head", "num_heads"),
        "ffn_hidden_size": _first_set(config, "intermediate_size", "n_inner", "d_ff", default=4 * width),
        "max_position_embeddings": positions or length,
        "seq_length": length or positions,
        "orig_vocab_size": config.vocab_size,
        "attention_dropout": _first_set(
            config, "attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "dropout_rate"
        ),
        "hidden_dropout": _first_set(config, "hidden_dropout_prob", "resid_pdrop", "dropout_rate"),
        "layernorm_epsilon": _first_set(config, "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", default=1e-5),
        "init_method_std": _first_set(config, "initializer_range", default=0.02),
        "untie_embeddings_and_output_weights": not _first_set(config, "tie_word_embeddings", default=True),
        "model_return_dict": bool(_first_set(config, "use_return_dict", "return_dict", default=False)),
        **more,
    }
    known = {name: value for name, value in arguments.items() if value is not None}
    chosen = {name: getattr(plugin, name, None) for name in ("attention_dropout", "hidden_dropout")}
    plugin.megatron_lm_default_args |= known | {name: value for name, value in chosen.items() if value is not None}
    if plugin.use_rotary_position_embeddings:
        plugin.megatron_lm_default_args["position_embedding_type"] = "rope"


@add_model_config_to_megatron_parser("gpt2")
def _parse_gpt2(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    _set_shape(plugin, model.config, batch_data, model_type_name="gpt", position_embedding_type="learned_absolute")


@add_model_config_to_megatron_parser("llama")
def _parse_llama(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    _set_shape(
        plugin,
        model.config,
        batch_data,
        model_type_name="gpt",
        position_embedding_type="rope",
        num_query_groups=_first_set(model.config, "num_key_value_heads"),
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        rotary_base=int(_first_set(model.config, "rope_theta", default=10000)),
        attention_dropout=_first_set(model.config, "attention_dropout", default=0.0),
        hidden_dropout=0.0,
    )


@add_model_config_to_megatron_parser("megatron-bert")
def _parse_bert(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    kind = type(model).__name__.lower()
    pretraining = "pretraining" in kind
    _set_shape(
        plugin,
        model.config,
        batch_data,
        model_type_name="bert",
        position_embedding_type="learned_absolute",
        pretraining_flag="classification" not in kind,
        bert_binary_head=pretraining,
        num_labels=_first_set(model.config, "num_labels", default=2),
    )


@add_model_config_to_megatron_parser("t5")
def _parse_t5(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    encoder = plugin.encoder_seq_length
    if encoder is None and batch_data:
        encoder = batch_data["input_ids"].shape[1]
    _set_shape(
        plugin,
        model.config,
        batch_data,
        model_type_name="t5",
        position_embedding_type="learned_absolute",
        max_position_embeddings=_first_set(model.config, "n_positions", default=512),
        encoder_num_layers=model.config.num_layers,
        num_layers=_first_set(model.config, "num_decoder_layers", "num_layers"),
        kv_channels=model.config.d_kv,
        layernorm_epsilon=model.config.layer_norm_epsilon,
        encoder_seq_length=encoder,
        pad_token_id=_first_set(model.config, "pad_token_id", default=0),
    )
