"""Prompts of several ranks that are stopped at breakpoints at the same time."""

from __future__ import annotations

import re

import pytest

from tests.notebook.conftest import Answers
from tests.support.kernel import Kernel
from tests.support.launching import PAST_THE_CALL

pytestmark = pytest.mark.notebook

FUNCTIONS = """
def both_stop():
    loss = rank() + 0.5
    breakpoint()
    return loss

def stop_before_a_barrier():
    group()
    dist.barrier()
    if rank() == 1:
        time.sleep(0.5)
    breakpoint()
    dist.barrier()
    return 1

def asks():
    group()
    name = input("who? ") if rank() == 1 else ""
    dist.barrier()
    return name
"""


@pytest.fixture(scope="module", autouse=True)
def _functions(kernel: Kernel) -> None:
    kernel.check(FUNCTIONS)


@pytest.fixture(autouse=True)
def _no_answers_left(answers: Answers) -> None:
    answers.waiting.clear()
    answers.asked.clear()


def test_the_prompt_stays_with_a_rank_until_it_continues_or_the_user_switches(kernel: Kernel, answers: Answers) -> None:
    answers.waiting[:] = ["p loss", "rank 1", "p loss", "rank 7", "p loss", "c", "p loss", "c"]
    kernel.check("run = launch(both_stop, block=False)")
    kernel.until("run._internals.commands.prompts.debugged() == [0, 1]", 100)
    cell = kernel.check("run.debug(rank=0); run.wait(100)")
    assert answers.asked == [f"[rank {rank}] ipdb> " for rank in (0, 0, 1, 1, 1, 1, 0, 0)]
    assert kernel.value("run.results") == [0.5, 1.5]
    assert re.findall(r"\[rank (\d)\] (\d\.5)", cell.plain) == [("0", "0.5"), ("1", "1.5"), ("1", "1.5"), ("0", "0.5")]
    assert "(rank 1 stopped too: type rank 1 to switch)" in cell.plain
    assert "rank 7 is not stopped in a debugger; stopped: ranks 0, 1" in cell.plain


def test_a_command_that_waits_for_another_stopped_rank_gives_way_to_its_prompt(
    kernel: Kernel, answers: Answers
) -> None:
    answers.waiting[:] = [*PAST_THE_CALL, "n", "c", "c"]
    kernel.check("run = launch(stop_before_a_barrier)")
    assert answers.asked[len(PAST_THE_CALL) :][:2] == ["[rank 0] ipdb> ", "[rank 1] ipdb> "]
    assert kernel.value("run.results") == [1, 1]


def test_without_a_rank_the_first_one_waiting_for_input_is_shown(kernel: Kernel, answers: Answers) -> None:
    answers.waiting[:] = ["Ada"]
    kernel.check("run = launch(asks, block=False)")
    kernel.until("run.prompts == (1,)", 100)
    kernel.check("run.debug(); run.wait(100)")
    assert answers.asked == ["[rank 1] who? "]
    assert kernel.value("run.results") == ["", "Ada"]
