"""The store that rank 0 serves for process groups across several machines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from notebook_accelerate.config import environ

SERVE = (
    "from notebook_accelerate.worker.entry import serve_group_store; "
    "serve_group_store(); print('served', flush=True); input()"
)


def test_the_store_listens_on_the_address_of_the_master_only() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE]
    variables = {**os.environ, environ.SERVED_STORE: f"127.0.0.1:{port}"}
    rank = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "served\n"
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
        with socket.socket() as other:  # The store must not listen on this machine's other addresses.
            assert other.connect_ex(("127.0.0.2", port)) != 0
        del store
        rank.communicate("\n", timeout=60)
