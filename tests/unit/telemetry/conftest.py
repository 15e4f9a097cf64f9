"""A channel to the kernel, with a sink at the rank's end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notebook_accelerate.telemetry import Channel, Sink, install_sink


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Sink]]:
    """Yield the kernel's end of a channel, and a sink that sends to it."""
    kernel, theirs = Channel.pair()
    sink = Sink(Channel(theirs))
    yield kernel, sink
    install_sink(None)
    sink.channel.close()
    kernel.close()
