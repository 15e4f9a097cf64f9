"""What sampling the stacks of a rank costs its steps."""

from __future__ import annotations

import time
from collections.abc import Iterator

from notebook_accelerate import notebook_launcher
from tests.benchmarks.bench import Figure, alternate, compared, row


def steps() -> None:
    """In a rank: steps of about 2 ms until the run is stopped, and their count as a metric, twice a second."""
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    inputs = torch.ones(64, 64)
    accelerator.steps_done = 0  # type: ignore[attr-defined]
    while True:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.steps_done += 1  # type: ignore[attr-defined]


@row("debugging", "sampling")
def sampling() -> Iterator[Figure]:
    """Seconds of a step while the rank is sampled 100 times a second, beside those of a rank that is not."""
    run = notebook_launcher(steps, (), 1, use_port=0, start_method="fork", block=False, panel=False)
    try:
        while not isinstance(run.ask("accelerator.steps_done")[0], int):
            time.sleep(0.5)

        def seconds_of_a_step(rate: float) -> float:
            before, begin = run.ask("accelerator.steps_done")[0], time.perf_counter()
            if rate:
                run.sample(2.0, rate=rate)
            else:
                time.sleep(2.0)
            after = run.ask("accelerator.steps_done")[0]
            return float((time.perf_counter() - begin) / (after - before))

        sampled, plain = alternate(9, lambda: seconds_of_a_step(100.0), lambda: seconds_of_a_step(0.0))
        yield compared("a step while sampled at 100 Hz", sampled, plain, unit="µs", scale=1e6, ratio=1.03)
    finally:
        run.stop(grace=1.0)
