"""Public notebooks that were ported to this package run from top to bottom, and their last cells check the training."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.examples import run_all
from tests.support.kernel import ROOT
from tests.support.launching import ready_kernel
from tests.support.nightly import rest_nightly

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="no trl: make test-clients"),
    pytest.mark.timeout(900),  # This only guards against hangs.
]
DAILY = ("simple_nlp_example", "trl_sft_lora")
PORTED = rest_nightly(
    [(path,) for path in sorted((ROOT / "examples" / "ported").glob("*.ipynb"))], lambda path: path.stem in DAILY
)


@pytest.mark.parametrize("path", PORTED, ids=lambda path: path.stem)
def test_a_ported_notebook_trains_and_leaves_its_report(path: Path) -> None:
    with ready_kernel(env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}) as kernel:
        cells = run_all(kernel, path)
        assert " is complete: " in cells[-1].stdout
        reports = [data for cell in cells for data in cell.displays if "Succeeded" in data.get("text/html", "")]
        assert reports, "the panel left no report"
        assert kernel.value("[info.state for info in run.ranks]") == ["succeeded"] * 2
        assert kernel.value("sorted({int(rank) for rank in run.metrics['loss'].ranks})") == [0, 1]
