"""`ParallelismConfig`: the parallel degrees, and the settings of tensor, context and sequence parallelism."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from notebook_accelerate.config.plain_values import check_one_of, check_whole_number
from notebook_accelerate.config.settings import SettingsSection, check_choices, fill_unset, setting
from notebook_accelerate.torch_internals import flatten_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_NAME = "parallelism_config"
_SECTION = SettingsSection(_NAME, f"{_NAME}_", f"{_NAME.upper()}_", strategy=_NAME, title="ParallelismConfig")
_CP_STRATEGIES = ("allgather", "alltoall")
_SP_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism for models that split themselves, as transformers models with ``tp_plan`` do.

    Raises:
        ValueError: ``tp_size`` is not a whole number above 0.
    """

    tp_size: int = 1
    """Number of ranks across which each tensor is split."""
    torch_device_mesh: DeviceMesh | None = None
    """The mesh across which the model was split. If None, it is created when it is needed."""

    def __post_init__(self) -> None:
        check_whole_number("tp_size", self.tp_size)


@dataclass
class TorchTensorParallelConfig:
    """Settings of tensor parallelism in a ``ParallelismConfig``."""

    enable_async_tp: bool = False
    """Whether communication overlaps with computation. This is not supported, so True only causes a warning."""

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "enable_async_tp=True has no effect: asynchronous tensor parallelism is not supported", stacklevel=3
            )


@dataclass
class TorchContextParallelConfig:
    """Settings of context parallelism in a ``ParallelismConfig``.

    Raises:
        ValueError: The strategy is unknown.
    """

    settings = _SECTION

    cp_comm_strategy: str | None = setting(unset="allgather")
    """How ranks exchange keys and values: allgather or alltoall."""

    def __post_init__(self) -> None:
        fill_unset(self)
        check_one_of("cp_comm_strategy", self.cp_comm_strategy, _CP_STRATEGIES)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of DeepSpeed's sequence parallelism (Ulysses) in a ``ParallelismConfig``.

    Raises:
        ValueError: The implementation of attention is unknown, or the length is fixed but not given.
    """

    settings = _SECTION

    sp_seq_length: int | None = setting()
    """Number of tokens of the whole sequence. If None, the length is taken from each batch."""
    sp_seq_length_is_variable: bool | None = setting(unset=True)
    """Whether the length of sequences differs between batches."""
    sp_attn_implementation: str | None = setting(preset="sdpa")
    """Implementation of attention: flash_attention_2, flash_attention_3, sdpa or a kernel on the Hub."""

    def __post_init__(self) -> None:
        fill_unset(self)
        if self.sp_seq_length is None and not self.sp_seq_length_is_variable:
            raise ValueError(
                "sp_seq_length_is_variable=False needs the length: pass sp_seq_length, or set "
                "PARALLELISM_CONFIG_SP_SEQ_LENGTH"
            )
        chosen = self.sp_attn_implementation
        if chosen is not None and chosen not in _SP_ATTENTIONS and "/" not in chosen:
            raise ValueError(
                f"sp_attn_implementation={chosen!r} is not allowed; pass one of "
                f"{', '.join(map(repr, _SP_ATTENTIONS))}, or the name of a kernel on the Hub"
            )


# The dimensions, outermost first. Ranks that differ only in the last dimension are neighbours, and communicate most.
_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "ep", "tp")
_HANDLERS = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
}


@dataclass
class ParallelismConfig:
    """The degree of each kind of parallelism. The product of the degrees is the number of ranks.

    Ranks are numbered with tp innermost, then ep, sp, cp, dp_shard, dp_replicate, and pp outermost.

    Raises:
        ValueError: A size is not a whole number above 0, or two sizes cannot be combined.
    """

    settings = _SECTION

    dp_replicate_size: int | None = setting(unset=1)
    """Number of replicas of the (sharded) model, which train on different data."""
    dp_shard_size: int | None = setting(unset=1)
    """Number of ranks across which each replica's parameters are sharded (FSDP 2)."""
    tp_size: int | None = setting(unset=1)
    """Number of ranks across which each layer's tensors are split."""
    cp_size: int | None = setting(unset=1)
    """Number of ranks across which context parallelism splits each sequence."""
    cp_backend: Literal["torch"] | None = setting(unset="torch", closed=True)
    """Implementation of context parallelism: torch."""
    sp_size: int | None = setting(unset=1)
    """Number of ranks across which DeepSpeed's sequence parallelism splits each sequence."""
    sp_backend: Literal["deepspeed"] | None = setting(unset="deepspeed", closed=True)
    """Implementation of sequence parallelism: deepspeed."""
    tp_handler: TorchTensorParallelConfig | None = None
    """Settings of tensor parallelism. If None and ``tp_size`` is above 1, the class's defaults are used."""
    cp_handler: TorchContextParallelConfig | None = None
    """Settings of context parallelism. If None and ``cp_size`` is above 1, the class's defaults are used."""
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    """Settings of sequence parallelism. If None and ``sp_size`` is above 1, the class's defaults are used."""
    pp_size: int | None = setting(unset=1, option=None)
    """Number of ranks across which `prepare_pippy` distributes a model's layers, for inference."""
    ep_size: int | None = setting(unset=1, preset=None)
    """Number of ranks across which the experts of mixture-of-experts layers are split.

    Accelerate only creates this dimension of the mesh (accelerate#4202). Here, `prepare` also splits the experts
    across it.
    """

    def __post_init__(self) -> None:
        self.device_mesh: DeviceMesh | None = None
        fill_unset(self)
        for name in _DIMENSIONS:
            check_whole_number(f"{name}_size", getattr(self, f"{name}_size"))
        check_choices(self, "cp_backend", "sp_backend")
        self._check_combination()
        for name, kind in _HANDLERS.items():
            given = getattr(self, f"{name}_handler")
            if self._degree(name) > 1 and not isinstance(given, kind):
                if given is not None:
                    raise ValueError(f"{name}_handler is a {type(given).__name__}; pass a {kind.__name__}")
                setattr(self, f"{name}_handler", kind())

    def _check_combination(self) -> None:
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both split sequences; set one of them to 1"
            )
        self._check_experts()
        others = self._active("dp_shard", "cp", "sp", "tp")
        if self.pp_enabled and others:
            raise ValueError(
                f"pp_size={self.pp_size} distributes whole layers, but {self._sizes(others)} would split them or their "
                "inputs; combine pp_size with dp_replicate_size only, or train with MegatronLMPlugin(tp_degree=..., "
                "pp_degree=...)"
            )
        self._check_replicas("tp", "tensors")
        self._check_replicas("ep", "experts")

    def _check_experts(self) -> None:
        others = self._active("pp", "cp", "sp", "tp")
        if self.ep_enabled and others:
            raise ValueError(
                f"ep_size={self.ep_size} with {self._sizes(others)} is not supported; combine ep_size with "
                "dp_shard_size and dp_replicate_size only"
            )

    def _check_replicas(self, name: str, parts: str) -> None:
        if self._active(name) and self.dp_replicate_enabled and not self.dp_shard_enabled:
            replicas, split = self.dp_replicate_size, self._sizes([name])
            raise ValueError(
                f"dp_replicate_size={replicas} with {split} also needs dp_shard_size, because unsharded replicas of "
                f"split {parts} cannot be kept in sync; write ParallelismConfig(dp_shard_size={replicas}, {split})"
            )

    def _sizes(self, names: list[str]) -> str:
        return " and ".join(f"{name}_size={self._degree(name)}" for name in names)

    def __repr__(self) -> str:
        degrees = ", ".join(f"{name}_size={self._degree(name)}" for name in _DIMENSIONS)
        return f"ParallelismConfig({degrees}, total_size={self.total_size})"

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain data.

        Returns:
            The value of each field by name, with handlers as dicts or None.
        """
        return asdict(self)

    # -- degrees ------------------------------------------------------------------------------------------------------

    def _degree(self, name: str) -> int:
        return int(getattr(self, f"{name}_size") or 1)

    def _active(self, *names: str) -> list[str]:
        return [name for name in names if self._degree(name) > 1]

    @property
    def total_size(self) -> int:
        """The product of the degrees, which is the number of ranks."""
        return math.prod(self._degree(name) for name in _DIMENSIONS)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with different data: dp_replicate times dp_shard."""
        return self._degree("dp_replicate") * self._degree("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that work on the same data: tp times cp times sp times ep times pp."""
        return math.prod(self._degree(name) for name in ("tp", "cp", "sp", "ep", "pp"))

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas of the model."""
        return self._degree("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded across data-parallel ranks."""
        return self._degree("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether each layer's tensors are split across ranks."""
        return self._degree("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split by context parallelism."""
        return self._degree("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split by sequence parallelism."""
        return self._degree("sp") > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether the experts of mixture-of-experts layers are split across ranks."""
        return self._degree("ep") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model's layers are distributed across ranks."""
        return self._degree("pp") > 1

    # -- dimensions of the mesh ---------------------------------------------------------------------------------------

    @property
    def dp_dim_names(self) -> list[str]:
        """The dimensions along which ranks read different data. Their flattened submesh is named dp."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The dimensions along which ranks work on the same data."""
        return self._active("tp", "cp", "sp", "ep", "pp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The dimensions across which parameters are sharded. Their flattened submesh is named dp_shard_cp."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The dimensions over which losses are averaged. Their flattened submesh is named dp_cp."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of FSDP's mesh: replicas, if there are any, and shards."""
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions with a degree above 1."""
        return [*self.dp_dim_names, *self.non_dp_dim_names]

    # -- the mesh -----------------------------------------------------------------------------------------------------

    def check_world_size(self, world_size: int) -> None:
        """Check that the product of the degrees is the number of ranks.

        Args:
            world_size: Number of ranks.

        Raises:
            ValueError: The product differs from the number of ranks. The message shows its factors.
        """
        if self.total_size == world_size:
            return
        factors = " * ".join(f"{name}_size={self._degree(name)}" for name in self._active(*_DIMENSIONS)) or "1"
        rest = world_size // (self.total_size // self._degree("dp_shard"))
        fits = rest >= 1 and rest * (self.total_size // self._degree("dp_shard")) == world_size
        change = f"set dp_shard_size={rest}, or start" if fits else "start"
        raise ValueError(
            f"the degrees of ParallelismConfig do not match the number of ranks: {factors} = {self.total_size}, but "
            f"there are {world_size} ranks; {change} {self.total_size} ranks"
        )

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build a mesh of the ranks and store it; every rank must call this.

        Args:
            device_type: Type of the ranks' devices: cpu, cuda, ...

        Returns:
            The mesh of the dimensions whose degree is above 1, outermost first, with the flattened submeshes dp,
            dp_shard_cp and dp_cp, or None if every degree is 1.
        """
        names = self._active(*_DIMENSIONS)
        if not names:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        shape = tuple(self._degree(name) for name in names)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))
        flattened = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for flat, parts in flattened.items():
            if parts:
                flatten_mesh(mesh[tuple(parts)], flat)
        self.device_mesh = mesh
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh, or build it if it does not exist yet. Every rank must call this if the mesh is to be built.

        Args:
            device_type: Type of the ranks' devices. If None, the mesh must exist already.

        Returns:
            The mesh, or None if every degree is 1.

        Raises:
            ValueError: The mesh was built for another type of device, or does not exist and no type is given.
        """
        if self.device_mesh is None:
            if device_type is None and self.total_size == 1:
                return None
            if device_type is None:
                raise ValueError(
                    'the mesh does not exist yet; pass the type of the ranks\' devices: get_device_mesh("cpu")'
                )
            return self.build_device_mesh(device_type)
        if device_type is not None and self.device_mesh.device_type != device_type:
            raise ValueError(
                f"the mesh of this ParallelismConfig is of device type {self.device_mesh.device_type!r}, not "
                f"{device_type!r}; create a new ParallelismConfig for the other type"
            )
        return self.device_mesh
