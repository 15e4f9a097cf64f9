"""Warm ranks, without a notebook."""

from __future__ import annotations

import time
from typing import Any

import pytest

from notebook_accelerate import LaunchConfig
from notebook_accelerate.debug import cells
from notebook_accelerate.launch.warm import WarmRanks

pytestmark = pytest.mark.usefixtures("zygote")


def test_a_cell_waits_for_a_rank_that_does_not_look_for_one_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = cells.serve

    def late(*arguments: Any) -> None:
        time.sleep(0.5)  # it has said that it runs, and does not get its turn on a busy machine
        serve(*arguments)

    monkeypatch.setattr(cells, "serve", late)
    group = WarmRanks(LaunchConfig(num_processes=1, use_port=0, start_method="fork"))
    try:
        assert group.execute("6 * 7", "<cell>").shown == {0: "42"}
    finally:
        group.stop()
