"""Profiles of live training runs: a sentence names each planted fault, and healthy runs get no sentence."""

from __future__ import annotations

import re

import pytest

from tests.support.nightly import rest_nightly
from tests.support.profiled_trainings import HEALTHY, PLANTED, training

SENTENCES = {
    "slow_loader": r"^rank 1's data loading takes \d+ % of each step .* num_workers=\d+ in the DataLoader would hide it",  # noqa: E501
    "unbalanced_batches": r"^rank 0 computes .* its batches have 1152 rows, the others' 192",
    "reads_of_values": r"^ranks 0, 1 take \d+ % of each step in 40\d\d calls of item\(\), .*\.item\(\)",
    "small_operations": r"^\d+ % of each step of ranks 0, 1 is [\d,]+ launches of small operations: try torch\.compile",
    "barriers": r"^ranks 0, 1 call a barrier in each step",
    "growing_graphs": r"^losses on ranks 0, 1 keeps the graph of every step: .* 1 more in each step; add loss\.detach",
    "growing_sum": r"^total_loss on ranks 0, 1 keeps the graph of every step",
    "retained_activations": r"^activations on ranks 0, 1 keeps .* MB of activations after backward",
    "full_precision": r"^100 % of the time of matrix products on ranks 0, 1 is in float32, although mixed_precision='bf16'",  # noqa: E501
    "logging_storm": r"^the printing and logging of ranks 0, 1 takes \d+ % of each step .* logger\.info",
    "checkpoint_each_step": r"^ranks 0, 1 save a checkpoint in each step, \d+ % of it .* torch\.save",
    "interpreter_lock": r"^on rank 1 the thread 'counter' takes \d+ % of the CPU time, in Python at .*(number \+= 1|while True)",  # noqa: E501
    "not_compiled": r"^no compiled code runs on ranks 0, 1, although compiled requests it",
    "slowest_rank": r"^rank 0 waits [\d.]+ ms per step for rank 1 in all_reduce #\d+ \([\d.]+ [kM]B\), which is at .*sleep",  # noqa: E501
    "outside_torch": r"^\d+ % of each step of ranks 0, 1 \([\d.]+ m?s\) is spent outside of torch's operations, mostly at .*sleep",  # noqa: E501
}

DAILY = {
    "slow_loader",
    "outside_torch",
    "growing_graphs",
    "full_precision",
    "not_compiled",
    "with_accelerator",
    "with_loader",
}


@pytest.mark.parametrize("name", rest_nightly(((name,) for name in PLANTED), daily=lambda name: name in DAILY))
def test_a_planted_fault_is_found_by_its_sentence(name: str) -> None:
    with training(PLANTED[name]) as run:
        profile = run.profile(steps=5)
    print(profile)
    assert profile.missing == {}
    assert profile.steps == 5
    (found,) = [each for each in profile.findings if each.rule == name.replace("growing_sum", "growing_graphs")]
    assert re.search(SENTENCES[name], found.sentence), found.sentence


@pytest.mark.parametrize("name", rest_nightly(((name,) for name in HEALTHY), daily=lambda name: name in DAILY))
def test_a_healthy_training_has_no_sentence(name: str) -> None:
    with training(HEALTHY[name]) as run:
        profile = run.profile(steps=5)
    print(profile)
    assert (profile.steps, profile.missing) == (5, {})
    assert [each.sentence for each in profile.findings] == []
    assert "No bottleneck found" in repr(profile)
