"""A channel to the kernel with a sink on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notebook_accelerate.telemetry import Channel, Sink, install_sink


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Sink]]:
    """Return the kernel's end, and a sink that sends to it."""
    kernel, theirs = Channel.pair()
    sink = Sink(Channel(theirs))
    yield kernel, sink
    install_sink(None)
    sink.channel.close()
    kernel.close()
