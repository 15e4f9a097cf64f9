"""How the run's thread hears its ranks."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time

from notebook_accelerate.launch.processes.rank_process import PIPE_BYTES, READ_BYTES, Ends, OwnChild
from notebook_accelerate.launch.supervisor.rank_group import dispatch


def test_what_an_earlier_call_of_the_batch_closed_is_not_called() -> None:
    pipes = [os.pipe() for _ in range(2)]
    called: list[int] = []
    with selectors.DefaultSelector() as selector:

        def end_both(number: int) -> None:
            called.append(number)
            for reader, _ in pipes:
                selector.unregister(reader)
                os.close(reader)

        for number, (reader, writer) in enumerate(pipes):
            selector.register(reader, selectors.EVENT_READ, lambda n=number: end_both(n))
            os.write(writer, b"!")
        dispatch(selector, 5.0)
    for _, writer in pipes:
        os.close(writer)
    assert len(called) == 1


class _Slow:
    """Hears a rank more slowly than it writes."""

    heard = 0

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        self.heard += len(data)
        assert self.heard <= 4 * PIPE_BYTES, "it would hear for ever"
        time.sleep(0.02)

    def take_frames(self, rank: int, data: bytes) -> None:
        raise AssertionError("nobody says anything")

    def take_host_frames(self, rank: int, data: bytes) -> None:
        raise AssertionError("nobody says anything")

    def take_end(self, rank: int) -> None:
        raise AssertionError("nobody is watched")


def test_what_a_rank_leaves_running_may_write_without_end() -> None:
    ends, hearing = Ends(), _Slow()
    write = f"import os\nwhile True: os.write({ends.rank_stdout}, bytes({READ_BYTES}))"
    command = [sys.executable, "-S", "-c", write]
    with subprocess.Popen(command, pass_fds=[ends.rank_stdout], start_new_session=True) as left:
        process = OwnChild(0, left.pid, ends, None)
        try:
            while not hearing.heard:
                process.drain(hearing, channel=False)
            hearing.heard = 0
            process.drain(hearing, channel=False)
        finally:
            ends.close_rank_side()
            process.close()  # ends what the rank left running
    assert hearing.heard
