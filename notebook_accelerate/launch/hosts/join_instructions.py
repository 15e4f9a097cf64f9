"""The lines that the first notebook shows: what to type elsewhere, so that other hosts join the run."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from notebook_accelerate.hardware.addresses import own_address
from notebook_accelerate.launch.hosts.run_secret import SECRET_VARIABLE

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig

WARM = "warm_rank"
"""Name of the function that warm ranks run."""
SCRIPTS = ("run_script", "run_module")
"""Names of the functions that the command line's ranks run."""
_PASSED_ON = ("mixed_precision", "rdzv_endpoint", "rdzv_id", "max_restarts", "min_nodes")


def instruction_lines(config: LaunchConfig, function: str, secret: str = "") -> list[str]:
    """Return the cell and the command with which others join, and notes about them.

    Args:
        config: This node's configuration.
        function: Name of the training function.
        secret: The run's secret, to be shown; "" where the user has given it, and knows it.
    """
    in_config = bool((config.rdzv_conf or {}).get("secret"))
    variable = "" if in_config else f"{SECRET_VARIABLE}={secret}" if secret else f"the same {SECRET_VARIABLE}"
    if function in SCRIPTS:
        lines = [_script_line(config, variable)]
    else:
        given = f", with the same {SECRET_VARIABLE}" if variable and not secret else ""
        if variable and secret and function == WARM:  # the magic has no option for it
            given = f", after %env {variable}"
        lines = [f"in another notebook{given}: {cell_line(config, function, secret)}"]
        if config.rdzv_backend == "static" and config.num_nodes > 2:
            others = "2" if config.num_nodes == 3 else f"2 to {config.num_nodes - 1}"
            lines[0] += f" (and node_rank={others})"
    lines.append(f"or on any machine: {command_line(config, secret)}")
    setting = "--main_process_ip" if function in SCRIPTS else "rdzv_endpoint" if config.rdzv_endpoint else "master_addr"
    return lines + _address_lines(config, setting)


def alone_lines(config: LaunchConfig, function: str) -> list[str]:
    """Return the lines of a notebook whose run has no secret: each notebook runs its own ranks, as torchrun does."""
    if config.node_rank:
        return [
            "this node has no secret, and meets the others in torch only; if node 0 shows how to join, pass its secret"
        ]
    if function in SCRIPTS:
        return [
            _script_line(config),
            f"each runs and shows its own ranks; to show all here, set {SECRET_VARIABLE} to the same text everywhere",
            *_address_lines(config, "--main_process_ip"),
        ]
    why = (
        "every notebook runs and shows its own ranks, as torchrun would; for one console for all of them, pass the "
        f"same rdzv_conf={{'secret': '...'}} everywhere (or set {SECRET_VARIABLE}), or rdzv_backend='c10d'"
    )
    return [f"in the other notebooks: {cell_line(config, function)}", why, *_address_lines(config, "master_addr")]


def _script_line(config: LaunchConfig, secret: str = "") -> str:
    ranks = "=1" if config.num_nodes == 2 else f"=1 to {config.num_nodes - 1}"
    parts = [f"--machine_rank{ranks}" if config.rdzv_backend == "static" else "", secret]
    more = " and ".join(filter(None, parts))
    return f"on the other machines: the same command{more and f' with {more}'}"


def command_line(config: LaunchConfig, secret: str = "") -> str:
    """Return the command that joins a machine without a notebook; it contains the secret only if one is given."""
    address, port = config.rendezvous_address
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    return f"{SECRET_VARIABLE}={secret or '<the same>'} python -m notebook_accelerate join {where}"


def _address_lines(config: LaunchConfig, setting: str) -> list[str]:
    """Return a note if the rendezvous' address is one that other machines cannot reach."""
    address = config.rendezvous_address[0]
    if not _is_loopback(address):
        return []
    own = own_address("192.0.2.1", 9)  # on the default route: reserved for documentation (RFC 5737)
    example = f": {setting}={own if setting.startswith('-') else repr(own)}" if own else ""
    return [f"{address} is this machine itself; other machines need its address{example}"]


def cell_line(config: LaunchConfig, function: str, secret: str = "") -> str:
    """Return the call to run in another notebook; it contains the secret only if one is given."""
    given = config.non_default()
    if function == WARM:
        return _start_line(config)
    address, port = config.rendezvous_address
    values = {"num_processes": config.num_processes, "num_nodes": config.num_nodes}
    call = [function, "args", *(f"{name}={value}" for name, value in values.items() if value is not None)]
    if config.rdzv_backend == "static":
        call.append("node_rank=1")
    else:
        call.append(f"rdzv_backend={config.rdzv_backend!r}")
    if not config.rdzv_endpoint:
        call += [f"master_addr={address!r}", f"use_port={port}"]
    call += [f"{name}={given[name]!r}" for name in _PASSED_ON if name in given]
    settings = [f"{name!r}: {value!r}" for name, value in (config.rdzv_conf or {}).items() if name != "secret"]
    if secret or (config.rdzv_conf or {}).get("secret"):
        settings.append(f"'secret': {secret!r}" if secret else "'secret': <the same>")
    if settings:
        call.append(f"rdzv_conf={{{', '.join(settings)}}}")
    return f"notebook_launcher({', '.join(call)})"


def _start_line(config: LaunchConfig) -> str:
    """Return the line magic that starts the warm ranks of another notebook."""
    node_option = " --node-rank 1" if config.rdzv_backend == "static" else ""
    if config.non_default().keys() & {"rdzv_conf", "rdzv_endpoint", "rdzv_id", "max_restarts", "min_nodes"}:
        return f"%rank_start -c config{node_option}, where config is the same LaunchConfig"
    address, port = config.rendezvous_address
    ranks = "" if config.num_processes is None else f" -n {config.num_processes}"
    backend = "" if node_option else f" --rdzv-backend {config.rdzv_backend}"
    precision = "" if config.mixed_precision == "no" else f" -p {config.mixed_precision}"
    address_option = f" --master-addr {address} --port {port}"
    return f"%rank_start{ranks}{precision} --num-nodes {config.num_nodes}{node_option}{backend}{address_option}"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
