"""``test``: checks a configuration with a short training run, and prints a line for each result."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from notebook_accelerate.commands.launch import run_in_ranks
from notebook_accelerate.commands.launch_settings import add_options, launch_config
from notebook_accelerate.commands.parsers import Subparsers, add_config_file, command_parser

if TYPE_CHECKING:
    from notebook_accelerate.accelerator import Accelerator


def test_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``test``, standalone or as one of ``subparsers``."""
    parser = command_parser(
        subparsers, "test", "Check that training works with a configuration.",
        "Train a tiny model in the processes of a configuration, and check collectives, data, gradients and weights.",
    )  # fmt: skip
    add_config_file(
        parser, "Configuration file to test (default: the default file, or all devices if it does not exist)."
    )
    add_options(parser, "num_processes", "cpu")
    parser.set_defaults(func=test_command)
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Run the checks in ranks, with the settings of a configuration file.

    Raises:
        SystemExit: A check failed.
    """
    run_in_ranks(launch_config(args), check_training)
    print("training works with this configuration")


def check_training() -> None:
    """Check collectives, the data loader and training; every rank must call this.

    Raises:
        RuntimeError: A check failed.
    """
    import torch

    from notebook_accelerate.accelerator import Accelerator
    from notebook_accelerate.collectives import gather_object

    accelerator = Accelerator()
    ranks = gather_object([accelerator.process_index])
    _check(accelerator, "every process takes part in a collective", ranks == list(range(accelerator.num_processes)))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    samples = torch.randn(32, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples, samples.sum(1, keepdim=True)), 4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    losses = []
    for _ in range(5):
        seen = []
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            seen.append(accelerator.gather_for_metrics(inputs))
        found, expected = torch.cat(seen).sum(1).sort().values.cpu(), samples.sum(1).sort().values
        complete = found.shape == expected.shape and torch.allclose(found.float(), expected, atol=1e-2)
        _check(accelerator, "an epoch has every sample once", complete)
    _check(accelerator, f"the loss falls, from {losses[0]:.3f} to {losses[-1]:.3f}", losses[-1] < losses[0])
    digests = gather_object([sum(value.double().sum().item() for value in accelerator.get_state_dict(model).values())])
    _check(accelerator, "every process has the same weights", len(set(digests)) == 1)


_passed: set[str] = set()


def _check(accelerator: Accelerator, what: str, passed: bool) -> None:
    if not passed:
        raise RuntimeError(f"a check failed in process {accelerator.process_index}: {what}")
    if accelerator.is_main_process and what not in _passed:
        _passed.add(what)
        print(f"ok: {what}", flush=True)
