"""Planning: pure functions that turn facts into the decisions of a launch."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.hardware import HardwareInfo
from notebook_accelerate.launch.plan.planner import (
    KernelFacts,
    LaunchPlan,
    joined,
    make_plan,
    on_node,
    rank_environment,
)

GIB = 1 << 30
KAGGLE = {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v5e-8", "KAGGLE_KERNEL_RUN_TYPE": "Interactive"}
COLAB = {"COLAB_TPU_1VM": "1", "TPU_ACCELERATOR_TYPE": "v5e-1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
OLDER = {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": "v3-8"}
VIRTUAL = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


def _machine(accelerator: str = "cpu", count: int = 0, cpu_count: int = 8) -> HardwareInfo:
    return HardwareInfo(
        accelerator=accelerator, count=count, cpu_count=cpu_count, memory_bytes=GIB, host="jupyter", loopback="lo"
    )


def _tpus(count: int, generation: str = "v5e") -> HardwareInfo:
    return replace(_machine("tpu", count), tpu=generation)


def _plan(machine: HardwareInfo | None = None, hazard: str = "", can_fork: bool = True, **values: Any) -> LaunchPlan:
    environment = values.pop("environment", {})
    facts = KernelFacts(fork_hazard=lambda: hazard, can_fork=can_fork, environment=environment)
    return make_plan(LaunchConfig(**values), machine or _machine(), facts)


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({}, "inline"),
        ({"num_processes": 1}, "inline"),
        ({"num_processes": 2}, "fork"),
        ({"num_processes": 2, "hazard": "CUDA is initialised"}, "zygote"),
        ({"num_processes": 2, "can_fork": False}, "spawn"),
        ({"num_processes": 2, "can_fork": False, "hazard": "x"}, "spawn"),
        ({"block": False}, "fork"),
        ({"timeout": 3}, "fork"),
        ({"hang_timeout": 3}, "fork"),
        ({"max_restarts": 1}, "fork"),
        ({"env": {"A": "1"}}, "fork"),
        ({"num_nodes": 2}, "fork"),
        ({"num_processes": 1, "hazard": "x"}, "inline"),
        ({"num_processes": 1, "start_method": "fork"}, "fork"),
        ({"num_processes": 2, "start_method": "zygote"}, "zygote"),
        ({"num_processes": 2, "start_method": "spawn", "hazard": "x"}, "spawn"),
        ({"num_processes": 1, "start_method": "inline"}, "inline"),
    ],
)
def test_the_start_method_follows_from_the_facts(values: dict[str, Any], method: str) -> None:
    assert _plan(**values).start_method == method


def test_the_sentence_gives_the_reason_for_the_start_method() -> None:
    assert "the kernel is safe to fork" in _plan(num_processes=2).sentence()
    hazard = "CUDA is initialised in the kernel"
    assert hazard in _plan(num_processes=2, hazard=hazard).reason
    assert _plan(num_processes=2).sentence().startswith("2 processes on cpu")
    assert _plan().sentence().startswith("1 process on cpu")
    assert "2 processes of 4" in _plan(num_processes=2, num_nodes=2).sentence()


def _on_xla(chips: int, environment: dict[str, str], asked: int) -> dict[str, Any]:
    return {"machine": _machine("xla", chips), "environment": environment, "num_processes": asked}


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"num_processes": 2, "start_method": "inline"}, "inline.*2 are requested"),
        ({"num_nodes": 2, "start_method": "inline"}, "inline"),
        ({"start_method": "inline", "block": False}, "does not support block=False"),
        ({"start_method": "inline", "timeout": 3}, "does not support timeout"),
        ({"start_method": "fork", "num_processes": 2, "hazard": "CUDA is initialised"}, "CUDA is initialised"),
        ({"start_method": "fork", "num_processes": 2, "can_fork": False}, "spawn"),
        ({"start_method": "zygote", "num_processes": 2, "can_fork": False}, "spawn"),
        ({"machine": _machine("cuda", 2), "num_processes": 3}, "2 cuda devices.*num_processes=2"),
        ({"machine": _machine("cuda", 1), "num_processes": 2}, "1 cuda device;"),
        (_on_xla(8, KAGGLE, 4), "8 chips, and torch_xla uses one or all of them; pass num_processes=1 or 8"),
        (_on_xla(4, OLDER, 4), "2 devices into one process; pass num_processes=1,"),
        (_on_xla(4, VIRTUAL, 4), "4 devices into one process; pass num_processes=1,"),
        (_on_xla(1, COLAB, 2), "1 chips, and torch_xla uses one or all of them|1 devices into one process"),
        ({"machine": _tpus(8), "num_processes": 2}, "not possible on this TPU v5e .* pass num_processes=1 or 4 or 8"),
        ({"machine": _tpus(4), "num_processes": 8}, "pass num_processes=1 or 4,"),
        ({"machine": _tpus(4, ""), "num_processes": 4}, "TPU of an unknown generation .* pass num_processes=1,"),
        ({"machine": _tpus(8), "num_nodes": 2}, "pass num_nodes=1"),
        ({"machine": _tpus(8), "start_method": "fork"}, "pass 'auto' or 'spawn'"),
        ({"machine": _tpus(8), "start_method": "zygote"}, "pass 'auto' or 'spawn'"),
    ],
)
def test_invalid_plans_are_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _plan(**values)


@pytest.mark.parametrize(
    ("machine", "values", "expected"),
    [
        (_machine(), {}, ("cpu", 1, "")),
        (_machine(), {"num_processes": 4}, ("cpu", 4, "gloo")),
        (_machine("cuda", 4), {}, ("cuda", 4, "nccl")),
        (_machine("cuda", 4), {"num_processes": 2}, ("cuda", 2, "nccl")),
        (_machine("cuda", 1), {}, ("cuda", 1, "")),
        (_machine("cuda", 4), {"cpu": True}, ("cpu", 1, "")),
        (_machine("cuda", 4), {"cpu": True, "num_processes": 8}, ("cpu", 8, "gloo")),
        (_machine("mps", 1), {}, ("mps", 1, "")),
        (_machine("mps", 1), {"num_processes": 2}, ("cpu", 2, "gloo")),
    ],
)
def test_devices_are_assigned_to_ranks(
    machine: HardwareInfo, values: dict[str, Any], expected: tuple[str, int, str]
) -> None:
    found = _plan(machine, **values)
    assert (found.accelerator, found.num_processes, found.backend) == expected


@pytest.mark.parametrize(
    ("cpu_count", "values", "threads"),
    [
        (8, {"num_processes": 2}, 4),
        (8, {"num_processes": 3}, 2),
        (2, {"num_processes": 16}, 1),
        (8, {"num_processes": 2, "environment": {"OMP_NUM_THREADS": "3"}}, 3),
        (8, {"num_processes": 2, "environment": {"OMP_NUM_THREADS": "3"}, "env": {"OMP_NUM_THREADS": "5"}}, 5),
        (8, {"num_processes": 2, "environment": {"OMP_NUM_THREADS": "many"}}, 4),
        (8, {"num_processes": 2, "environment": {"OMP_NUM_THREADS": "0"}}, 4),
        (8, {}, None),
    ],
)
def test_each_rank_gets_its_share_of_threads(cpu_count: int, values: dict[str, Any], threads: int | None) -> None:
    assert _plan(_machine(cpu_count=cpu_count), **values).threads == threads


def test_the_environment_matches_torchrun_and_is_pinned_to_loopback() -> None:
    found = _plan(num_processes=2, use_port="1234")
    env = rank_environment(found, 1)
    expected = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    assert {name: env[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("accelerator", "ranks", "works", "expected"),
    [
        ("cuda", 2, False, {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}),
        ("cuda", 2, True, {}),
        ("cuda", 1, False, {}),
        ("cpu", 2, False, {}),
    ],
)
def test_nccl_does_not_use_an_access_that_the_gpus_lack(
    accelerator: str, ranks: int, works: bool, expected: dict[str, str]
) -> None:
    facts = KernelFacts(environment={}, peer_to_peer=lambda: works)
    machine = _machine(accelerator, 0 if accelerator == "cpu" else 2)
    environment = rank_environment(make_plan(LaunchConfig(num_processes=ranks, block=False), machine, facts), 0)
    assert {name: value for name, value in environment.items() if re.match("NCCL_.*DISABLE", name)} == expected


def test_the_ranks_of_the_second_machine_continue_the_count() -> None:
    found = _plan(num_processes=2, num_nodes=3, node_rank=2, master_addr="10.0.0.1")
    env = rank_environment(found, 1)
    assert (found.world_size, found.first_rank) == (6, 4)
    assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"], env["MASTER_ADDR"]) == ("5", "1", "2", "10.0.0.1")
    assert "GLOO_SOCKET_IFNAME" not in env
    assert "TORCHELASTIC_USE_AGENT_STORE" not in env


def test_joined_notebooks_may_have_different_numbers_of_ranks() -> None:
    first = joined(_plan(num_processes=2, num_nodes=2), [2, 3], ("10.0.0.1", 4000), "eth1", "run-7")
    assert (first.world_size, first.first_rank, first.num_processes, first.backend) == (5, 0, 2, "gloo")
    env = rank_environment(first, 0)
    assert (env["GLOO_SOCKET_IFNAME"], env["NOTEBOOK_ACCELERATE_SERVED_STORE"]) == ("eth1", "10.0.0.1:4000")
    second = on_node(first, 1)
    assert (second.world_size, second.first_rank, second.num_processes) == (5, 2, 3)
    env = rank_environment(second, 2)
    assert not {"GLOO_SOCKET_IFNAME", "NOTEBOOK_ACCELERATE_SERVED_STORE"} & set(env), "node 1 sets its own"
    expected = {
        "RANK": "4", "LOCAL_RANK": "2", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "run-7",
    }  # fmt: skip
    assert {name: env[name] for name in expected} == expected


def test_xla_devices_are_left_to_the_ranks() -> None:
    machine = _machine(accelerator="xla", count=1)
    found = _plan(machine)
    assert (found.num_processes, found.start_method) == (1, "zygote")
    assert "never to the kernel" in found.reason
    assert _plan(machine, start_method="inline").start_method == "inline"


@pytest.mark.parametrize(
    ("environment", "count", "asked", "processes", "devices"),
    [
        (KAGGLE, 8, None, 8, 1),
        (KAGGLE, 8, 8, 8, 1),
        (KAGGLE, 8, 1, 1, 8),
        (COLAB, 1, None, 1, 1),
        (OLDER, 4, None, 1, 8),
        (VIRTUAL, 4, None, 1, 4),
        ({"PJRT_DEVICE": "CPU"}, 1, 1, 1, 1),
    ],
)
def test_xla_ranks_have_one_device_each_or_one_rank_has_all(
    environment: dict[str, str], count: int, asked: int | None, processes: int, devices: int
) -> None:
    machine = _machine(accelerator="xla", count=count)
    found = _plan(machine, environment=environment, num_processes=asked)
    assert (found.num_processes, found.devices) == (processes, devices)
    said = (
        f"1 process on xla, whose {devices} devices share each batch (SPMD)"
        if devices > 1
        else f" on xla · {found.start_method}"
    )
    assert said in found.sentence()


@pytest.mark.parametrize(
    ("machine", "asked", "ranks", "mesh"),
    [
        (_tpus(8), None, 8, "2,4,1"),
        (_tpus(8), 4, 4, "2,2,1"),
        (_tpus(8), 1, 1, "1,1,1"),
        (_tpus(1), None, 1, "1,1,1"),
        (_tpus(4, "v5p"), 2, 2, "1,2,1"),
        (_tpus(8, "v7"), None, 8, "2,2,1,2"),
        (_tpus(4, ""), None, 1, None),
    ],
)
def test_ranks_on_tpus_have_one_device_each(
    machine: HardwareInfo, asked: int | None, ranks: int, mesh: str | None
) -> None:
    found = _plan(machine, environment=KAGGLE, num_processes=asked)
    assert (found.accelerator, found.num_processes, found.start_method) == ("tpu", ranks, "spawn")
    assert found.backend == ("tpu_dist" if ranks > 1 else "")
    assert {rank_environment(found, rank).get("TORCH_TPU_TOPOLOGY") for rank in range(ranks)} == {mesh}


def test_a_launch_on_the_cpu_of_a_machine_with_tpus_needs_no_tpu_package() -> None:
    found = _plan(_tpus(8), num_processes=2, cpu=True)
    assert (found.accelerator, found.start_method, found.variables) == ("cpu", "fork", {})


def test_inline_on_virtual_xla_devices_uses_one_process() -> None:
    machine = _machine(accelerator="xla", count=4)
    found = _plan(machine, environment=VIRTUAL, start_method="inline")
    assert (found.start_method, found.num_processes, found.devices) == ("inline", 1, 4)


@pytest.mark.parametrize("values", [{}, {"start_method": "inline"}, {"start_method": "zygote"}, {"on": "ray"}])
def test_no_probe_is_forked_if_the_start_method_does_not_depend_on_it(values: dict[str, Any]) -> None:
    def probe() -> str:
        raise AssertionError("the planner called the probe")

    make_plan(LaunchConfig(**values), _machine(), KernelFacts(environment={}, fork_hazard=probe))
