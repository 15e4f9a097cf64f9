"""The channel and the output pipes between the kernel and one rank."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

from notebook_accelerate.launch.processes import kernel_descriptors
from notebook_accelerate.telemetry import Channel

PIPE_BYTES = 1 << 20
"""The requested size of an output pipe in bytes, which lets a rank write in bursts without waiting for the kernel."""


class RankPipes:
    """Both ends of one rank's channel and output pipes: the kernel's ends and the rank's ends."""

    def __init__(self) -> None:
        with ExitStack() as undo:
            self.channel, self.rank_channel = Channel.pair()
            undo.callback(self.rank_channel.close)
            undo.callback(self.channel.close)
            self.stdout, self.rank_stdout = _pipe(undo)
            self.stderr, self.rank_stderr = _pipe(undo)
            undo.pop_all()
        kernel_descriptors.add(self.stdout, self.stderr)

    def close_rank_side(self) -> None:
        """Close the rank's ends in the kernel, which otherwise would never see the streams end."""
        self.rank_channel.close()
        os.close(self.rank_stdout)
        os.close(self.rank_stderr)

    def close_kernel_side(self) -> None:
        """Close the kernel's ends of the channel and of the output pipes."""
        self.channel.close()
        for descriptor in (self.stdout, self.stderr):
            kernel_descriptors.discard(descriptor)
            os.close(descriptor)


def _pipe(undo: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    undo.callback(os.close, reader)
    undo.callback(os.close, writer)
    os.set_blocking(reader, False)
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer
