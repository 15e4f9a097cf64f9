"""How the run's thread hears its ranks."""

from __future__ import annotations

import os
import selectors

from notebook_accelerate.launch.supervisor import dispatch


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
