"""The kernel's part of the checks for common mistakes, which compares facts from ranks and returns warnings."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from notebook_accelerate.telemetry.debug_protocol import CheckEvent
from notebook_accelerate.telemetry.rank_names import rank_names

RELATIVE = 1e-4
"""Maximum relative difference of parameters that count as equal, because different devices round differently."""
COMPARE_SECONDS = 1.5
"""Seconds to wait for other ranks to report a number that is not finite, before the first ranks are named."""
BEHIND_STEPS = 20
BEHIND_SHARE = 0.1
BEHIND_SECONDS = 3.0
"""A rank is far behind after trailing the leading rank for this many seconds by 20 steps or 10 %, whichever is more."""
CONFIRMED_BATCH = 2
_SAME_DATA = (
    "every rank trains on the same data (batches 1 and 2 are equal everywhere); for data from a loader: "
    "loader = accelerator.prepare(loader); for random data: set_seed(42, device_specific=True) gives each rank its own"
)

_NUMBERS = {
    "loss": ("loss", "backward"),
    "gradients": ("gradients' norm", "clip_grad_norm_"),
    "local gradients": ("gradients (before they are averaged)", "backward"),
}
"""For each check of numbers that should be finite, how warnings name the numbers and the call that computed them."""


class SanityChecks:
    """The facts from one group of ranks, and the warnings that have already been given.

    Args:
        world: The number of ranks.
        clock: Returns the current time in seconds. Tests pass a fake clock.
    """

    def __init__(self, world: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._world, self._clock = world, clock
        self._facts: dict[tuple[str, int], dict[int, deque[list[float]]]] = {}
        self._first_batch: dict[int, list[float]] = {}
        self._numbers: dict[str, dict[int, tuple[int, float]]] = {}
        self._since: dict[str, float] = {}
        self._behind: dict[int, float] = {}
        self._warned: set[str] = set()

    def note(self, rank: int, event: CheckEvent) -> list[str]:
        """Add a fact, and return the resulting warnings."""
        if event.check == "mistake":
            return self._once(event.text, event.text)
        if event.check in _NUMBERS:
            self._numbers.setdefault(event.check, {})[rank] = (event.key, event.values[0])
            self._since.setdefault(event.check, self._clock())
            return []
        rows = self._of_all_ranks(rank, event)
        if rows is None:
            return []
        return self._parameters(event.key, rows) if event.check == "parameters" else self._batch(event.key, rows)

    def check_progress(self, steps: Mapping[int, int]) -> list[str]:
        """Return the warnings that depend on time. Call this regularly.

        Args:
            steps: The current step of each running rank.
        """
        due = [check for check, since in self._since.items() if self._clock() - since > COMPARE_SECONDS]
        return self._all_not_finite(due) + self._far_behind(steps)

    def finish(self) -> list[str]:
        """Return the remaining warnings at the end of the run."""
        return self._all_not_finite(self._since)

    def _once(self, name: str, text: str) -> list[str]:
        if name in self._warned:
            return []
        self._warned.add(name)
        return [text]

    def _of_all_ranks(self, rank: int, event: CheckEvent) -> dict[int, list[float]] | None:
        """Return a fact from all ranks if every rank has sent it, or None if it is still missing from some rank.

        Facts are queued, because a rank sends the same kind of fact again for another model or Accelerator, possibly
        before the other ranks have sent the first one.
        """
        waiting = self._facts.setdefault((event.check, event.key), {})
        waiting.setdefault(rank, deque()).append(event.values)
        if self._world < 2 or len(waiting) < self._world or not all(waiting.values()):
            return None
        return {each: values.popleft() for each, values in waiting.items()}

    def _parameters(self, step: int, rows: Mapping[int, list[float]]) -> list[str]:
        first = rows[min(rows)]
        others = [rank for rank in sorted(rows) if not _close(rows[rank], first)]
        if not others:
            return []
        who = f"parameters of {rank_names(others)} differ from those of rank {min(rows)}"
        if not step:
            fix = "build the same model on every rank: call set_seed(42) first, or load the same weights"
            return self._once("parameters", f"{who} after prepare; {fix}")
        if "parameters" in self._warned:
            return []
        fix = "ranks train independently: model = accelerator.prepare(model), and accelerator.backward(loss)"
        return self._once("parameters", f"{who} after optimizer step {step}; {fix}")

    def _batch(self, number: int, rows: dict[int, list[float]]) -> list[str]:
        if number == 1:
            self._first_batch = rows
        batches = [self._first_batch, rows]
        if number != CONFIRMED_BATCH or not all(each and _all_equal(list(each.values())) for each in batches):
            return []
        first, second = (next(iter(rows.values())) for rows in batches)
        if first == second or len(set(first[1:])) < 2:  # The data may be constant or equal on purpose.
            return []
        return self._once("batch", _SAME_DATA)

    def _all_not_finite(self, checks: Iterable[str]) -> list[str]:
        """Return the warnings of ``checks``, earliest first, because an earlier one may have caused the others."""
        ordered = sorted(checks, key=lambda check: min(key for key, _ in self._numbers[check].values()))
        return [text for check in ordered for text in self._not_finite(check)]

    def _not_finite(self, check: str) -> list[str]:
        numbers = self._numbers[check]
        first = min(key for key, _ in numbers.values())
        ranks = sorted(rank for rank, (key, _) in numbers.items() if key == first)
        del self._since[check]
        value = numbers[ranks[0]][1]
        what, where = _NUMBERS[check]
        if len(ranks) == self._world:
            return self._not_finite_anywhere(check, first, value)
        lost = {rank for rank, (key, _) in self._numbers.get("loss", {}).items() if key <= first}
        if check == "local gradients" and lost.issuperset(ranks):  # The cause is the loss, which was already reported.
            return []
        text = f"the {what} of {rank_names(ranks)} became {value} at {where} #{first}, before any other rank's; "
        return self._once(check, text + f"look at the data there: run.ask('batch', ranks={ranks})")

    def _not_finite_anywhere(self, check: str, number: int, value: float) -> list[str]:
        """Return the warning about a loss that is not finite on all ranks, unless its cause was already reported.

        The norm of gradients may overflow on all ranks while a loss scaler searches for its scale.
        """
        if check != "loss" or any(self._is_one_sided(other, number) for other in _NUMBERS):
            return []
        where = " on all ranks" if self._world > 1 else ""
        text = f"the loss became {value}{where} at backward #{number}; look at the data there: run.ask('batch')"
        return self._once(check, text)

    def _is_one_sided(self, check: str, number: int) -> bool:
        """Return whether a check's first non-finite numbers, up to call ``number``, came from only some ranks."""
        keys = [key for key, _ in self._numbers.get(check, {}).values()]
        return bool(keys) and min(keys) <= number and keys.count(min(keys)) < self._world

    def _far_behind(self, steps: Mapping[int, int]) -> list[str]:
        now = self._clock()
        ahead = max(steps.values(), default=0)
        limit = max(BEHIND_STEPS, BEHIND_SHARE * ahead)
        late = [rank for rank, step in steps.items() if ahead - step >= limit] if len(steps) == self._world else []
        self._behind = {rank: self._behind.get(rank, now) for rank in late}
        lasting = sorted(rank for rank, since in self._behind.items() if now - since >= BEHIND_SECONDS)
        if not lasting:
            return []
        worst = min(lasting, key=lambda rank: steps[rank])
        text = f"rank {worst} is {ahead - steps[worst]} steps behind (at {steps[worst]} of {ahead}); "
        return self._once("behind", text + f"run.stacks(ranks=[{worst}]) shows what it does")


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=RELATIVE, abs_tol=1e-7) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one, other, strict=True)
    )


def _all_equal(rows: Sequence[Sequence[float]]) -> bool:
    return all(row == rows[0] for row in rows)
