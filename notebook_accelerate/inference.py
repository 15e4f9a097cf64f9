"""Pipeline-parallel inference: each rank computes one part of a model's layers, on `torch.distributed.pipelining`."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from notebook_accelerate.big_modeling.device_map import infer_auto_device_map
from notebook_accelerate.collectives import broadcast_object_list, ignorant_find_batch_size
from notebook_accelerate.state import AcceleratorState, PartialState


def prepare_pippy(
    model: nn.Module,
    split_points: Literal["auto"] | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any] | None = (),  # type: ignore[assignment]
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Share the layers of a model out over the ranks, for inference; every rank must call this, and then the model.

    A batch is cut into chunks, and while one rank computes a chunk, the rank before it computes the next (GPipe,
    https://arxiv.org/abs/1811.06965). Rank 0 passes the batch, of any number of rows; what others pass is ignored.

    With `ParallelismConfig(pp_size=...)` only the ranks along that dimension share the layers out: there are as many
    pipelines as replicas, each with a first rank that passes its batch.

    Args:
        model: The model, on the CPU. `torch.export` traces it, so its forward must not branch on values.
        split_points: Names of the submodules at which a rank's part begins, one less than there are ranks. "auto" cuts
            so that the largest part, in bytes of parameters and buffers, is as small as can be.
        no_split_module_classes: Names of classes whose modules stay whole; None means `model._no_split_modules`.
        example_args: Positional arguments of one chunk. Tensors have the rows of one chunk; what is no tensor stays as
            it is here.
        example_kwargs: Keyword arguments of one chunk.
        num_chunks: Chunks that are in the pipeline at a time; None means the number of ranks.
        gather_output: Whether every rank gets the outputs; else the last one does, and others get None.

    Returns:
        The model, its forward replaced; `hf_split_points` tells the split points.

    Raises:
        ValueError: The example has no batch dimension, an output has none, the model has fewer parts than there are
            ranks, or split points are too many, too few or unknown.
    """
    line = _line()
    parts = len(line.ranks)
    model.hf_split_points = []  # type: ignore[assignment]
    if parts == 1:
        return model
    traced = _traced(model, example_args, example_kwargs)
    if split_points is None or split_points == "auto":
        whole = no_split_module_classes or getattr(model, "_no_split_modules", None) or ()
        split_points = traced.balanced_points(parts, set(whole))
    _check_points(model, split_points, parts)
    stage = traced.stage(split_points, num_chunks or parts, line)
    model.hf_split_points = list(split_points)  # type: ignore[assignment]
    model.forward = _Forward(stage, num_chunks or parts, bool(gather_output))
    return model


def _traced(model: nn.Module, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> _Traced:
    rows = find_pippy_batch_size(args, kwargs)
    if rows is None:
        raise ValueError(
            "prepare_pippy traces the model with an example, and the one given holds no tensor with a batch dimension; "
            "write prepare_pippy(model, example_args=(inputs[:1],))"
        )
    return _Traced(model, tuple(args or ()), dict(kwargs or {}), rows)


def build_pipeline(
    model: nn.Module,
    split_points: list[str],
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any] | None,
    num_chunks: int,
) -> Any:
    """Build this rank's part of a pipeline; every rank must call this.

    Args:
        model: The model, on the CPU.
        split_points: Names of the submodules at which a rank's part begins, one less than there are ranks.
        args: Positional arguments of one chunk.
        kwargs: Keyword arguments of one chunk.
        num_chunks: Chunks that are in the pipeline at a time.

    Returns:
        What `pippy_forward` takes as its `forward`.

    Raises:
        ValueError: As for `prepare_pippy`.
    """
    line = _line()
    _check_points(model, split_points, len(line.ranks))
    return _traced(model, args, kwargs).stage(split_points, num_chunks, line)


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Share a model's modules out over ranks, in the order in which they are registered.

    Args:
        model: The model.
        num_processes: How many ranks.
        no_split_module_classes: Names of classes whose modules stay whole.
        max_memory: What each rank may hold, as for `infer_auto_device_map`; None shares bytes out evenly.

    Returns:
        The rank of each module.

    Raises:
        ValueError: The model has fewer modules than there are ranks.
    """
    if max_memory is not None:
        mapped = infer_auto_device_map(model, max_memory, no_split_module_classes, clean_result=False)
        return dict(mapped)
    sizes = dict(_units(model, set(no_split_module_classes or ())))
    if len(sizes) < num_processes:
        raise ValueError(
            f"{type(model).__name__} has {len(sizes)} modules that stay whole, and there are {num_processes} ranks; "
            "name fewer no_split_module_classes, or pass a smaller num_processes"
        )
    cuts = _cuts(list(sizes.values()), num_processes)
    return {name: bisect_right(cuts, place) for place, name in enumerate(sizes)}


def pippy_forward(forward: Any, num_chunks: int, gather_output: bool | None, *args: Any, **kwargs: Any) -> Any:
    """Run one batch through a pipeline; every rank must call this.

    Args:
        forward: What runs the chunks of this rank's part.
        num_chunks: Chunks that are in the pipeline at a time.
        gather_output: Whether every rank gets the outputs.
        args: The model's positional arguments on rank 0; other ranks may leave them out.
        kwargs: Its keyword arguments, the same.

    Returns:
        The outputs, as many rows as rank 0 passed: on the last rank, or on all. None elsewhere.

    Raises:
        ValueError: Rank 0 passed no tensor with a batch dimension, or other values that are no tensors than at the
            tracing.
    """
    if not isinstance(forward, _Stage):
        return forward(*args, **kwargs)
    rows = find_pippy_batch_size(args, kwargs) if forward.line.is_first else None
    problem = None
    if forward.line.is_first:
        first = forward.line.ranks[0]
        problem = f"rank {first} must pass a batch: no tensor in it has a batch dimension" if rows is None else None
        problem = problem or forward.mismatch(args, kwargs)
    told = forward.line.told([rows, problem])
    if told[1] is not None:
        raise ValueError(told[1])
    outputs = forward.run(args, kwargs, told[0], num_chunks)
    if gather_output:
        outputs = forward.shared(outputs, told[0])
    return None if outputs is None else forward.rebuilt(outputs)


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the number of rows of the first tensor with a batch dimension; None if there is none.

    Args:
        args: Positional arguments of a model.
        kwargs: Its keyword arguments.
    """
    for value in (*(args or ()), *(kwargs or {}).values()):
        found = ignorant_find_batch_size(value)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class _Line:
    """The ranks that have a model's layers between them, in the order of the layers."""

    ranks: tuple[int, ...]
    place: int
    """This rank's number among them."""
    group: Any
    """Their process group; None: all ranks."""

    @property
    def is_first(self) -> bool:
        """Whether batches begin on this rank."""
        return self.place == 0

    def told(self, values: list[Any]) -> list[Any]:
        """Return the first rank's values, on all ranks of the line."""
        if self.group is None:
            return list(broadcast_object_list(values))
        dist.broadcast_object_list(values, src=self.ranks[0], group=self.group)
        return values


def _line() -> _Line:
    mesh = AcceleratorState._shared_state.get("device_mesh")
    if mesh is None or "pp" not in (mesh.mesh_dim_names or ()):
        state = PartialState()
        return _Line(tuple(range(state.num_processes)), state.process_index, None)
    own = mesh["pp"]
    return _Line(tuple(own.mesh.tolist()), own.get_local_rank(), own.get_group())


@dataclass(frozen=True)
class _Form:
    """What a flat list of tensors was before: its structure, and its leaves that are no tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """A leaf, or None where there is a tensor."""
    is_tensor: tuple[bool, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[_Form, list[torch.Tensor]]:
        """Return the form of nested containers, and their tensors."""
        leaves, spec = pytree.tree_flatten(value)
        is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        rest = tuple(None if known else leaf for leaf, known in zip(leaves, is_tensor, strict=True))
        return cls(spec, rest, is_tensor), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def __str__(self) -> str:
        args, kwargs = self.filled(["<tensor>"] * sum(self.is_tensor))
        given = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
        return f"model({', '.join(given)})"

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Return the containers with tensors in their places."""
        supply = iter(tensors)
        leaves = [next(supply) if known else leaf for leaf, known in zip(self.leaves, self.is_tensor, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)


class _Flat(nn.Module):
    """A model between flat lists of tensors.

    Every input passes through the first part: torch hands the pipeline's inputs to the first rank only.
    """

    def __init__(self, model: nn.Module, form: _Form, batched: Sequence[bool]) -> None:
        super().__init__()
        self.model = model
        self._form, self._batched = form, tuple(batched)

    def called(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return what the model returns."""
        inputs = [each.clone() if batched else each[0] for each, batched in zip(tensors, self._batched, strict=True)]
        args, kwargs = self._form.filled(inputs)
        return self.model(*args, **kwargs)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(_Form.of(self.called(tensors))[1])


class _Traced:
    """A model and what one chunk of its inputs looks like."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> None:
        self._model, self._rows = model, rows
        self._form, tensors = _Form.of((args, kwargs))
        self._batched = [tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors]
        self._flat = _Flat(model, self._form, self._batched).eval()
        self._example = _chunked(tensors, self._batched, rows)

        self._order: dict[str, None] = {}
        self._output_form, self._outputs = self._rehearse()

    def _rehearse(self) -> tuple[_Form, list[torch.Tensor]]:
        """Run the example without computing: note the order of first calls, and return what the outputs are like."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        handles = [
            module.register_forward_pre_hook(lambda *_, n=name: self._order.setdefault(n))
            for name, module in self._model.named_modules()
        ]
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
                form, tensors = _Form.of(self._flat.called([mode.from_tensor(tensor) for tensor in self._example]))
        finally:
            for handle in handles:
                handle.remove()
        for tensor in tensors:
            if not tensor.dim() or tensor.shape[0] != self._rows:
                raise ValueError(
                    f"{type(self._model).__name__} returns a tensor of shape {list(tensor.shape)} for {self._rows} "
                    "rows: every output needs a row for each row of the input, because chunks are put together again"
                )
        return form, tensors

    def balanced_points(self, parts: int, whole: set[str]) -> list[str]:
        """Return where parts of about equal bytes begin."""
        sizes = dict(_units(self._model, whole))
        called = [name for name in self._order if name in sizes]
        if len(called) < parts:
            raise ValueError(
                f"{type(self._model).__name__} has {len(called)} parts that it calls one after the other, and there "
                f"are {parts} ranks; launch with num_processes={max(1, len(called))}, or name fewer "
                "no_split_module_classes"
            )
        return [called[at] for at in _cuts([sizes[name] for name in called], parts)]

    def stage(self, points: Sequence[str], chunks: int, line: _Line) -> _Stage:
        """Build the part of this rank."""
        from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

        cut = {f"model.{name}": SplitPoint.BEGINNING for name in points}
        pipe = pipeline(self._flat, mb_args=tuple(self._example), split_spec=cut)
        if pipe.num_stages != len(line.ranks):
            raise ValueError(
                f"split_points={list(points)} cut the model into {pipe.num_stages} parts, and there are "
                f"{len(line.ranks)} ranks: name modules that the forward calls one after the other"
            )
        device = PartialState().device
        built = pipe.build_stage(line.place, device=device, group=line.group)
        return _Stage(
            ScheduleGPipe(built, chunks),
            self._form,
            self._batched,
            self._rows,
            self._output_form,
            [(tuple(tensor.shape[1:]), tensor.dtype) for tensor in self._outputs],
            device,
            line,
        )


class _Stage:
    """One rank's part of a pipeline: it runs chunks of a fixed number of rows."""

    def __init__(
        self,
        schedule: Any,
        form: _Form,
        batched: Sequence[bool],
        rows: int,
        output_form: _Form,
        output_kinds: Sequence[tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        line: _Line,
    ) -> None:
        self.line = line
        self._schedule, self._form, self._batched, self._rows = schedule, form, batched, rows
        self._output_form, self._output_kinds, self._device = output_form, output_kinds, device

    def mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Say in what the arguments differ from those the model was traced with; None: in rows only."""
        form, _ = _Form.of((args, kwargs))
        if form == self._form:
            return None
        return (
            f"the model was traced with {self._form}, and was called with {form}; call it with the same arguments, "
            "only tensors may differ"
        )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, chunks: int) -> list[torch.Tensor] | None:
        """Run a batch through the pipeline, as often as its rows ask for.

        Returns:
            The outputs on the last rank, None elsewhere.
        """
        _, tensors = _Form.of((args, kwargs))
        window = chunks * self._rows
        found: list[Sequence[torch.Tensor]] = []
        for start in range(0, rows, window):
            if self.line.is_first:
                own = [t[start : start + window] if b else t for t, b in zip(tensors, self._batched, strict=True)]
                outputs = self._schedule.step(*[t.to(self._device) for t in _chunked(own, self._batched, window)])
            else:
                outputs = self._schedule.step()
            if outputs is not None:
                found.append([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
        if not found:
            return None
        return [torch.cat(parts)[:rows] for parts in zip(*found, strict=True)]

    def shared(self, outputs: list[torch.Tensor] | None, rows: int) -> list[torch.Tensor]:
        """Give every rank the outputs of the last one."""
        if outputs is None:
            outputs = [
                torch.empty((rows, *shape), dtype=dtype, device=self._device) for shape, dtype in self._output_kinds
            ]
        for tensor in outputs:
            dist.broadcast(tensor, src=self.line.ranks[-1], group=self.line.group)
        return outputs

    def rebuilt(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return outputs in the form in which the model returns them."""
        return self._output_form.filled(outputs)


class _Forward:
    """The forward of a model whose layers are shared out."""

    def __init__(self, stage: _Stage, chunks: int, gather_output: bool) -> None:
        self.stage, self.chunks, self.gather_output = stage, chunks, gather_output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return pippy_forward(self.stage, self.chunks, self.gather_output, *args, **kwargs)


def _chunked(tensors: Sequence[torch.Tensor], batched: Sequence[bool], rows: int) -> list[torch.Tensor]:
    """Give every tensor that many rows: by repeating the last row, or, without rows, by repeating all of it."""
    return [
        torch.cat([tensor, tensor[-1:].expand(rows - len(tensor), *tensor.shape[1:])])
        if has_rows
        else tensor.expand(rows, *tensor.shape)
        for tensor, has_rows in zip(tensors, batched, strict=True)
    ]


def _units(module: nn.Module, whole: set[str], name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the smallest parts that a model can be cut into, and their bytes."""
    children = dict(module.named_children())
    if name and (not children or type(module).__name__ in whole):
        tensors = itertools.chain(module.parameters(), module.buffers())
        yield name, sum(tensor.nbytes for tensor in tensors)
        return
    for child_name, child in children.items():
        yield from _units(child, whole, f"{name}.{child_name}".lstrip("."))


def _cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return where all parts but the first begin, so that the largest part is as small as can be."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle, 1)) < parts:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, low, parts)


def _filled(sizes: Sequence[int], limit: int, parts: int) -> list[int]:
    """Return where parts begin that are filled up to a limit; the last `parts` - 1 are never left empty."""
    cuts: list[int] = []
    held = 0
    for at, size in enumerate(sizes):
        needed = parts - 1 - len(cuts)
        if at and (held + size > limit or len(sizes) - at == needed):
            cuts.append(at)
            held = 0
        held += size
    return cuts


def _check_points(model: nn.Module, points: Sequence[str], parts: int) -> None:
    known = dict(model.named_modules())
    unknown = [point for point in points if point not in known]
    if unknown:
        raise ValueError(f"split_points={list(points)}: {type(model).__name__} has no module {', '.join(unknown)}")
    if len(set(points)) != parts - 1:
        raise ValueError(
            f"split_points={list(points)} make {len(set(points)) + 1} parts, and there are {parts} ranks; name "
            f"{parts - 1} modules, or pass split_points='auto'"
        )


__all__ = [
    "build_pipeline",
    "find_pippy_batch_size",
    "generate_device_map",
    "pippy_forward",
    "prepare_pippy",
]
