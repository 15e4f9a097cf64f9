"""Messages between notebooks through torch's store: JSON values, authenticated with a shared secret."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

UNSIGNED = b"-"
"""Replaces the signature when there is no secret."""


class ForgedError(RendezvousStateError):
    """A stored value was not signed with this run's secret."""


class MessageSigner:
    """Signs the values that are stored under a key, and verifies those of others.

    Args:
        secret: Shared by all notebooks of the run; "" disables signing.
        run_id: Name of the run, which is part of the signature.
    """

    def __init__(self, secret: str, run_id: str) -> None:
        self._run_id = run_id.encode()
        # A reader of the store can test guesses of the secret on the signatures: each guess costs this (RFC 7914).
        salt = b"notebook_accelerate rendezvous " + self._run_id
        self._key = hashlib.scrypt(secret.encode(), salt=salt, n=1 << 14, r=8, p=1) if secret else b""

    def sign(self, key: str, body: bytes) -> bytes:
        """Return ``body`` with its signature in front."""
        return self._signature(key, body) + b":" + body

    def verify(self, key: str, data: bytes) -> bytes:
        """Verify the result of ``sign`` and return its body.

        Raises:
            ForgedError: The signature is missing or wrong.
        """
        signature, _, body = data.partition(b":")
        if hmac.compare_digest(signature, self._signature(key, body)):
            return body
        if signature == UNSIGNED:
            raise ForgedError("the other nodes have no secret; pass none here, or the same to all of them")
        if not self._key:
            raise ForgedError(
                "the run has a secret; pass it here too: rdzv_conf={'secret': ...} or NOTEBOOK_ACCELERATE_SECRET"
            )
        raise ForgedError("the other nodes have another secret")

    def _signature(self, key: str, body: bytes) -> bytes:
        if not self._key:
            return UNSIGNED
        text = b"\0".join((self._run_id, key.encode(), body))
        return hmac.new(self._key, text, "blake2b").hexdigest()[:64].encode()


class Directory:
    """A part of a store, under a prefix.

    Args:
        store: A `torch.distributed.Store`.
        prefix: Prepended to every key.
        seal: Signs and verifies the stored values.
    """

    def __init__(self, store: Any, prefix: str, signer: MessageSigner) -> None:
        self._store, self._prefix, self._signer = store, prefix, signer

    def under(self, name: str) -> Directory:
        """Return the part of this one under ``name``."""
        return Directory(self._store, f"{self._prefix}/{name}", self._signer)

    def post(self, key: str, values: dict[str, Any]) -> None:
        """Store ``values`` under ``key``."""
        full = self._full(key)
        self._store.set(full, self._signer.sign(full, json.dumps(values).encode()))

    def read(self, key: str) -> dict[str, Any] | None:
        """Return the values under ``key``; None when there are none.

        Raises:
            ForgedError: They were not stored by a notebook of this run.
        """
        full = self._full(key)
        return self._decoded(full, self._store.get(full)) if self._store.check([full]) else None

    def first(self, key: str, values: dict[str, Any]) -> dict[str, Any]:
        """Store ``values`` under ``key`` unless it has a value, and return the stored values."""
        full = self._full(key)
        data = self._signer.sign(full, json.dumps(values).encode())
        return self._decoded(full, self._store.compare_set(full, "", data.decode()))

    def count(self, key: str, more: int = 0) -> int:
        """Add ``more`` to a counter and return it."""
        return int(self._store.add(self._full(key), more))

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _decoded(self, full: str, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(self._signer.verify(full, data))
        except (ValueError, RecursionError) as error:
            raise ForgedError(f"the stored value does not belong to this protocol: {error}") from None
        if not isinstance(found, dict):
            raise ForgedError("the stored value does not belong to this protocol")
        return found


class SignedBackend(RendezvousBackend):
    """A backend of torch's dynamic rendezvous whose state, which torch pickles, is signed with the run's secret.

    Args:
        backend: torch's backend.
        seal: Signs and verifies its state.
    """

    def __init__(self, backend: RendezvousBackend, signer: MessageSigner) -> None:
        self._backend, self._signer = backend, signer

    @property
    def name(self) -> str:
        """See the base class."""
        return self._backend.name

    def get_state(self) -> tuple[bytes, Token] | None:
        """See the base class."""
        found = self._backend.get_state()
        return None if found is None else (self._signer.verify("state", found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See the base class."""
        found = self._backend.set_state(self._signer.sign("state", state), token)
        return None if found is None else (self._signer.verify("state", found[0]), found[1], found[2])
