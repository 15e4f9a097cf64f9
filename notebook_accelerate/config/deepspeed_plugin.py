"""Settings of DeepSpeed, and placeholders for the optimizer and the scheduler that its configuration defines."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from notebook_accelerate.config import environ
from notebook_accelerate.config.deepspeed_config import AUTO, DerivedConfig, HfDeepSpeedConfig
from notebook_accelerate.config.fsdp_plugin import get_module_class_from_name
from notebook_accelerate.config.settings import (
    Answers,
    SettingsSection,
    check_choices,
    fill_unset,
    from_environment,
    setting,
    settings_of,
)

if TYPE_CHECKING:
    import torch

_ZERO = "zero_optimization"
_HALVES = {"fp16": {"enabled": True, "auto_cast": True}, "bf16": {"enabled": True}}


def _number_or_auto(kind: Callable[[str], Any]) -> Callable[[str, Any], Any]:
    """Return a function that reads a variable with a number or "auto"."""

    def read(variable: str, unset: Any) -> Any:
        text = environ.text(variable, AUTO)
        if text == AUTO:
            return unset
        try:
            return kind(str(text))
        except ValueError:
            raise ValueError(f"environment variable {variable}={text!r} is neither a number nor auto") from None

    return read


def _is_msamp(variable: str, _: Any) -> bool:
    return str(environ.text(variable)).upper() == "MSAMP"


def _without_file(answers: Answers) -> bool:
    return not answers["deepspeed_config_file"]


def _device(part: str, question: str) -> Any:
    """Create the setting for the device that the optimizer or the parameters are offloaded to."""
    key = f"{_ZERO}.offload_{part}.device"
    return setting(unset="none", choices=("none", "cpu", "nvme"), ask=question, when=_without_file, argument=key)


@dataclass
class DeepSpeedPlugin:
    """Settings of DeepSpeed.

    Attributes:
        deepspeed_config: The configuration for DeepSpeed, a dict. `prepare` fills in its "auto" values.

    Raises:
        ValueError: A value is not allowed, or fields and configuration contradict each other.
    """

    settings = SettingsSection("deepspeed_config", "", "ACCELERATE_DEEPSPEED_", "deepspeed", "DeepSpeed", presets=False)

    hf_ds_config: Any = setting(
        variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        option="deepspeed_config_file",
        ask="DeepSpeed's JSON file (empty: none)?",
    )
    """A DeepSpeed configuration (path, dict or ``HfDeepSpeedConfig``). If None, it is derived from the other fields."""
    gradient_accumulation_steps: int | None = setting(
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        argument="gradient_accumulation_steps",
        read=_number_or_auto(int),
        ask="How many batches per optimizer step?",
        answer=1,
        when=_without_file,
        place=1,
    )
    """Number of batches per optimizer step. If None, the ``Accelerator``'s value."""
    gradient_clipping: float | None = setting(
        variable="ACCELERATE_GRADIENT_CLIPPING",
        argument="gradient_clipping",
        read=_number_or_auto(float),
        ask="Which maximum norm of gradients?",
        answer=1.0,
        when=_without_file,
        place=1,
    )
    """Maximum norm of gradients. If None, the argument of ``clip_grad_norm_``."""
    zero_stage: int | None = setting(
        unset=2,
        choices=(0, 1, 2, 3),
        ask="Which ZeRO stage?",
        when=_without_file,
        argument=f"{_ZERO}.stage",
    )
    """ZeRO stage: 0, 1, 2 or 3."""
    is_train_batch_min: bool = True
    """Whether the smallest (True) or the largest (False) batch size of several loaders is used."""
    offload_optimizer_device: str | None = _device("optimizer", "Where to offload the optimizer?")
    """Where the optimizer's state is offloaded: none, cpu or nvme."""
    offload_param_device: str | None = _device("param", "Where to offload parameters?")
    """Where stage 3 offloads parameters: none, cpu or nvme."""
    offload_optimizer_nvme_path: str | None = setting(argument=f"{_ZERO}.offload_optimizer.nvme_path")
    """Folder on an NVMe disk for the optimizer's state."""
    offload_param_nvme_path: str | None = setting(argument=f"{_ZERO}.offload_param.nvme_path")
    """Folder on an NVMe disk for parameters."""
    zero3_init_flag: bool | None = setting(variable="ACCELERATE_DEEPSPEED_ZERO3_INIT", unset=True, preset=None)
    """Whether transformers shards models during construction, with stage 3."""
    zero3_save_16bit_model: bool | None = setting(
        unset=True, argument=f"{_ZERO}.stage3_gather_16bit_weights_on_model_save"
    )
    """Whether stage 3 gathers the full weights when it saves a model.

    With ``hf_ds_config``, the value comes from that configuration. If it has no value, DeepSpeed's default is False.
    """
    transformer_moe_cls_names: str | None = setting(
        variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", option="deepspeed_moe_layer_cls_names"
    )
    """Classes of expert layers that stage 3 gathers as a whole, separated by commas."""
    enable_msamp: bool | None = setting(variable="ACCELERATE_FP8_BACKEND", read=_is_msamp, option=None)
    """Whether MS-AMP keeps optimizer states in 8 bits. If None, only if the fp8 backend is MSAMP."""
    msamp_opt_level: Literal["O1", "O2"] | None = setting(variable="ACCELERATE_FP8_OPT_LEVEL", unset="O1", option=None)
    """Optimization level of MS-AMP: O1 or O2."""

    def __post_init__(self) -> None:
        self._selected = False
        self.dschf: Any = None
        given = {name: getattr(self, name) for name in _keys() if getattr(self, name) is not None}
        self._read_environment()
        if self.hf_ds_config is None:
            self._check_fields()
            self.hf_ds_config = DerivedConfig(self._config_from_fields())
        else:
            if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
                self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
            self._merge_config(given)
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self._finish()

    # -- fields and configuration -------------------------------------------------------------------------------------

    def _read_environment(self) -> None:
        if self.hf_ds_config is None:
            path = from_environment(DeepSpeedPlugin, "hf_ds_config")
            self.hf_ds_config = None if path == "none" else path
        if self.hf_ds_config is None:  # A given configuration already has values for these fields.
            fill_unset(self, *_keys())
        else:
            check_launched_fields(environ.text("ACCELERATE_CONFIG_DS_FIELDS", "").split(","))  # type: ignore[union-attr]
        fill_unset(self, "enable_msamp", "msamp_opt_level")

    def _check_fields(self) -> None:
        check_choices(self, "zero_stage")
        assert self.zero_stage is not None
        for part, least in (("optimizer", 1), ("param", 3)):
            device = getattr(self, f"offload_{part}_device")
            check_choices(self, f"offload_{part}_device")
            if device != "none" and self.zero_stage < least:
                raise ValueError(
                    f"offload_{part}_device={device!r} needs zero_stage={least}{'' if least == 3 else ' or more'}, but "
                    f"zero_stage={self.zero_stage}"
                )
            if device == "nvme" and getattr(self, f"offload_{part}_nvme_path") is None:
                raise ValueError(f"offload_{part}_device='nvme' needs a folder: pass offload_{part}_nvme_path")

    def _config_from_fields(self) -> dict[str, Any]:
        """Return the configuration that the fields define."""
        values = {key: getattr(self, name) for name, key in _keys().items()}
        for part in ("optimizer", "param"):
            if getattr(self, f"offload_{part}_device") != "nvme":
                del values[f"{_ZERO}.offload_{part}.nvme_path"]
        values["gradient_accumulation_steps"] = self.gradient_accumulation_steps or AUTO
        values["gradient_clipping"] = AUTO if self.gradient_clipping is None else self.gradient_clipping
        config: dict[str, Any] = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}
        for key, value in values.items():
            _set_value(config, key, value)
        return config

    def _merge_config(self, given: dict[str, Any]) -> None:
        """Fill in a configuration's "auto" values from the fields, and the fields from its other values."""
        if _ZERO not in self.hf_ds_config.config:
            raise ValueError(
                'the DeepSpeed configuration has no "zero_optimization"; add one, as in '
                '{"zero_optimization": {"stage": 2}, ...} (stage 0: nothing is sharded)'
            )
        self.deepspeed_config = self.hf_ds_config.config
        mismatches: list[str] = []
        keys = _keys()
        launched = {name: from_environment(DeepSpeedPlugin, name) for name in keys if self.is_auto(keys[name])}
        for name, value in {**launched, **given}.items():
            if value is None:
                continue
            node, key = self.hf_ds_config.find_config_node(keys[name])
            if node is None or key not in node:
                _set_value(self.deepspeed_config, keys[name], value)
            else:
                self.fill_match(keys[name], mismatches, True, **{keys[name]: value})
        if mismatches:
            raise ValueError(_mismatch_text(mismatches, "fields of the DeepSpeedPlugin"))
        for name, key in keys.items():
            value = self.get_value(key)
            if value is not None and value != AUTO:
                setattr(self, name, value)
        self.zero_stage = self.get_value(f"{_ZERO}.stage", 0)
        self.offload_optimizer_device = self.offload_optimizer_device or "none"
        self.offload_param_device = self.offload_param_device or "none"

    def _finish(self) -> None:
        self.hf_ds_config.set_stage_and_offload()
        zero3 = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag is None:
            self.zero3_init_flag = zero3 and from_environment(DeepSpeedPlugin, "zero3_init_flag")
        if self.zero3_init_flag and not zero3:
            warnings.warn(
                f"zero3_init_flag=True has an effect only with ZeRO stage 3, but the stage is {self.zero_stage}; "
                "the flag is set to False",
                stacklevel=4,
            )
            self.zero3_init_flag = False
        if self.enable_msamp:
            check_choices(self, "msamp_opt_level")
            if zero3:
                raise ValueError("MS-AMP does not work with ZeRO stage 3; pass zero_stage=2, or enable_msamp=False")
            self.deepspeed_config["msamp"] = {"enabled": True, "opt_level": self.msamp_opt_level}

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value of the configuration.

        Args:
            ds_key_long: The dotted key, such as ``zero_optimization.stage``.
            default: The value to return if the key is missing.
        """
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value of the configuration is "auto".

        Args:
            ds_key_long: The dotted key.
        """
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill in one "auto" value, or compare a value with the known one.

        Args:
            ds_key_long: The dotted key.
            mismatches: A list that receives a line if the value differs or is unknown. If None, an error is raised
                instead.
            must_match: Whether a value that is not "auto" must equal the known one.
            kwargs: The known values, by dotted key.

        Raises:
            ValueError: The value differs, or is "auto" and no value is known.
        """
        found: list[str] = []
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        value = None if node is None else node.get(key)
        if value == AUTO:
            if ds_key_long in kwargs:
                node[key] = kwargs[ds_key_long]
            else:
                found.append(f"- {ds_key_long} is 'auto', but its value is not known here; set it, or leave it out")
        elif must_match and value is not None and ds_key_long in kwargs and value != kwargs[ds_key_long]:
            found.append(f"- {ds_key_long} is {value!r} in the configuration, but {kwargs[ds_key_long]!r} here")
        if mismatches is not None:
            mismatches.extend(found)
        elif found:
            raise ValueError(_mismatch_text(found, "the values known here"))

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in all "auto" values of the configuration, and compare the others with the known values.

        Args:
            prefix: The dotted key of the section `config`, ending with a dot.
            mismatches: A list that receives a line for each value that differs or is unknown. If None, a single error
                is raised for all of them.
            config: A section of the configuration. If None, the whole configuration.
            must_match: Whether values that are not "auto" must equal the known ones.
            kwargs: The known values, by dotted key.

        Raises:
            ValueError: Some values differ, or are "auto" and no value is known. The message lists all of them.
        """
        found: list[str] = [] if mismatches is None else mismatches
        for key, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, found, must_match, **kwargs)
        if mismatches is None:
            self.hf_ds_config.set_stage_and_offload()
            if found:
                raise ValueError(_mismatch_text(found, "the values known here"))

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the precision in the configuration.

        Args:
            mixed_precision: no, fp16, bf16 or fp8 (bf16 outside the fp8 layers).

        Raises:
            ValueError: The configuration has another precision.
        """
        wanted = {"fp8": "bf16"}.get(str(mixed_precision), str(mixed_precision))
        for name, section in _HALVES.items():
            other = "bf16" if name == "fp16" else "fp16"
            enabled = self.get_value(f"{other}.enabled")
            if wanted == name and enabled in {True, "true"}:
                raise ValueError(
                    f"mixed_precision={str(mixed_precision)!r}, but the DeepSpeed configuration enables {other}; "
                    f'write {{"{other}": {{"enabled": "auto"}}}} there, or pass mixed_precision={other!r}'
                )
            if wanted == name and name not in self.deepspeed_config:
                self.deepspeed_config[name] = dict(section)
            self.deepspeed_config.setdefault(name, {"enabled": False})
            known: dict[str, Any] = {f"{name}.enabled": wanted == name}
            self.fill_match(f"{name}.enabled", must_match=False, **known)

    @property
    def precision(self) -> str | None:
        """The precision that the configuration enables: fp16, bf16, or None for neither."""
        return next((name for name in _HALVES if self.get_value(f"{name}.enabled") in {True, "true"}), None)

    # -- transformers -------------------------------------------------------------------------------------------------

    def is_zero3_init_enabled(self) -> bool:
        """Return whether transformers shards models during construction."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Turn the sharding of new models on or off inside a with block.

        Args:
            enable: Whether to shard new models.

        Yields:
            Nothing.
        """
        before = self.zero3_init_flag
        self._set_zero3_init(enable)
        try:
            yield
        finally:
            self._set_zero3_init(bool(before))

    def _set_zero3_init(self, enable: bool) -> None:
        if self.zero3_init_flag != enable:
            self.zero3_init_flag = enable
            self.set_deepspeed_weakref()

    def set_deepspeed_weakref(self) -> None:
        """Pass the configuration to transformers, if installed, so that new models are sharded during construction.

        transformers keeps only a weak reference to the configuration, which is therefore dropped with this plugin.
        """
        self.dschf = None
        if not (self.zero3_init_flag and self.hf_ds_config.is_zero3()):
            # A module that is not imported yet has no configuration to unset.
            integration = sys.modules.get("transformers.integrations.deepspeed")
            if integration is not None and self._selected:
                integration.unset_hf_deepspeed_config()
            return
        if importlib.util.find_spec("transformers") is None:
            return
        integration = importlib.import_module("transformers.integrations.deepspeed")
        config = copy.deepcopy(self.deepspeed_config)
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if config.get(key, AUTO) == AUTO:
                config[key] = 1  # Sharding does not depend on this value, but DeepSpeed needs a number.
        if config.get("train_batch_size") == AUTO:
            del config["train_batch_size"]
        self.dschf = HfDeepSpeedConfig(_without_autos(config))
        integration.set_hf_deepspeed_config(self.dschf)

    def set_moe_leaf_modules(self, model: torch.nn.Module) -> None:
        """Make ZeRO stage 3 gather each expert layer as a whole. Otherwise ranks would wait for different experts.

        Args:
            model: The model with the expert layers.

        Raises:
            ValueError: The model has no layer of a class in `transformer_moe_cls_names`.
        """
        fill_unset(self, "transformer_moe_cls_names")
        if self.transformer_moe_cls_names is None:
            return
        names = [name.strip() for name in self.transformer_moe_cls_names.split(",")]
        classes = {name: get_module_class_from_name(model, name) for name in names}
        if missing := [name for name, found in classes.items() if found is None]:
            raise ValueError(
                f"transformer_moe_cls_names has {', '.join(missing)}, but {type(model).__name__} has no such layer; it "
                f"has {', '.join(sorted({type(module).__name__ for module in model.modules()}))}"
            )
        from deepspeed.utils import set_z3_leaf_modules

        set_z3_leaf_modules(model, list(classes.values()))

    # -- one of several -----------------------------------------------------------------------------------------------

    @property
    def selected(self) -> bool:
        """Whether this is the active plugin of an `Accelerator` with several plugins.

        Raises:
            NotImplementedError: The property is set.
        """
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            f"selected={value} cannot be set; call AcceleratorState().select_deepspeed_plugin(name)"
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this the active plugin. `AcceleratorState().select_deepspeed_plugin(name)` calls this.

        Args:
            _from_accelerator_state: Whether `AcceleratorState` is the caller. Only it can deselect the other plugins.

        Raises:
            ValueError: The caller is not `AcceleratorState`.
        """
        if not _from_accelerator_state:
            raise ValueError(
                "a DeepSpeedPlugin is selected by its name: AcceleratorState().select_deepspeed_plugin(name)"
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False
        self.dschf = None


def _keys() -> dict[str, str]:
    """Return the fields' keys in a DeepSpeed configuration, dotted if they are nested."""
    return {each.name: each.argument for each in settings_of(DeepSpeedPlugin).values() if each.argument}


def check_launched_fields(names: Iterable[str]) -> None:
    """Check that a section with ``deepspeed_config_file`` has no settings that belong in DeepSpeed's file.

    Args:
        names: The keys of the section.

    Raises:
        ValueError: The section has such settings, which would be ignored.
    """
    if fields := sorted(_keys().keys() & set(names)):
        raise ValueError(
            f"deepspeed_config sets deepspeed_config_file, so {', '.join(fields)} would be ignored; set them in "
            "DeepSpeed's file"
        )


def _set_value(config: dict[str, Any], dotted_key: str, value: Any) -> None:
    *path, key = dotted_key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[key] = value


def _mismatch_text(mismatches: list[str], other: str) -> str:
    lines = "\n".join(mismatches)
    return (
        f"the DeepSpeed configuration does not agree with {other}:\n{lines}\n"
        "Correct these values; 'auto' takes the values of the training run."
    )


def _without_autos(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if value != AUTO}
    return {key: _without_autos(value) if isinstance(value, dict) else value for key, value in kept.items()}


class DummyOptim:
    """Placeholder for an optimizer that the DeepSpeed configuration defines.

    Args:
        params: The parameters to optimize, or dicts that define groups of parameters.
        lr: The learning rate that replaces "auto" in the configuration.
        weight_decay: The weight decay that replaces "auto" in the configuration.
        **kwargs: Further values, which are stored unchanged.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Placeholder for a scheduler that the DeepSpeed configuration defines.

    Args:
        optimizer: The optimizer whose learning rate is scheduled.
        total_num_steps: Total number of steps, for "auto" values in the configuration.
        warmup_num_steps: Number of warm-up steps, for "auto" values in the configuration.
        lr_scheduler_callable: Called with an optimizer; returns its scheduler.
        **kwargs: Further values, which are stored unchanged.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
