"""Messages between notebooks through torch's store, with and without a secret."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from notebook_accelerate.launch.hosts.rendezvous.signed_messages import (
    Directory,
    ForgedError,
    MessageSigner,
    SignedBackend,
)


def _directory(store: Any, secret: str = "hush", run_id: str = "none") -> Directory:
    return Directory(store, "here", MessageSigner(secret, run_id))


@pytest.fixture
def store() -> Any:
    """Return a store in this process."""
    return PrefixStore("test", HashStore())


@pytest.mark.parametrize("secret", ["", "hush"])
def test_a_posted_value_is_read(store: Any, secret: str) -> None:
    directory = _directory(store, secret)
    assert directory.read("node/1") is None
    directory.post("node/1", {"host": "hällo", "ranks": [0, 1]})
    assert directory.read("node/1") == {"host": "hällo", "ranks": [0, 1]}
    assert directory.under("a").read("node/1") is None


def test_the_first_value_is_kept(store: Any) -> None:
    assert _directory(store).first("decision", {"action": "end"}) == {"action": "end"}
    assert _directory(store).first("decision", {"action": "restart"}) == {"action": "end"}


def test_counters(store: Any) -> None:
    assert [_directory(store).count("news", more) for more in (0, 1, 1, 0)] == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ("hush", "wrong", "the other nodes have another secret"),
        ("", "hush", "the run has a secret; pass it here too"),
        ("hush", "", "the other nodes have no secret"),
    ],
)
def test_different_secrets_are_refused_with_the_reason(store: Any, ours: str, theirs: str, message: str) -> None:
    _directory(store, theirs).post("hello", {})
    with pytest.raises(ForgedError, match=message):
        _directory(store, ours).read("hello")


def test_a_signature_is_valid_for_its_key_and_run_only(store: Any) -> None:
    _directory(store).post("node/1", {"host": "a"})
    signed = store.get("here/node/1")
    store.set("here/node/2", signed)
    with pytest.raises(ForgedError):
        _directory(store).read("node/2")
    with pytest.raises(ForgedError):
        _directory(store, run_id="another").read("node/1")
    store.set("here/node/1", signed[:-3] + b'b"}')
    with pytest.raises(ForgedError):
        _directory(store).read("node/1")


@pytest.mark.parametrize("data", [b"", b"-", b"-:", b"-:[]", b"-:{", b"-:" + b"[" * 100_000, b"\xff:\xff"])
def test_a_value_of_another_protocol_is_refused(store: Any, data: bytes) -> None:
    store.set("here/hello", data)
    with pytest.raises(ForgedError):
        _directory(store, "").read("hello")


class _Plain(RendezvousBackend):
    """A back end in memory, as torch's is in a store."""

    state: bytes | None = None

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, Any] | None:
        return None if self.state is None else (self.state, self.state)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        written = token == self.state
        if written:
            self.state = state
        assert self.state is not None
        return self.state, self.state, written


def test_torchs_pickled_state_is_signed() -> None:
    plain = _Plain()
    signed = SignedBackend(plain, MessageSigner("hush", "none"))
    assert signed.get_state() is None
    found = signed.set_state(b"pickle of the state")
    assert found is not None
    assert (found[0], found[2]) == (b"pickle of the state", True)
    assert signed.get_state() == (b"pickle of the state", found[1])
    again = signed.set_state(b"stale", b"another token")
    assert again is not None
    assert (again[0], again[2]) == (b"pickle of the state", False)
    plain.state = b"-:cos\nsystem\n(S'echo'\ntR."
    with pytest.raises(ForgedError):
        signed.get_state()
