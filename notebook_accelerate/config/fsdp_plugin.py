"""Settings of FullyShardedDataParallel."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.config import constants, environ
from notebook_accelerate.config.plain_values import check_one_of, check_whole_number
from notebook_accelerate.config.settings import (
    SettingsSection,
    check_choices,
    fill_unset,
    from_environment,
    setting,
    settings_of,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        MixedPrecision,
        MixedPrecisionPolicy,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictType,
    )

_logger = accelerate_logger("utils.dataclasses")


@dataclass
class FullyShardedDataParallelPlugin:
    """Settings of FSDP 1 and 2. The constructor replaces names with torch's objects.

    Raises:
        ValueError: A value is not allowed, or belongs to the other version of FSDP.
    """

    settings = SettingsSection("fsdp_config", "fsdp_", "FSDP_", strategy="fsdp", title="FSDP")

    fsdp_version: int | None = setting(unset=1, choices=(1, 2), closed=True, ask="Which version of FSDP?", answer=2)
    """Version of FSDP: 1 or 2."""
    sharding_strategy: str | ShardingStrategy | None = setting(
        unset="FULL_SHARD",
        choices=constants.FSDP_SHARDING_STRATEGY,
        ask="Which sharding strategy?",
        when=lambda answers: answers["fsdp_version"] == 1,
    )
    """FSDP 1: which tensors are sharded."""
    reshard_after_forward: str | ShardingStrategy | bool | None = setting(
        unset=True,
        read=environ.flag,
        preset="true",
        ask="Reshard parameters after the forward pass, to save memory?",
        when=lambda answers: answers["fsdp_version"] == 2,
    )
    """FSDP 2: whether parameters are freed after the forward pass. FSDP 1: another name for ``sharding_strategy``."""
    backward_prefetch: str | BackwardPrefetch | None = setting(
        former="fsdp_backward_prefetch_policy", choices=constants.FSDP_BACKWARD_PREFETCH
    )
    """FSDP 1: when the backward pass gathers the next unit: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH (default)."""
    mixed_precision_policy: dict[str, Any] | str | MixedPrecision | MixedPrecisionPolicy | None = None
    """A precision, a dict of param_dtype, reduce_dtype and output_dtype (FSDP 1: buffer_dtype), or torch's object.

    If None, the precision of the `Accelerator` is used.
    """
    auto_wrap_policy: Callable[..., Any] | Literal["transformer_based_wrap", "size_based_wrap", "no_wrap"] | None = (
        setting(
            unset="NO_WRAP",
            preset=None,
            ask="How is the model divided into units?",
            answer="TRANSFORMER_BASED_WRAP",
            answers=tuple(constants.FSDP_AUTO_WRAP_POLICY),
        )
    )
    """How units are found: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, or a callable for torch's FSDP."""
    cpu_offload: bool | CPUOffload | CPUOffloadPolicy | None = setting(
        variable="FSDP_OFFLOAD_PARAMS",
        unset=False,
        option="fsdp_offload_params",
        ask="Offload parameters and gradients to the CPU?",
        place=1,
    )
    """Whether parameters are offloaded to CPU memory."""
    ignored_modules: Iterable[torch.nn.Module] | str | None = setting(option=None)
    """Modules that are not sharded, or a regular expression for their full names."""
    state_dict_type: str | StateDictType | None = setting(
        choices=constants.FSDP_STATE_DICT_TYPE,
        ask="Which type of state dict for checkpoints?",
        answer="SHARDED_STATE_DICT",
        answers=tuple(constants.FSDP2_STATE_DICT_TYPE),
        place=2,
    )
    """Type of state dicts in checkpoints: FULL_STATE_DICT, LOCAL_STATE_DICT (FSDP 1) or SHARDED_STATE_DICT.

    The default is FULL_STATE_DICT in FSDP 1, and SHARDED_STATE_DICT in FSDP 2.
    """
    state_dict_config: FullStateDictConfig | ShardedStateDictConfig | None = None
    """torch's settings for the model's state dict. ``state_dict_type`` sets them."""
    optim_state_dict_config: FullOptimStateDictConfig | ShardedOptimStateDictConfig | None = None
    """torch's settings for the optimizer's state dict. ``state_dict_type`` sets them."""
    limit_all_gathers: bool = True
    """FSDP 1: whether the CPU waits before it gathers more than the next unit, to limit the memory in use."""
    use_orig_params: bool | None = setting(unset=False, preset=True)
    """FSDP 1: whether the optimizer sees the original parameters instead of one flat parameter for each unit."""
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    """Called with each module on the meta device, to allocate and initialize its parameters."""
    sync_module_states: bool | None = setting(unset=False, preset=True)
    """Whether all ranks start with the weights of rank 0.

    In FSDP 1, it is always True with ``cpu_ram_efficient_loading``. In FSDP 2, it is True unless set to False.
    """
    forward_prefetch: bool | None = setting(unset=False)
    """FSDP 1: whether the next unit is gathered before the forward pass of the current one."""
    activation_checkpointing: bool | None = setting(
        unset=False, ask="Recompute activations in the backward pass?", place=1
    )
    """Whether the activations of units are recomputed in the backward pass."""
    activation_checkpointing_offload: bool | None = setting(unset=False)
    """Whether the inputs of recomputed units are kept in CPU memory until the backward pass."""
    cpu_ram_efficient_loading: bool | None = setting(unset=False, preset=True)
    """Whether only rank 0 loads the weights."""
    transformer_cls_names_to_wrap: list[str] | None = setting(
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        option="fsdp_transformer_layer_cls_to_wrap",
        ask="Classes of the units, separated by commas (empty: the model's own)?",
        when=lambda answers: answers["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP",
    )
    """Names of the classes of modules that become units, separated by commas in variables and options.

    If None, the model's ``_no_split_modules`` are used.
    """
    min_num_params: int | None = setting(preset=100_000_000)
    """With SIZE_BASED_WRAP, modules with at least this many parameters become units. If None, 100 million."""

    def __post_init__(self) -> None:
        fill_unset(self, "fsdp_version")
        check_choices(self, "fsdp_version")
        if self.sharding_strategy is not None:
            _logger.warning("sharding_strategy is deprecated: write reshard_after_forward")
        if self.fsdp_version == 1:
            self.sharding_strategy = self._strategy_by_either_name()
        fill_unset(self, without=_OF_FSDP_1 if self.fsdp_version == 2 else _OF_FSDP_2)
        names: Any = self.transformer_cls_names_to_wrap or from_environment(type(self), "transformer_cls_names_to_wrap")
        if isinstance(names, str):
            self.transformer_cls_names_to_wrap = [name.strip() for name in names.split(",")]
        self._check_choices()
        if self.cpu_ram_efficient_loading and self.fsdp_version == 1 and not self.sync_module_states:
            warnings.warn(
                "sync_module_states is set to True: with cpu_ram_efficient_loading=True, only rank 0 loads the weights",
                stacklevel=3,
            )
            self.sync_module_states = True
        self._replace_names()

    def _strategy_by_either_name(self) -> Any:
        given = self.reshard_after_forward if self.sharding_strategy is None else self.sharding_strategy
        if isinstance(given, bool):
            raise ValueError(
                f"reshard_after_forward={given} belongs to FSDP 2; with fsdp_version=1 pass sharding_strategy="
                f'"{"FULL_SHARD" if given else "SHARD_GRAD_OP"}"'
            )
        return given

    def _check_choices(self) -> None:
        self.auto_wrap_policy = choice("auto_wrap_policy", self.auto_wrap_policy, constants.FSDP_AUTO_WRAP_POLICY)
        if self.fsdp_version == 1:
            for name in ("sharding_strategy", "backward_prefetch"):
                allowed = settings_of(FullyShardedDataParallelPlugin)[name].choices
                setattr(self, name, choice(name, getattr(self, name), allowed))
        else:
            self._check_version_2()
        allowed = constants.FSDP_STATE_DICT_TYPE if self.fsdp_version == 1 else constants.FSDP2_STATE_DICT_TYPE
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        self.state_dict_type = choice("state_dict_type", self.state_dict_type or default, allowed)
        if self.min_num_params is not None:
            check_whole_number("min_num_params", self.min_num_params, least=0)
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError(
                "activation_checkpointing_offload=True has no effect alone; pass activation_checkpointing=True, too"
            )

    def _check_version_2(self) -> None:
        sharding = " (reshard_after_forward=True shards like FULL_SHARD, False like SHARD_GRAD_OP)"
        for name, instead in (("sharding_strategy", sharding), ("forward_prefetch", "")):
            if value := getattr(self, name):
                raise ValueError(f"{name}={value!r} belongs to FSDP 1; with fsdp_version=2 leave it out{instead}")
        # sync_module_states=False has an effect: without it, FSDP 2 starts with the weights of rank 0.
        obsolete = [name for name in _OBSOLETE if getattr(self, name) is not None]
        obsolete += ["sync_module_states"] if self.sync_module_states else []
        if obsolete:
            _logger.warning("%s: these settings of FSDP 1 have no effect with fsdp_version=2", ", ".join(obsolete))
        self.backward_prefetch = self.use_orig_params = None
        if self.sync_module_states:
            self.sync_module_states = None
        if isinstance(self.reshard_after_forward, str):
            self.reshard_after_forward = environ.parse_flag(self.reshard_after_forward)

    # -- names replaced with torch's objects --------------------------------------------------------------------------

    def _replace_names(self) -> None:
        from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

        if isinstance(self.sharding_strategy, str):
            names = {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}
            self.sharding_strategy = ShardingStrategy[names.get(self.sharding_strategy, self.sharding_strategy)]
        if isinstance(self.backward_prefetch, str):
            none = self.backward_prefetch == "NO_PREFETCH"
            self.backward_prefetch = None if none else BackwardPrefetch[self.backward_prefetch]
        if isinstance(self.auto_wrap_policy, str):
            self.auto_wrap_policy = _policy_function(self.auto_wrap_policy)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self.set_state_dict_type()

    def policy_for(self, model: torch.nn.Module) -> Callable[..., bool] | None:
        """Return the policy that divides a model into units.

        Args:
            model: The model, before it is wrapped.

        Returns:
            A callable for torch's FSDP, or None if the model is one unit.

        Raises:
            ValueError: The model lacks a class in `transformer_cls_names_to_wrap`, or all of its ``_no_split_modules``.
        """
        given: Any = self.auto_wrap_policy
        if given is None:
            return None
        if given is _policy_function("TRANSFORMER_BASED_WRAP"):
            classes = _unit_classes(model, self.transformer_cls_names_to_wrap)
            return functools.partial(given, transformer_layer_cls=classes)
        if given is _policy_function("SIZE_BASED_WRAP"):
            return functools.partial(given, min_num_params=self.min_num_params or 10**8)
        return given  # type: ignore[no-any-return]

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Replace the name of a policy with torch's callable for a model.

        Args:
            model: The model that will be divided into units.
        """
        self.auto_wrap_policy = self.policy_for(model)

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set torch's mixed precision policy for a precision.

        Args:
            mixed_precision: fp16, bf16 or fp32, or a dtype.
            buffer_autocast: Whether buffers stay in float32 (FSDP 1).
            override: Whether to replace an earlier policy.

        Raises:
            ValueError: The precision is unknown.
        """
        if (
            self.mixed_precision_policy is not None
            and not isinstance(self.mixed_precision_policy, str)
            and not override
        ):
            self.validate_mixed_precision_policy()
            return
        import torch

        dtype = _dtype_of(mixed_precision)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"mixed_precision={mixed_precision!r} is not allowed; pass one of {', '.join(_PRECISIONS)}"
            )
        self.mixed_precision_policy = {"param_dtype": dtype, "reduce_dtype": dtype}
        if self.fsdp_version == 1:
            self.mixed_precision_policy["buffer_dtype"] = torch.float32 if buffer_autocast else dtype
        self.validate_mixed_precision_policy()

    def validate_mixed_precision_policy(self) -> None:
        """Replace a mixed precision policy that is a name or a dict with torch's object.

        Raises:
            ValueError: The policy does not belong to this FSDP version.
        """
        given = self.mixed_precision_policy
        if isinstance(given, str):
            self.set_mixed_precision(given, override=True)
            return
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        kind: Any = MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy
        if isinstance(given, dict):
            try:
                dtypes = {name: _dtype_of(value) if name.endswith("dtype") else value for name, value in given.items()}
                self.mixed_precision_policy = kind(**dtypes)
            except TypeError as error:
                raise ValueError(f"mixed_precision_policy={given!r} does not fit {kind.__name__}: {error}") from error
        elif given is not None and not isinstance(given, kind):
            raise ValueError(
                f"mixed_precision_policy is a {type(given).__name__}; with fsdp_version={self.fsdp_version} pass a "
                f"torch.distributed.fsdp.{kind.__name__}, a dict of dtypes, or the name of a precision"
            )

    def set_cpu_offload(self) -> None:
        """Replace `cpu_offload=True` or `False` with torch's object."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        if not isinstance(self.cpu_offload, bool):
            return
        if self.fsdp_version == 1:
            self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)
        else:
            self.cpu_offload = CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()  # type: ignore[assignment]

    def validate_cpu_offload(self) -> None:
        """Check that `cpu_offload` belongs to this FSDP version.

        Raises:
            ValueError: The value belongs to the other version.
        """
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        kind: Any = CPUOffload if self.fsdp_version == 1 else OffloadPolicy
        if not isinstance(self.cpu_offload, (bool, kind)):
            raise ValueError(
                f"cpu_offload is a {type(self.cpu_offload).__name__}; with fsdp_version={self.fsdp_version} pass True, "
                f"False or a torch.distributed.fsdp.{'CPUOffload' if self.fsdp_version == 1 else 'CPUOffloadPolicy'}"
            )

    @property
    def offloads(self) -> bool:
        """Whether parameters are offloaded to CPU memory."""
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

        given: Any = self.cpu_offload
        return (
            given.offload_params
            if isinstance(given, CPUOffload)
            else given is True or isinstance(given, CPUOffloadPolicy)
        )

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Set the type of state dicts, and torch's settings for this type.

        Args:
            state_dict_type: FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT. If None, the type is kept.

        Raises:
            ValueError: This version of FSDP does not have the type.
        """
        from torch.distributed import fsdp

        allowed = constants.FSDP_STATE_DICT_TYPE if self.fsdp_version == 1 else constants.FSDP2_STATE_DICT_TYPE
        given = choice("state_dict_type", state_dict_type or self.state_dict_type, allowed)
        self.state_dict_type = fsdp.StateDictType[given] if isinstance(given, str) else given
        if self.state_dict_type == fsdp.StateDictType.FULL_STATE_DICT:
            self.state_dict_config = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            self.optim_state_dict_config = fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        elif self.state_dict_type == fsdp.StateDictType.SHARDED_STATE_DICT:
            self.state_dict_config = fsdp.ShardedStateDictConfig(offload_to_cpu=True)
            self.optim_state_dict_config = fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)

    @property
    def state_dict_kind(self) -> str:
        """The name of the state dict type, such as FULL_STATE_DICT."""
        return str(getattr(self.state_dict_type, "name", self.state_dict_type))

    @staticmethod
    def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
        """Deprecated: call ``utils.dataclasses.get_module_class_from_name``.

        Args:
            module: The model to search.
            name: Name of the class to find.
        """
        return get_module_class_from_name(module, name)


_OBSOLETE = ("backward_prefetch", "use_orig_params")  # FSDP 2 always prefetches and keeps the original parameters.
_OF_FSDP_1 = ("sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states", "forward_prefetch")
_OF_FSDP_2 = ("reshard_after_forward",)
"""Fields that only one of the two versions of FSDP reads from variables."""


def choice(name: str, value: Any, allowed: Sequence[str]) -> Any:
    """Check a name and return it in upper case. Return torch's objects and None unchanged.

    Args:
        name: Name of the field, for the message.
        value: The name of a choice, its number as in older files, or another object.
        allowed: The allowed names.

    Raises:
        ValueError: The name is not allowed.
    """
    if not isinstance(value, str):
        return value
    if value.isdigit() and 1 <= int(value) <= len(allowed):  # Older files number the choices from 1.
        return allowed[int(value) - 1]
    if value.upper() not in allowed:
        check_one_of(name, value, allowed)
    return value.upper()


def _policy_function(name: str) -> Any:
    """Return torch's function for a policy's name, or None if the model is one unit."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    functions = {"TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy, "SIZE_BASED_WRAP": size_based_auto_wrap_policy}
    return functions.get(name)


_PRECISIONS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "no": "float32", "fp8": "bfloat16"}


def _dtype_of(name: Any) -> Any:
    """Return a dtype, given the dtype itself, its name in torch, or the name of a precision. Return None unchanged."""
    import torch

    if name is None or isinstance(name, torch.dtype):
        return name
    text = str(getattr(name, "value", name)).removeprefix("torch.")
    found = getattr(torch, _PRECISIONS.get(text, text), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype; pass one of {', '.join(_PRECISIONS)}, or a torch.dtype")
    return found


def _unit_classes(model: torch.nn.Module, names: Iterable[str] | None) -> set[type[torch.nn.Module]]:
    """Return the classes that become units: the named ones, or the model's ``_no_split_modules``."""
    wanted = list(names) if names is not None else list(getattr(model, "_no_split_modules", None) or ())
    if not wanted:
        warnings.warn(
            f"auto_wrap_policy='transformer_based_wrap' names no class of {type(model).__name__}, so the model is one "
            'unit, whose parameters are all gathered at once; pass transformer_cls_names_to_wrap=["Block"]',
            stacklevel=3,
        )
    found = {name: get_module_class_from_name(model, name) for name in wanted}
    missing = [name for name, kind in found.items() if kind is None]
    if missing and (names is not None or len(missing) == len(wanted)):
        present = sorted({type(child).__name__ for child in model.modules() if any(True for _ in child.children())})
        raise ValueError(
            f"transformer_cls_names_to_wrap names {', '.join(missing)}, which {type(model).__name__} does not have; "
            f"its modules with children are {', '.join(present)}"
        )
    return {kind for kind in found.values() if kind is not None}


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """Return the class with this name among the classes of a model's modules, or None if no module has such a class.

    Args:
        module: The model to search.
        name: Name of the class to find.
    """
    return next((type(child) for child in module.modules() if type(child).__name__ == name), None)
