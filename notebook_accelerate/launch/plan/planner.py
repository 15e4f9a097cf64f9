"""Plan a launch from its configuration and from facts about the machine. Planning starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from notebook_accelerate.config import environ
from notebook_accelerate.config.plain_values import shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_accelerate.config.cluster import RayCluster
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.hardware import HardwareInfo


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """Facts about the kernel at the moment of a launch.

    Attributes:
        fork_hazard: Returns why forking this kernel is unsafe, or "" if it is safe. It is a function because the check
            forks a probe, so the planner calls it only if the start method depends on the answer.
        can_fork: Whether this platform can fork at all.
        environment: The kernel's environment variables.
        alias_hazard: Why ranks that inherit the kernel's modules cannot import this package as ``accelerate``, or "" if
            they can.
        peer_to_peer: Returns False if the GPUs cannot read each other's memory even though the driver reports that they
            can. It is a function because the check queries the driver.
    """

    fork_hazard: Callable[[], str] = lambda: ""
    can_fork: bool = True
    environment: Mapping[str, str]
    alias_hazard: str = ""
    peer_to_peer: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How and where a launch runs its ranks.

    Attributes:
        start_method: "inline", "fork", "zygote", "spawn" or "ray".
        reason: Why this start method was chosen, as shown in the run's header.
        num_processes: Ranks on this machine.
        world_size: Ranks on all machines.
        first_rank: Global index of this machine's first rank.
        accelerator: Device type of the ranks ("cpu", "cuda", ...).
        backend: Communication library of the process group ("gloo", "nccl", ...), or "" for a single rank.
        threads: Number of CPU threads for each rank's operators, or None to keep the kernel's number.
        master_addr: Address of rank 0.
        port: The requested port. If it is taken, the launch may use another one.
        loopback: Name of the loopback network interface that the ranks are pinned to, or "" on several machines.
        store: Folder that the ranks of this machine use to find each other, or "" if they use `port`.
        node: Index of this node among those that run the function together.
        nodes: Number of nodes.
        sizes: Number of ranks on each node. Empty for one machine, and until all nodes have joined.
        interface: Name of the network interface over which ranks on several nodes reach each other, or "" if unknown.
        run_name: The run's name on all nodes, or "" for one machine, and until all nodes have joined.
        where: Name of the cluster that the ranks run on, as shown in the header, or "" for this machine.
        devices: Devices per process. The devices of one process share each batch.
        variables: Environment variables for the run or for the runtime of its devices, the same on all ranks.
        slots: The devices that the run holds: the identity of each, such as "cuda:GPU-8932f937" or "cpu:3", and its
            entry in the variable that selects devices. Empty if the ranks share the CPU. Until the devices are
            reserved, these are the devices that the run can be given.
    """

    start_method: str
    reason: str
    num_processes: int
    world_size: int
    first_rank: int
    accelerator: str
    backend: str
    threads: int | None
    master_addr: str
    port: int
    loopback: str
    store: str = ""
    node: int = 0
    nodes: int = 1
    sizes: tuple[int, ...] = ()
    interface: str = ""
    run_name: str = ""
    where: str = ""
    devices: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    slots: Mapping[str, str] = field(default_factory=dict)

    def sentence(self) -> str:
        """Describe the plan in one line, for the run's header."""
        ranks = "1 process" if self.num_processes == 1 else f"{self.num_processes} processes"
        if self.world_size != self.num_processes:
            ranks += f" of {self.world_size}"
        place = self.where or self.accelerator
        if _selector(self) in self.variables:
            place += f" [{', '.join(self.slots.values())}]"
        if self.devices > 1:
            place += f", whose {self.devices} devices share each batch (SPMD)"
        parts = [f"{ranks} on {place}", f"{self.start_method} ({self.reason})"]
        if self.backend:
            parts.append(self.backend)
        return " · ".join(parts)


def make_plan(config: LaunchConfig, hardware: HardwareInfo, facts: KernelFacts) -> LaunchPlan:
    """Plan the launch that ``config`` describes on ``hardware``, from a kernel with ``facts``.

    Raises:
        ValueError: The configuration requests something that this machine or this kernel does not have.
    """
    if config.cluster is not None:
        return _on_cluster(config, config.cluster)
    accelerator, total = _accelerator(config, hardware)
    slots = _slots(config, hardware, accelerator, total)
    wanted = number_of_slots(config, slots)
    count = wanted if total and config.devices is not None else total
    num_processes = config.num_processes if config.num_processes is not None else max(count, 1)
    devices = 1
    if accelerator == "xla":
        num_processes, devices = _xla_processes(config, count, facts)
    if accelerator == "tpu":
        num_processes = _tpu_processes(config, hardware)
    if accelerator == "mps" and num_processes > 1:
        accelerator, count = "cpu", 0  # A machine has only one MPS device, which ranks cannot share.
    if count and num_processes > count:
        where = "this machine has" if config.devices is None else f"devices={config.devices!r} selects"
        raise ValueError(
            f"num_processes={num_processes}, but {where} {count} {accelerator} device{'s' * (count > 1)}; "
            f"pass num_processes={count}, or config=LaunchConfig(cpu=True) to train on the CPU"
        )
    world_size = num_processes * config.num_nodes
    method, reason = _start_method(config, num_processes, facts, accelerator)
    master_addr, port = config.rendezvous_address
    cores = hardware.cpu_count
    if config.devices is not None:
        cores = max(1, cores * wanted // total) if total else wanted
    variables = {} if method == "inline" else _device_variables(accelerator, hardware, facts, world_size)
    if config.devices is not None:
        variables = {**variables, **_selection(config, accelerator, facts)}
    return LaunchPlan(
        start_method=method,
        reason=reason,
        num_processes=num_processes,
        world_size=world_size,
        first_rank=config.node_rank * num_processes,
        accelerator=accelerator,
        backend=_backend(accelerator) if world_size > 1 else "",
        threads=None if method == "inline" else _threads(config, num_processes, cores, facts),
        master_addr=master_addr,
        port=port,
        loopback=(hardware.loopback or "") if config.num_nodes == 1 else "",
        node=config.node_rank,
        nodes=config.num_nodes,
        devices=devices,
        variables=variables,
        slots=slots,
    )


# ---- the devices of a run


def _slots(config: LaunchConfig, hardware: HardwareInfo, accelerator: str, count: int) -> dict[str, str]:
    """Return the devices that a run can be given, as in `LaunchPlan.slots`.

    Raises:
        ValueError: The configuration requests a device or a number of devices that this machine does not have.
    """
    from notebook_accelerate.hardware import device_table

    asked = config.devices
    known = dict(hardware.visible) or {str(index): str(index) for index in range(count)}
    if accelerator == "cpu":
        known = {} if asked is None else {str(core): str(core) for core in hardware.cores}
    elif asked is not None and not device_table.row(accelerator).is_numbered:
        raise ValueError(
            f"devices={asked!r} is not possible with devices of the type {accelerator}; leave it out, or train on the "
            "CPU: config=LaunchConfig(cpu=True)"
        )
    if isinstance(asked, int) and asked > len(known):
        unit = "cores" if accelerator == "cpu" else f"{accelerator} devices"
        raise ValueError(
            f"devices={asked}, but this machine has {len(known)} {unit}; pass at most devices={len(known)}"
        )
    if isinstance(asked, tuple):
        known = dict(_slot(entry, known, by_position=accelerator != "cpu") for entry in asked)
    return {f"{accelerator}:{identity}": entry for identity, entry in known.items()}


def _slot(asked: int | str, known: Mapping[str, str], *, by_position: bool) -> tuple[str, str]:
    """Return the identity and the entry of a device that the user has named by its number or its UUID."""
    if not by_position:
        found = [str(asked)] if str(asked) in known else []
    elif isinstance(asked, int):
        found = list(known)[asked : asked + 1]
    elif asked.startswith("MIG-") or not any(each.startswith("GPU-") for each in known):
        return asked, asked  # NVML lists only the first slice of a GPU. Without NVML, no UUID is known.
    else:
        found = [identity for identity in known if identity.startswith(asked)]
    if len(found) == 1:
        return found[0], asked if isinstance(asked, str) else known[found[0]]
    names = ", ".join(known if isinstance(asked, str) else map(str, range(len(known))) if by_position else known)
    kind = "one of the devices" if by_position else "one of the cores"
    raise ValueError(f"devices=[{asked!r}] is not {kind} that this kernel can use; pass some of: {names}")


def number_of_slots(config: LaunchConfig, slots: Mapping[str, str]) -> int:
    """Return how many of the devices in `LaunchPlan.slots` a run needs."""
    return config.devices if isinstance(config.devices, int) else len(slots)


def _selection(config: LaunchConfig, accelerator: str, facts: KernelFacts) -> dict[str, str]:
    """Return the variables of ranks with selected devices, as far as they do not depend on the devices."""
    from notebook_accelerate.hardware import device_table

    names = (environ.CORES,) if accelerator == "cpu" else device_table.row(accelerator).visible_variables
    if given := [name for name in names if name in (config.env or {})]:
        raise ValueError(f"devices={config.devices!r} and env={{{given[0]!r}: ...}} select devices; pass one of them")
    name = next((name for name in names if name in facts.environment), names[0])
    near = {} if accelerator == "cpu" or environ.AFFINITY in facts.environment else {environ.AFFINITY: "1"}
    return {name: "", **near}


def _selector(plan: LaunchPlan) -> str:
    """Return the variable that selects the ranks' devices, or "" if the launch does not select them."""
    from notebook_accelerate.hardware import device_table

    known: tuple[str, ...] = (environ.CORES,) if plan.accelerator == "cpu" else ()
    if not known and not plan.where:
        # The plan of a kept run may name a device type that this version does not know.
        known = next((row.visible_variables for row in device_table.ROWS if row.type == plan.accelerator), ())
    return next((name for name in known if name in plan.variables), "")


def placed(plan: LaunchPlan, devices: Sequence[str]) -> LaunchPlan:
    """Return the plan for the devices that are reserved for the run.

    Args:
        plan: The plan with all devices that the run can be given.
        devices: The identities of the devices that it was given.
    """
    slots, name = {device: plan.slots[device] for device in devices}, _selector(plan)
    selected = {name: ",".join(slots.values())} if name else {}
    return replace(plan, slots=slots, variables={**plan.variables, **selected})


def _tpu_processes(config: LaunchConfig, hardware: HardwareInfo) -> int:
    """Return the number of ranks on TPUs with torch_tpu, where each rank has one device.

    Raises:
        ValueError: The configuration requests several machines, or a number of ranks that does not form a mesh.
    """
    from notebook_accelerate.hardware import tpu_environment

    allowed = tpu_environment.process_counts(hardware.tpu, hardware.count) or [1]
    asked = allowed[-1] if config.num_processes is None else config.num_processes
    if asked not in allowed:
        what = f"TPU {hardware.tpu}" if hardware.tpu else "TPU of an unknown generation"
        raise ValueError(
            f"num_processes={asked} is not possible on this {what} with {hardware.count} devices: torch_tpu has no "
            f"mesh of this size; pass num_processes={' or '.join(map(str, allowed))}, or "
            "config=LaunchConfig(cpu=True) to train on the CPU"
        )
    if config.num_nodes > 1:
        raise ValueError(
            f"num_nodes={config.num_nodes} is not possible on TPUs with torch_tpu: the ranks need the addresses of all "
            "machines before they start; pass num_nodes=1, or start torchrun on each machine"
        )
    return asked


def _device_variables(
    accelerator: str, hardware: HardwareInfo, facts: KernelFacts, world_size: int
) -> Mapping[str, str]:
    """Return the environment variables that the ranks need for their type of device."""
    from notebook_accelerate.hardware import nvml, tpu_environment

    if accelerator == "tpu" and hardware.tpu:
        return {"TORCH_TPU_TOPOLOGY": tpu_environment.topology(hardware.tpu, world_size)}
    if accelerator == "cuda" and world_size > 1 and not facts.peer_to_peer():
        return nvml.without_peer_to_peer(facts.environment)
    return {}


def _xla_processes(config: LaunchConfig, chips: int, facts: KernelFacts) -> tuple[int, int]:
    """Return the number of ranks on XLA devices, and the number of devices of each rank.

    torch_xla supports either a single process, which uses all devices of the machine, or one process for each chip. If
    chips have two devices each, one process per chip would leave half of the devices idle.

    Raises:
        ValueError: The configuration requests a number of processes that is not possible.
    """
    from notebook_accelerate.hardware import tpu_environment

    layout = tpu_environment.layout({**facts.environment, **(config.env or {})}, chips)
    asked = layout.ranks if config.num_processes is None else config.num_processes
    if asked not in {1, layout.ranks}:
        allowed = "1" if layout.ranks == 1 else f"1 or {layout.ranks}"
        why = (
            f"its runtime puts {layout.devices} devices into one process"
            if layout.devices > 1 or layout.processes == 1
            else f"this machine has {layout.processes} chips, and torch_xla uses one or all of them"
        )
        raise ValueError(
            f"num_processes={asked} is not possible on XLA devices: {why}; pass num_processes={allowed}, "
            "or config=LaunchConfig(cpu=True) to train on the CPU without XLA"
        )
    return asked, layout.processes * layout.devices if asked == 1 else 1


def _on_cluster(config: LaunchConfig, cluster: RayCluster) -> LaunchPlan:
    """Return the plan for ranks on a cluster, whose machines are unknown until the ranks are placed."""
    ranks = config.num_processes or 1
    on_cpu = config.cpu or cluster.gpus == 0
    return LaunchPlan(
        start_method="ray",
        reason=f"as asked: on={shown_value('on', config.on)!r}"
        if isinstance(config.on, str)
        else "as asked: on=RayCluster(...)",
        num_processes=ranks,
        world_size=ranks,
        first_rank=0,
        accelerator="cpu" if on_cpu else "the cluster's devices",
        backend="gloo" if on_cpu and ranks > 1 else "",
        threads=_threads_in((config.env or {}).get("OMP_NUM_THREADS")) or max(1, int(cluster.cpus)),
        master_addr="",  # The address of the first rank's node is not known before the rank is placed.
        port=0,
        loopback="",
        where=cluster.description,
    )


def joined(plan: LaunchPlan, sizes: Sequence[int], store: tuple[str, int], interface: str, run_name: str) -> LaunchPlan:
    """Return the plan of the first node once all nodes of a run have joined.

    Args:
        plan: The first node's plan from before the other nodes joined.
        sizes: Number of ranks on each node, in order.
        store: The address and port where rank 0 serves the store of the process group.
        interface: Name of the network interface between the nodes, or "" to leave the choice to the backend.
        run_name: The run's name on all nodes.
    """
    return replace(
        plan,
        world_size=sum(sizes),
        first_rank=0,
        num_processes=sizes[0],
        backend=_backend(plan.accelerator) if sum(sizes) > 1 else "",
        master_addr=store[0],
        port=store[1],
        node=0,
        nodes=len(sizes),
        sizes=tuple(sizes),
        interface=interface,
        run_name=run_name,
    )


def on_node(plan: LaunchPlan, node: int) -> LaunchPlan:
    """Return the plan of another node, after all nodes of the run have joined."""
    return replace(plan, node=node, first_rank=sum(plan.sizes[:node]), num_processes=plan.sizes[node], interface="")


def _accelerator(config: LaunchConfig, hardware: HardwareInfo) -> tuple[str, int]:
    if config.cpu or hardware.accelerator == "cpu":
        return "cpu", 0
    return hardware.accelerator, hardware.count


def _backend(accelerator: str) -> str:
    from notebook_accelerate.hardware import device_table

    return device_table.row(accelerator).backend


def _threads(config: LaunchConfig, num_processes: int, cpu_count: int, facts: KernelFacts) -> int:
    asked = (config.env or {}).get("OMP_NUM_THREADS") or facts.environment.get("OMP_NUM_THREADS")
    return _threads_in(asked) or max(1, cpu_count // num_processes)


def _threads_in(variable: str | None) -> int:
    return int(variable) if variable and variable.isdigit() else 0


def _start_method(config: LaunchConfig, num_processes: int, facts: KernelFacts, accelerator: str) -> tuple[str, str]:
    if config.start_method != "auto":
        if accelerator == "tpu" and config.start_method in ("fork", "zygote"):
            raise ValueError(
                f"start_method={config.start_method!r} is not possible on TPUs, which do not work in forked processes; "
                "pass 'auto' or 'spawn'"
            )
        return _asked_method(config, num_processes, facts)
    if accelerator == "tpu":
        return "spawn", "a TPU belongs to the rank, and does not work in forked processes"
    if accelerator == "xla" and facts.can_fork:
        # A device belongs to the first process that starts a runtime on it, so the kernel must not start one.
        return "zygote", "XLA's runtime belongs to the rank, never to the kernel"
    if config.as_accelerate and facts.alias_hazard and facts.can_fork:
        return "zygote", facts.alias_hazard
    if config.detach and facts.can_fork:
        return "zygote", "one import of torch for all ranks"  # The process of a detached run has not imported torch.
    if num_processes == 1 and config.num_nodes == 1 and not _needs_process(config):
        return "inline", "one process: the kernel itself"
    if not facts.can_fork:
        return "spawn", "this platform cannot fork"
    if hazard := facts.fork_hazard():
        return "zygote", hazard
    return "fork", "the kernel is safe to fork"


def _asked_method(config: LaunchConfig, num_processes: int, facts: KernelFacts) -> tuple[str, str]:
    method = config.start_method
    if method == "inline" and (num_processes > 1 or config.num_nodes > 1):
        raise ValueError(f"start_method='inline' runs one process, but {num_processes} are requested; pass 'auto'")
    if method == "inline" and (needed := _needs_process(config)):
        raise ValueError(f"start_method='inline' does not support {needed}; pass start_method='auto'")
    if method in ("fork", "zygote") and not facts.can_fork:
        raise ValueError(f"start_method={method!r} is not possible on this platform; pass 'spawn'")
    if method in ("inline", "fork") and config.as_accelerate and facts.alias_hazard:
        raise ValueError(
            f"start_method={method!r} is not possible with as_accelerate=True: {facts.alias_hazard}, and its ranks "
            "would inherit that; pass 'auto' or 'zygote'"
        )
    if method == "fork" and (hazard := facts.fork_hazard()):
        raise ValueError(f"start_method='fork' is not safe now: {hazard}; pass 'auto' or 'zygote'")
    return method, "as asked"


def _needs_process(config: LaunchConfig) -> str:
    """Return the names of the settings that need a separate process, or "" if there are none."""
    needed = [
        name
        for name in ("timeout", "hang_timeout", "max_restarts", "env", "hold_on_error", "devices", "queue")
        if getattr(config, name) not in (None, 0, False)
    ]
    if not config.block:
        needed.insert(0, "block=False")
    return ", ".join(needed)


def rank_environment(plan: LaunchPlan, local_rank: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for this rank, and those for its network and device."""
    rank = plan.first_rank + local_rank
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(plan.num_processes),
        "GROUP_RANK": str(plan.node),
        "GROUP_WORLD_SIZE": str(plan.nodes),
        "NODE_RANK": str(plan.node),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.port),
    }
    if plan.threads is not None:
        env["OMP_NUM_THREADS"] = str(plan.threads)
    if plan.run_name:  # As with torchrun, the ranks connect to a store that is already served.
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        env["TORCHELASTIC_RUN_ID"] = plan.run_name
        if rank == 0:
            env[environ.SERVED_STORE] = f"{plan.master_addr}:{plan.port}"
    if interface := plan.loopback or plan.interface:
        # By default, gloo uses the interface of the host name, which the other ranks may not be able to reach.
        env["GLOO_SOCKET_IFNAME"] = env["TP_SOCKET_IFNAME"] = interface
    if plan.loopback:
        env["NCCL_SOCKET_IFNAME"] = plan.loopback
    if plan.store:
        env[environ.STORE] = plan.store
    env.update(plan.variables)
    return env
