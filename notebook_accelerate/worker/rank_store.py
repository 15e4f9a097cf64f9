"""The store of the process groups of a run on several machines, served by rank 0.

torch's own rank 0 listens on all interfaces, whatever MASTER_ADDR is; this one listens on MASTER_ADDR only.
"""

from __future__ import annotations

import os
from typing import Any

from notebook_accelerate.config import environ
from notebook_accelerate.hardware.addresses import listen

_stores: list[Any] = []


def serve() -> None:
    """Serve the store if this process is the rank that does; it ends with the process.

    Raises:
        OSError: The address or the port is not available.
    """
    where = os.environ.pop(environ.SERVED_STORE, "")
    if not where:
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, _, port = where.rpartition(":")
    try:
        listener = listen(address, int(port))
    except OSError:  # a router translates the address (NAT)
        listener = listen("", int(port))
    _stores.append(
        TCPStore(
            address, int(port), is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    )  # fmt: skip


__all__ = ["serve"]
