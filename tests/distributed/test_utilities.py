"""Two ranks: communication hooks, ordered logging, seeds, and distributed parameters."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_accelerate.config.enums import DDPCommunicationHookType
from notebook_accelerate.config.kwargs_handlers import DistributedDataParallelKwargs
from notebook_accelerate.logging import get_logger
from notebook_accelerate.state import PartialState
from notebook_accelerate.utils import model_has_dtensor, set_seed, tqdm
from tests.support.ranks import run_ranks

EXACT = torch.tensor([[0.5, 0.5, 0.5, 0.5]] * 4)


def gradient_with_hook(hook: str, wrapper: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2} if "power" in hook else {}
    kwargs = DistributedDataParallelKwargs(
        gradient_as_bucket_view=True,
        comm_hook=DDPCommunicationHookType(hook),
        comm_wrapper=DDPCommunicationHookType(wrapper),  # type: ignore[arg-type]
        comm_state_option=options,
    )
    wrapped = nn.parallel.DistributedDataParallel(model, **kwargs.to_kwargs())
    kwargs.register_comm_hook(wrapped)
    for _ in range(4):
        model.zero_grad()
        # Each rank's gradient consists of its rank number. The mean over two ranks is 0.5, exact in every format.
        wrapped(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.tolist()


@pytest.mark.parametrize(
    ("hook", "wrapper"),
    [("no", "no"), ("fp16", "no"), ("power_sgd", "no"), ("batched_power_sgd", "no"), ("power_sgd", "fp16")],
)
def test_every_communication_hook_gives_the_mean_gradient(hook: str, wrapper: str) -> None:
    for gradient in run_ranks(gradient_with_hook, hook, wrapper, process_group=True):
        torch.testing.assert_close(torch.tensor(gradient), EXACT, rtol=1e-2, atol=1e-2)


def bf16_hook_error(wrapper: str) -> str:
    hook = "power_sgd" if wrapper != "no" else "bf16"
    kwargs = DistributedDataParallelKwargs(comm_hook=hook, comm_wrapper=wrapper)  # type: ignore[arg-type]
    try:
        kwargs.register_comm_hook(nn.parallel.DistributedDataParallel(nn.Linear(1, 1)))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch allows bf16 hooks")
@pytest.mark.parametrize("wrapper", ["no", "bf16"])
def test_an_unsupported_hook_names_the_alternative(wrapper: str) -> None:
    for message in run_ranks(bf16_hook_error, wrapper, process_group=True):
        assert "does not work here: BF16" in message
        assert "pass comm_hook='fp16' or 'power_sgd'" in message


def hook_rounds() -> float:
    """Return the gradient with an fp16 hook. Only fp16 rounds it, which shows that the hook is registered."""
    model = nn.Linear(1, 1, bias=False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16).register_comm_hook(wrapped)
    wrapped(torch.tensor([[1.0001]])).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.item()


def test_the_hook_is_registered() -> None:
    assert run_ranks(hook_rounds, process_group=True) == [1.0, 1.0]


def log_lines() -> str:
    out = io.StringIO()
    logger = get_logger("ranks")
    logger.logger.addHandler(logging.StreamHandler(out))
    logger.logger.setLevel(logging.INFO)
    PartialState()
    logger.info("main")
    logger.info("all", main_process_only=False)
    logger.info("ordered", main_process_only=False, in_order=True)
    return out.getvalue()


def test_the_main_rank_logs_by_default() -> None:
    assert run_ranks(log_lines) == [
        "[RANK 0] main\n[RANK 0] all\n[RANK 0] ordered\n",
        "[RANK 1] all\n[RANK 1] ordered\n",
    ]


def order_of_logging() -> list[float]:
    import time

    times: list[float] = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            times.append(time.monotonic())
            time.sleep(0.2 if PartialState().is_main_process else 0.0)
            times.append(time.monotonic())

    logger = get_logger("order")
    logger.logger.addHandler(Slow())
    PartialState()
    logger.warning("in turn", main_process_only=False, in_order=True)
    return times


def test_ranks_that_log_in_order_wait_for_each_other() -> None:
    first, second = run_ranks(order_of_logging)
    assert first[1] <= second[0]


def draws() -> tuple[list[float], list[float]]:
    PartialState()
    set_seed(11)
    same = torch.rand(2).tolist()
    set_seed(11, device_specific=True)
    return same, torch.rand(2).tolist()


def test_seeds_are_shared_or_per_rank() -> None:
    (same, own), (other_same, other_own) = run_ranks(draws)
    assert same == other_same == own
    assert own != other_own


def distributed_parameters() -> tuple[bool, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = nn.Linear(4, 4)
    before = model_has_dtensor(model)
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    return before, model_has_dtensor(model)


def test_distributed_parameters_are_detected() -> None:
    assert run_ranks(distributed_parameters, process_group=True) == [(False, True)] * 2


def bars() -> Any:
    PartialState()
    out = io.StringIO()
    list(tqdm(range(2), file=out))
    return "2/2" in out.getvalue()


def test_each_machine_shows_one_bar() -> None:
    pytest.importorskip("tqdm")
    assert run_ranks(bars) == [True, False]
