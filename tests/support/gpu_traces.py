"""Traces of ranks that train on GPUs, written event by event in the format of torch 2.11's profiler.

The host queues kernels and continues, and a stream runs them in order. NCCL's kernel runs on its own stream from the
time a rank reaches it until all ranks have reached it. Sources: the documentation of torch's profiler, and the events
that Kineto and HTA describe. Launches (``cuda_runtime``) and kernels share ``correlation``, NCCL's calls are inside
``record_param_comms``, whose arguments name the group, and ``[memory]`` events name the device's type.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.profiling.trace import RankTrace, parse
from notebook_accelerate.telemetry.debug_protocol import TRACE_KEY

MAIN, BACKWARD = 100, 101
COMPUTE, NCCL = 7, 20
CPU, CUDA = 0, 1
LAUNCH = 6.0
"""The microseconds that the host needs to queue a kernel."""


@dataclass
class GpuRank:
    """The events of one rank, with times in microseconds.

    Attributes:
        rank: The number of this rank.
        now: The time on the host.
        rows: The events written so far.
        asked: The requested settings, such as ``{"mixed_precision": "bf16"}``.
    """

    rank: int
    now: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[str, str] = field(default_factory=dict)
    _free: dict[int, float] = field(default_factory=lambda: {COMPUTE: 0.0, NCCL: 0.0})
    _correlations: Any = field(default_factory=lambda: itertools.count(1))
    _steps: int = 0

    def event(self, name: str, category: str, start: float, duration: float, thread: int = MAIN, **more: Any) -> None:
        """Write an event on the host."""
        row = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": duration}
        self.rows.append({**row, "args": more})

    def op(self, name: str, kernel: float, *, dims: Any = (), kind: str = "float", thread: int = MAIN) -> None:
        """Queue an operation that runs one kernel."""
        begin = self.now
        types = {"Input Dims": list(dims), "Input type": [kind] * len(dims)} if dims else {}
        self._launch(f"void {name.removeprefix('aten::')}_kernel<float>", COMPUTE, begin + 10, kernel, thread)
        self.now = begin + 10 + LAUNCH + 2
        self.event(name, "cpu_op", begin, self.now - begin, thread, **types)

    def _launch(self, name: str, stream: int, at: float, duration: float, thread: int) -> dict[str, Any]:
        correlation = next(self._correlations)
        self.event("cudaLaunchKernel", "cuda_runtime", at, LAUNCH, thread, correlation=correlation)
        start = max(at + LAUNCH, self._free[stream])
        self._free[stream] = start + duration
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": duration}
        self.rows.append({**kernel, "args": {"correlation": correlation, "stream": stream, "device": self.rank}})
        return self.rows[-1]

    def sleep(self, microseconds: float) -> None:
        """Let time pass on the host."""
        self.now += microseconds

    def read(self) -> None:
        """Read a value: ``item()`` waits until the device has computed it."""
        begin = self.now
        done = max(begin + 5, self._free[COMPUTE], self._free[NCCL])
        self.event("aten::item", "cpu_op", begin, done + 4 - begin)
        self.event("aten::_local_scalar_dense", "cpu_op", begin + 1, done + 2 - begin)
        self.event("cudaStreamSynchronize", "cuda_runtime", begin + 3, done - begin - 3)
        self.now = done + 4

    def unscale(self) -> None:
        """Do what GradScaler does in each step: search for overflows, and read the result."""
        self.op("aten::_amp_foreach_non_finite_check_and_unscale_", 30.0)
        self.read()

    def begin_step(self) -> None:
        """Start a step."""
        self._begin = self.now

    def end_step(self) -> None:
        """End the step."""
        self.event(f"ProfilerStep#{self._steps}", "user_annotation", self._begin, self.now - self._begin)
        self._steps += 1

    def allocate(self, size: int, device: int) -> None:
        """Write an allocation or, if the size is negative, a release."""
        arguments = {"Bytes": size, "Addr": 1 << 30, "Device Type": device, "Device Id": 0}
        self.rows.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": self.now, "args": arguments})


def all_reduce(ranks: list[GpuRank], elements: int, transfer: float = 300.0, *, barrier: bool = False) -> None:
    """Queue an all_reduce on all ranks, behind their devices' work. With ``barrier``, hosts also wait for its end."""
    kernels, begins = [], []
    for each in ranks:
        begin = each.now
        begins.append(begin)
        name = "barrier" if barrier else "allreduce"
        arguments: dict[str, Any] = {
            "Collective name": name, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
            "Group size": len(ranks), "Process Group Name": "0", "Process Group Description": "default_pg",
        }  # fmt: skip
        each._free[NCCL] = max(each._free[NCCL], each._free[COMPUTE])
        kernel = each._launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", NCCL,
                              begin + 25, transfer, MAIN)  # fmt: skip
        kernels.append(kernel)
        sums: dict[str, Any] = {"Input Dims": [[elements]], "Input type": ["float"]}
        each.event("record_param_comms", "cpu_op", begin + 5, 55, **arguments)
        each.event("nccl:all_reduce", "user_annotation", begin + 12, 40, **sums)
        each.now = begin + 70
    end = max(kernel["ts"] for kernel in kernels) + transfer
    for each, kernel, begin in zip(ranks, kernels, begins, strict=True):
        kernel["dur"] = end - kernel["ts"]
        each._free[NCCL] = each._free[COMPUTE] = end  # The training stream waits for the result.
        if barrier:
            each.event("c10d::barrier", "cpu_op", begin, 68)
            each.event("cudaStreamSynchronize", "cuda_runtime", each.now, max(1.0, end - each.now))
            each.now = max(each.now + 1, end)


def traces(ranks: list[GpuRank]) -> list[RankTrace]:
    """Return the ranks' traces, parsed from the format of trace files."""
    group = {"pg_name": "0", "ranks": [each.rank for each in ranks]}
    head = {"distributedInfo": {"world_size": len(ranks), "pg_count": 1, "pg_config": [group]}}
    return [
        parse({**head, TRACE_KEY: {"steps": each._steps, "asked": each.asked}}, each.rows, each.rank) for each in ranks
    ]


__all__ = ["BACKWARD", "COMPUTE", "CPU", "CUDA", "MAIN", "NCCL", "GpuRank", "all_reduce", "traces"]
