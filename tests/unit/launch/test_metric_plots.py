"""`run.metrics.plot()`, with and without matplotlib."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from notebook_accelerate.launch.report import svg_curves
from notebook_accelerate.telemetry import MetricEvent, Store
from notebook_accelerate.telemetry.curves import plot_with
from notebook_accelerate.telemetry.store import Metrics, Record

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def drawing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plt.switch_backend("agg")
    plot_with(svg_curves.plot)  # `Run.metrics` makes this call.
    yield
    plt.close("all")


def logged(ranks: int = 2, names: tuple[str, ...] = ("loss", "accuracy"), steps: bool = True) -> Metrics:
    store = Store()
    for rank in range(ranks):
        store.add([
            Record(rank, 50.0 + i, MetricEvent(dict.fromkeys(names, i + rank), i if steps else None))
            for i in range(20)
        ])  # fmt: skip
    return Metrics(store)


def test_a_metric_has_a_line_for_each_rank() -> None:
    axes = logged()["loss"].plot()
    assert axes.get_title(loc="left") == "loss"
    assert axes.get_xlabel() == "step"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rank 0", "rank 1"]
    assert [line.get_ydata()[-1] for line in axes.lines] == [19, 20]


def test_one_rank_needs_no_legend() -> None:
    axes = logged()["loss"].rank(1).plot()
    assert axes.get_legend() is None
    assert len(axes.lines) == 1


def test_points_without_steps_are_drawn_over_seconds() -> None:
    axes = logged(steps=False)["loss"].plot()
    assert axes.get_xlabel() == "seconds"
    assert axes.lines[0].get_xdata().tolist() == [float(i) for i in range(20)]


def test_many_ranks_are_drawn_as_mean_and_range() -> None:
    axes = logged(ranks=12)["loss"].plot()
    assert axes.lines[0].get_label() == "mean and range of 12 ranks"
    assert axes.lines[0].get_ydata()[0] == pytest.approx(np.mean(range(12)))
    low, high = axes.collections[0].get_datalim(axes.transData).intervaly
    assert (low, high) == (0, 19 + 11)


def test_a_metric_is_drawn_into_given_axes() -> None:
    _, (left, right) = plt.subplots(1, 2)
    assert logged()["accuracy"].plot(right) is right
    assert (len(left.lines), len(right.lines)) == (0, 2)


def test_several_metrics_are_drawn_side_by_side() -> None:
    metrics = logged(names=("loss", "accuracy", "rate"))
    axes = metrics.plot()
    assert [each.get_title(loc="left") for each in axes.flat] == ["loss", "accuracy", "rate", ""]
    assert metrics.plot("rate").get_title(loc="left") == "rate"
    with pytest.raises(KeyError, match="no metric 'lost'; known: loss, accuracy, rate"):
        metrics.plot("lost")


def test_a_run_that_logged_nothing_has_no_plot() -> None:
    with pytest.raises(ValueError, match="there is no metric to plot: log one"):
        Metrics(Store()).plot()


def test_gaps_stay_gaps() -> None:
    store = Store()
    store.add([Record(0, i, MetricEvent({"loss": math.nan if i == 2 else 1.0}, i)) for i in range(5)])
    assert np.isnan(Metrics(store)["loss"].plot().lines[0].get_ydata()).tolist() == [False, False, True, False, False]


def test_without_matplotlib_the_images_of_reports_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "matplotlib" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    images = logged().plot()
    assert images._repr_html_().count("<img") == 2
    assert repr(images).startswith("Curve of loss: 40 points of 2 ranks")
    assert logged(ranks=12)["loss"].plot()._repr_html_().count("<img") == 1
