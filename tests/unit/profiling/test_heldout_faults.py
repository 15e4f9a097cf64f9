"""Profiles name each planted fault, and nothing else, in training runs that were not used to develop the rules."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.heldout_healthy import HEALTHY
from tests.support.heldout_trainings import PLANTED, Planted
from tests.support.nightly import rest_nightly
from tests.support.profiled_trainings import training

DAILY = {"slow_reader", "history_with_graphs", "attribute_not_called", "language_model", "loop_with_hooks"}


def _cases(rows: list[tuple[object, ...]], names: list[str]) -> list[object]:
    cells = rest_nightly(((*row, name) for row, name in zip(rows, names, strict=True)), lambda *row: row[-1] in DAILY)
    return [pytest.param(*cell.values[:-1], id=cell.values[-1], marks=cell.marks) for cell in cells]


@pytest.mark.parametrize("planted", _cases([(each,) for each in PLANTED], [each.train.__name__ for each in PLANTED]))
def test_a_fault_is_named_and_nothing_else(planted: Planted) -> None:
    with training(planted.train, planted.ranks) as run:
        profile = run.profile()
    print(profile)
    assert profile.missing == {}
    naming = [each for each in profile.findings if each.rule in planted.rules]
    assert [each for each in naming if re.search(planted.sentence, each.sentence)], "no finding names it"
    assert {rank for each in naming for rank in each.ranks} == set(planted.about)
    assert [each.sentence for each in profile.findings if each.rule not in planted.rules] == []


@pytest.mark.parametrize(("train", "ranks"), _cases(list(HEALTHY), [train.__name__ for train, _ in HEALTHY]))
def test_a_healthy_training_has_no_findings(train: Callable[[], None], ranks: int) -> None:
    with training(train, ranks) as run:
        profile = run.profile()
    print(profile)
    assert profile.missing == {}
    assert [each.sentence for each in profile.findings] == []
