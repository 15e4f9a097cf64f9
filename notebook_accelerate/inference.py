"""Pipeline-parallel inference with `torch.distributed.pipelining`: each rank computes some of a model's layers."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from notebook_accelerate.big_modeling.device_map import balanced_cuts, infer_auto_device_map
from notebook_accelerate.collectives import broadcast_object_list, ignorant_find_batch_size
from notebook_accelerate.state import AcceleratorState, PartialState
from notebook_accelerate.torch_internals import greet_in_one_dtype, pytree


def prepare_pippy(
    model: nn.Module,
    split_points: Literal["auto"] | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Divide a model's layers among ranks for inference; every rank must call this function, and then the model.

    A batch is split into chunks. While one rank computes a chunk, the rank before it computes the next chunk (GPipe,
    https://arxiv.org/abs/1811.06965). Rank 0 passes the batch, which may have any number of rows. The arguments of
    other ranks are ignored.

    With `ParallelismConfig(pp_size=...)`, layers are only divided among the ranks along that dimension. In this case,
    there are as many pipelines as replicas, and the first rank of each pipeline passes its batch.

    Args:
        model: The model, which must be on the CPU. `torch.export` traces it, so its forward method must not branch on
            values.
        split_points: The names of the submodules that start the parts of all ranks but the first. "auto" minimizes
            the size of the largest part, in bytes of parameters and buffers.
        no_split_module_classes: The names of classes whose modules stay whole. None means `model._no_split_modules`.
        example_args: Example positional arguments. Tensors must have as many rows as one chunk. All other values are
            fixed to those given here.
        example_kwargs: Example keyword arguments, like `example_args`.
        num_chunks: The number of chunks that are in the pipeline at a time. None means the number of ranks.
        gather_output: Whether every rank gets the outputs. If False, only the last rank gets them, and other ranks get
            None.

    Returns:
        The model, with its forward method replaced. Its attribute `hf_split_points` contains the split points.

    Raises:
        ValueError: The example or an output has no batch dimension, the model has fewer parts than there are ranks, or
            the number or the names of split points are wrong.
    """
    group = _pipeline_group()
    parts = len(group.ranks)
    model.hf_split_points = []  # type: ignore[assignment]
    if parts == 1:
        return model
    traced = _trace(model, example_args, example_kwargs)
    if split_points is None or split_points == "auto":
        whole = no_split_module_classes or getattr(model, "_no_split_modules", None) or ()
        split_points = traced.balanced_split_points(parts, set(whole))
    _check_split_points(model, split_points, parts)
    chunks = num_chunks or parts
    stage = traced.build_stage(split_points, chunks, group)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return pippy_forward(stage, chunks, bool(gather_output), *args, **kwargs)

    model.hf_split_points = list(split_points)  # type: ignore[assignment]
    model.forward = forward
    return model


def _trace(model: nn.Module, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> _TracedModel:
    rows = find_pippy_batch_size(args, kwargs)
    if rows is None:
        raise ValueError(
            "prepare_pippy traces the model with an example, but this example has no tensor with a batch dimension; "
            "write prepare_pippy(model, example_args=(inputs[:1],))"
        )
    return _TracedModel(model, tuple(args or ()), dict(kwargs or {}), rows)


def build_pipeline(
    model: nn.Module,
    split_points: list[str],
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any] | None,
    num_chunks: int,
) -> Any:
    """Build this rank's part of a pipeline; every rank must call this.

    Args:
        model: The model, which must be on the CPU.
        split_points: The names of the submodules that start the parts of all ranks but the first.
        args: The positional arguments for one chunk.
        kwargs: The keyword arguments for one chunk.
        num_chunks: The number of chunks that are in the pipeline at a time.

    Returns:
        The `forward` argument of `pippy_forward`.

    Raises:
        ValueError: See `prepare_pippy`.
    """
    group = _pipeline_group()
    _check_split_points(model, split_points, len(group.ranks))
    return _trace(model, args, kwargs).build_stage(split_points, num_chunks, group)


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Assign a model's modules to ranks, in the order of their registration.

    Args:
        model: The model to divide.
        num_processes: The number of ranks.
        no_split_module_classes: The names of classes whose modules stay whole.
        max_memory: The limit of each rank, as in `infer_auto_device_map`. If None, the bytes are divided evenly.

    Returns:
        The rank of each module.

    Raises:
        ValueError: The model has fewer modules than there are ranks.
    """
    if max_memory is not None:
        mapped = infer_auto_device_map(model, max_memory, no_split_module_classes, clean_result=False)
        return dict(mapped)
    sizes = dict(_smallest_parts(model, set(no_split_module_classes or ())))
    if len(sizes) < num_processes:
        raise ValueError(
            f"{type(model).__name__} has {len(sizes)} modules that stay whole, but there are {num_processes} ranks; "
            "pass fewer no_split_module_classes, or a smaller num_processes"
        )
    cuts = balanced_cuts(list(sizes.values()), num_processes)
    return {name: bisect_right(cuts, index) for index, name in enumerate(sizes)}


def pippy_forward(forward: Any, num_chunks: int, gather_output: bool | None, *args: Any, **kwargs: Any) -> Any:
    """Run a batch through a pipeline; every rank must call this.

    Args:
        forward: This rank's part of the pipeline, from `build_pipeline`.
        num_chunks: The number of chunks that are in the pipeline at a time.
        gather_output: Whether every rank gets the outputs.
        args: The model's positional arguments on rank 0. Other ranks may leave them out.
        kwargs: The model's keyword arguments on rank 0.

    Returns:
        The outputs, with as many rows as rank 0 passed, on the last rank or on all ranks. None on other ranks.

    Raises:
        ValueError: Rank 0 passed no tensor with a batch dimension, or passed values, other than tensors, that differ
            from the traced ones.
    """
    if not isinstance(forward, _Stage):
        return forward(*args, **kwargs)
    rows = problem = None
    if forward.group.is_first:
        rows = find_pippy_batch_size(args, kwargs)
        if rows is None:
            problem = f"rank {forward.group.ranks[0]} must pass a batch: none of its tensors has a batch dimension"
        else:
            problem = forward.describe_mismatch(args, kwargs)
    rows, problem = forward.group.broadcast_objects([rows, problem])
    if problem is not None:
        raise ValueError(problem)
    outputs = forward.run(args, kwargs, rows, num_chunks)
    if gather_output:
        outputs = forward.broadcast_outputs(outputs, rows)
    return None if outputs is None else forward.outputs.unflatten(outputs)


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the number of rows of the first tensor that has a batch dimension, or None if there is no such tensor.

    Args:
        args: The positional arguments for the model.
        kwargs: The keyword arguments for the model.
    """
    for value in (*(args or ()), *(kwargs or {}).values()):
        found = ignorant_find_batch_size(value)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class _PipelineGroup:
    """The ranks of a pipeline, in the order of layers."""

    ranks: tuple[int, ...]
    stage_index: int
    """The index of this rank in the pipeline."""
    process_group: Any
    """The process group of the pipeline's ranks, or None for all ranks."""

    @property
    def is_first(self) -> bool:
        """Whether batches enter the pipeline on this rank."""
        return self.stage_index == 0

    def broadcast_objects(self, values: list[Any]) -> list[Any]:
        """Return the values of the first rank on all ranks of the pipeline."""
        if self.process_group is None:
            return broadcast_object_list(values)
        dist.broadcast_object_list(values, src=self.ranks[0], group=self.process_group)
        return values


def _pipeline_group() -> _PipelineGroup:
    mesh = AcceleratorState._shared_state.get("device_mesh")
    if mesh is None or "pp" not in (mesh.mesh_dim_names or ()):
        state = PartialState()
        return _PipelineGroup(tuple(range(state.num_processes)), state.process_index, None)
    own = mesh["pp"]
    return _PipelineGroup(tuple(own.mesh.tolist()), own.get_local_rank(), own.get_group())


@dataclass(frozen=True)
class _Structure:
    """The nested containers around a flat list of tensors, with the leaves that are not tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """The leaves, with None in place of tensors."""
    is_tensor: tuple[bool, ...]

    @classmethod
    def flatten(cls, value: Any) -> tuple[_Structure, list[torch.Tensor]]:
        """Return the structure of nested containers, and the tensors in them."""
        leaves, spec = pytree.tree_flatten(value)
        is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        others = tuple(None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True))
        return cls(spec, others, is_tensor), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def __str__(self) -> str:
        args, kwargs = self.unflatten(["<tensor>"] * sum(self.is_tensor))
        arguments = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
        return f"model({', '.join(arguments)})"

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """Return the containers filled with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if tensor else leaf for leaf, tensor in zip(self.leaves, self.is_tensor, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)


class _FlatModel(nn.Module):
    """A model that takes and returns flat lists of tensors.

    Every input passes through the first part, because torch only passes the pipeline's inputs to the first rank.
    """

    def __init__(self, model: nn.Module, inputs: _Structure, batched: Sequence[bool]) -> None:
        super().__init__()
        self.model = model
        self._inputs, self._batched = inputs, tuple(batched)

    def call_model(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the model, and return its outputs in their original containers."""
        inputs = [each.clone() if batched else each[0] for each, batched in zip(tensors, self._batched, strict=True)]
        args, kwargs = self._inputs.unflatten(inputs)
        return self.model(*args, **kwargs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_Structure.flatten(self.call_model(tensors))[1])


class _TracedModel:
    """A model, and the structure of its inputs and outputs for one chunk."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> None:
        self._model, self._rows = model, rows
        self._inputs, tensors = _Structure.flatten((args, kwargs))
        self._batched = [tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors]
        self._flat = _FlatModel(model, self._inputs, self._batched).eval()
        self._example = _with_rows(tensors, self._batched, rows)

        self._call_order: dict[str, None] = {}
        self._outputs, self._fake_outputs = self._run_example()

    def _run_example(self) -> tuple[_Structure, list[torch.Tensor]]:
        """Run the example on fake tensors to record the order of the modules' first calls, and return the outputs."""
        from notebook_accelerate.torch_internals import FakeTensorMode

        handles = [
            module.register_forward_pre_hook(lambda *_, n=name: self._call_order.setdefault(n))
            for name, module in self._model.named_modules()
        ]
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
                fake_inputs = [mode.from_tensor(tensor) for tensor in self._example]
                structure, tensors = _Structure.flatten(self._flat.call_model(fake_inputs))
        finally:
            for handle in handles:
                handle.remove()
        for tensor in tensors:
            if not tensor.dim() or tensor.shape[0] != self._rows:
                raise ValueError(
                    f"{type(self._model).__name__} returns a tensor of shape {list(tensor.shape)} for {self._rows} "
                    "rows: every output needs a row for each row of the input, because chunks are concatenated"
                )
        return structure, tensors

    def balanced_split_points(self, parts: int, whole: set[str]) -> list[str]:
        """Return the names of the modules that start a new part, so that parts have about the same size in bytes."""
        sizes = dict(_smallest_parts(self._model, whole))
        called = [name for name in self._call_order if name in sizes]
        if len(called) < parts:
            raise ValueError(
                f"{type(self._model).__name__} has {len(called)} parts that it calls one after the other, but there "
                f"are {parts} ranks; launch with num_processes={max(1, len(called))}, or pass fewer "
                "no_split_module_classes"
            )
        return [called[at] for at in balanced_cuts([sizes[name] for name in called], parts)]

    def build_stage(self, split_points: Sequence[str], chunks: int, group: _PipelineGroup) -> _Stage:
        """Build this rank's part of the pipeline."""
        from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

        cut = {f"model.{name}": SplitPoint.BEGINNING for name in split_points}
        pipe = pipeline(self._flat, mb_args=tuple(self._example), split_spec=cut)
        if pipe.num_stages != len(group.ranks):
            raise ValueError(
                f"split_points={list(split_points)} divide the model into {pipe.num_stages} parts, but there are "
                f"{len(group.ranks)} ranks: name modules that the forward calls one after the other"
            )
        device = PartialState().device
        built = pipe.build_stage(group.stage_index, device=device, group=group.process_group)
        greet_in_one_dtype(built)
        return _Stage(
            ScheduleGPipe(built, chunks),
            self._inputs,
            self._batched,
            self._rows,
            self._outputs,
            [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in self._fake_outputs],
            device,
            group,
        )


@dataclass(frozen=True, eq=False)
class _Stage:
    """A rank's part of a pipeline. It runs chunks with a fixed number of rows."""

    schedule: Any
    inputs: _Structure
    batched: Sequence[bool]
    rows: int
    outputs: _Structure
    output_specs: Sequence[tuple[tuple[int, ...], torch.dtype]]
    device: torch.device
    group: _PipelineGroup

    def describe_mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Describe how the arguments differ from the traced ones. Return None if only tensor values differ."""
        inputs, _ = _Structure.flatten((args, kwargs))
        if inputs == self.inputs:
            return None
        return (
            f"the model was traced with {self.inputs}, but was called with {inputs}; call it with the same arguments: "
            "only the values of tensors may differ"
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, chunks: int) -> list[torch.Tensor] | None:
        """Run a batch through the pipeline, in as many passes as its number of rows requires.

        Returns:
            The outputs on the last rank, and None on other ranks.
        """
        _, tensors = _Structure.flatten((args, kwargs))
        window = chunks * self.rows
        found: list[Sequence[torch.Tensor]] = []
        for start in range(0, rows, window):
            if self.group.is_first:
                own = [t[start : start + window] if b else t for t, b in zip(tensors, self.batched, strict=True)]
                outputs = self.schedule.step(*[t.to(self.device) for t in _with_rows(own, self.batched, window)])
            else:
                outputs = self.schedule.step()
            if outputs is not None:
                found.append([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
        if not found:
            return None
        return [torch.cat(parts)[:rows] for parts in zip(*found, strict=True)]

    def broadcast_outputs(self, outputs: list[torch.Tensor] | None, rows: int) -> list[torch.Tensor]:
        """Return the outputs of the last rank on every rank."""
        if outputs is None:
            outputs = [
                torch.empty((rows, *shape), dtype=dtype, device=self.device) for shape, dtype in self.output_specs
            ]
        for tensor in outputs:
            dist.broadcast(tensor, src=self.group.ranks[-1], group=self.group.process_group)
        return outputs


def _with_rows(tensors: Sequence[torch.Tensor], batched: Sequence[bool], rows: int) -> list[torch.Tensor]:
    """Extend each tensor to `rows` rows by repeating its last row, or all of it if it has no batch dimension."""
    return [
        torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])])
        if has_batch
        else tensor.expand(rows, *tensor.shape).contiguous()  # torch compares strides with those in the trace.
        for tensor, has_batch in zip(tensors, batched, strict=True)
    ]


def _smallest_parts(module: nn.Module, whole: set[str], name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the names of the smallest modules that a model can be divided into, and their sizes in bytes."""
    children = dict(module.named_children())
    if name and (not children or type(module).__name__ in whole):
        tensors = itertools.chain(module.parameters(), module.buffers())
        yield name, sum(tensor.nbytes for tensor in tensors)
        return
    for child_name, child in children.items():
        yield from _smallest_parts(child, whole, f"{name}.{child_name}".lstrip("."))


def _check_split_points(model: nn.Module, points: Sequence[str], parts: int) -> None:
    known = dict(model.named_modules())
    unknown = [point for point in points if point not in known]
    if unknown:
        raise ValueError(f"split_points={list(points)}: {type(model).__name__} has no module {', '.join(unknown)}")
    if len(set(points)) != parts - 1:
        raise ValueError(
            f"split_points={list(points)} make {len(set(points)) + 1} parts, but there are {parts} ranks; name "
            f"{parts - 1} modules, or pass split_points='auto'"
        )
