"""Analyse the traces of a profile: its facts, findings, tables and timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from statistics import median

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.profiling.collective_waits import Joined, find_waits, join_collectives
from notebook_accelerate.profiling.facts import ProfileFacts, RankFacts, RankReader
from notebook_accelerate.profiling.tables import (
    Line,
    LineSeconds,
    OpTime,
    SampledLines,
    Where,
    line_table,
    op_table,
)
from notebook_accelerate.profiling.timeline import Merger, Timeline
from notebook_accelerate.profiling.trace import RankTrace
from notebook_accelerate.telemetry.rank_names import rank_names

LEAST_SHARE = 0.1
"""The minimum share of a step that a finding must cost to be reported."""
LEAST_LOADER, LEAST_WAIT, LEAST_SMALL = 0.15, 0.2, 0.4
LEAST_SECONDS = 0.0005
MANY_ITEMS, MANY_OPS, MANY_KERNELS = 16, 300, 500


class Analysis:
    """The results of analysing one profile's traces, each computed on first access.

    Args:
        traces: The trace of each rank.
        clocks: By rank, the seconds to add to the rank's system time to get the run's time.
        where: Returns the location of a frame.
    """

    def __init__(self, traces: Sequence[RankTrace], clocks: Mapping[int, float], where: Where) -> None:
        self.traces = sorted(traces, key=lambda trace: trace.rank)
        self._clocks = {trace.rank: trace.base + clocks.get(trace.rank, 0.0) for trace in self.traces}
        self._where = where

    @cached_property
    def samples(self) -> dict[int, SampledLines]:
        """The stack samples of each rank."""
        return {trace.rank: SampledLines(trace, self._where) for trace in self.traces}

    @cached_property
    def joined(self) -> list[Joined]:
        """The collectives, matched across ranks."""
        return join_collectives(self.traces, self._clocks)

    @cached_property
    def facts(self) -> ProfileFacts:
        """The facts of all ranks, which the rules turn into findings."""
        ranks = [RankReader(trace, self.samples[trace.rank]).read() for trace in self.traces]
        by_rank = {trace.rank: trace for trace in self.traces}
        waits = find_waits(by_rank, self._clocks, self.samples, self.joined)
        return ProfileFacts(ranks, waits, max((trace.world for trace in self.traces), default=0))

    @cached_property
    def findings(self) -> list[Finding]:
        """The findings, starting with those that cost the most time."""
        return apply_rules(self.facts)

    @cached_property
    def ops(self) -> list[OpTime]:
        """The operations, ordered by their own time."""
        return op_table(self.traces)

    @cached_property
    def lines(self) -> list[LineSeconds]:
        """The lines of the user's code, ordered by time."""
        return line_table(self.traces, self.samples)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of all ranks on one clock."""
        return Merger(self.traces, self._clocks, self.samples).merge(self.joined)


# ---- rules turn facts into findings; a rule that is not certain reports nothing


@dataclass(frozen=True)
class Finding:
    """A problem that a rule found in a profile.

    Attributes:
        rule: The name of the rule, such as "slow_loader".
        sentence: A sentence that describes the problem and a remedy.
        ranks: The affected ranks.
        lines: The lines of the user's code that cause the problem, if known.
        seconds: The time per step that the problem costs, or 0.0 if it concerns memory.
    """

    rule: str
    sentence: str
    ranks: tuple[int, ...]
    lines: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        return self.sentence


def apply_rules(facts: ProfileFacts) -> list[Finding]:
    """Return the findings, starting with those that cost the most time."""
    ranks = [each for each in facts.ranks if each.steps and each.step > 0]
    found = [finding for rule in RULES for finding in rule(ranks)]
    reading = {rank for each in found if each.rule == "reads_of_values" for rank in each.ranks}
    # The operations between two reads are small too, but the user should change the reads.
    found = [each for each in found if each.rule != "small_operations" or not reading.issuperset(each.ranks)]
    found += slowest_rank(ranks, facts, found)
    found += outside_torch(ranks, found)
    return sorted(found, key=lambda finding: -finding.seconds)


def slow_loader(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report ranks that wait for their DataLoader."""

    def costly(each: RankFacts) -> bool:
        waiting = min(each.loader, each.idle)
        if each.loader_processes:
            # On a busy machine, these processes lack CPU time as much as the main thread does. Leave that part out.
            waiting *= each.running / each.step
        return waiting >= max(LEAST_LOADER * each.step, LEAST_SECONDS)

    found = []
    slow = [each for each in ranks if costly(each)]
    for group in _alike(slow, lambda each: each.loader / each.step):
        first = max(group, key=lambda each: each.loader)
        rest = max(first.step - first.loader, 0.05 * first.step)
        workers = min(64, ceil(first.loader / rest))
        if first.loader_processes:
            # The processes deliver one batch per step. To hide the loading, they must do so in the rest of a step.
            more = ceil(10 * first.step / rest) / 10
            remedy = f"its worker processes do not keep up; about {more:g} times as many would"
        else:
            remedy = f"num_workers={workers} in the DataLoader would hide it"
        text = (
            f"{_of(group, 'data loading')} takes {_percent(first.loader / first.step)} of each step "
            f"({_time(first.loader)}); {remedy}"
        )
        found.append(Finding("slow_loader", text, _numbers(group), (), min(first.loader, first.idle)))
    return found


def unbalanced_batches(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report the slowest rank if larger batches make it compute longer than the others."""
    if len(ranks) < 2 or any(each.ops == 0 for each in ranks):
        return []
    slowest = max(ranks, key=lambda each: each.compute)
    others = [each for each in ranks if each is not slowest]
    usual = median(each.compute for each in others)
    if slowest.compute - usual < LEAST_SHARE * slowest.step or slowest.compute < 1.25 * usual:
        return []
    rows = median(each.rows for each in others)
    if not slowest.rows or slowest.rows < 1.15 * rows:
        return []
    text = (
        f"rank {slowest.rank} computes {_time(slowest.compute)} per step, {_others(others)} {_time(usual)}: its "
        f"batches have {slowest.rows:.0f} rows, the others' {rows:.0f}; give all ranks batches of one size"
    )
    return [Finding("unbalanced_batches", text, (slowest.rank,), (), slowest.compute - usual)]


def slowest_rank(ranks: Sequence[RankFacts], facts: ProfileFacts, others: Sequence[Finding]) -> list[Finding]:
    """Report a slow rank if other rules explain less than half of the waiting time.

    The barrier rule does not count, because a barrier is the place where ranks wait, and not the reason why they wait.
    """
    causes = [each for each in others if each.rule != "barriers"]
    found = []
    for wait in facts.waits:
        known = {each.rank: each for each in ranks}
        culprit = known.get(wait.culprit)
        longest = max(wait.seconds.values(), default=0.0)
        if culprit is None:
            continue
        # A single slow step proves nothing, even for a rank that is often last: of two ranks, one is last in at least
        # two of any three steps. A rank that lacks CPU time may be late for that reason. Leave that part out.
        certain = min(wait.usual, longest) * culprit.running / culprit.step
        if certain < max(LEAST_WAIT * culprit.step, 2 * LEAST_SECONDS):
            continue
        if any(wait.culprit in each.ranks and each.seconds >= 0.5 * longest for each in causes):
            continue
        if wait.line is None and wait.computing < 0.5:
            continue  # The trace does not show the rank's work.
        line = (wait.line.text(),) if wait.line is not None else ()
        doing = f", which is at {wait.line.text()}" if wait.line is not None else ", which computes"
        waiting = sorted(wait.seconds)
        every = len(waiting) == len(ranks) - 1 > 1 and len(ranks) >= facts.world
        names = "all other ranks wait" if every else _waiting(waiting)
        text = f"{names} {_time(longest)} per step for rank {wait.culprit} in {wait.label}{doing}"
        found.append(Finding("slowest_rank", text, (wait.culprit,), line, longest))
    return found


def outside_torch(ranks: Sequence[RankFacts], others: Sequence[Finding]) -> list[Finding]:
    """Report time outside of torch's operations, unless other rules explain at least half of it."""

    def cost(each: RankFacts) -> float:
        # A thread that lacks CPU time may be interrupted anywhere. Leave that part out.
        return min(each.outside * each.running / each.step, each.idle)

    def explained(each: RankFacts) -> bool:
        return any(each.rank in other.ranks and other.seconds >= 0.5 * cost(each) for other in others)

    found = []
    slow = [each for each in ranks if cost(each) >= max(LEAST_WAIT * each.step, LEAST_SECONDS) and not explained(each)]
    for group in _alike(slow, lambda each: cost(each) / each.step):
        first = max(group, key=cost)
        text = (
            f"{_percent(first.outside / first.step)} of each step of {_names(group)} ({_time(first.outside)}) is spent "
            f"outside of torch's operations, mostly{_at(first.outside_line)}; move this work out of the training loop"
        )
        found.append(Finding("outside_torch", text, _numbers(group), _lines([first.outside_line]), cost(first)))
    return found


def reads_of_values(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report frequent calls of ``item()``, or calls that wait for the device."""

    def cost(each: RankFacts) -> float:
        return min(each.synchronizing, each.idle) if each.kernels else each.item_seconds

    def costly(each: RankFacts) -> bool:
        often = each.items >= 1 if each.kernels else each.items >= MANY_ITEMS
        return often and cost(each) >= LEAST_SHARE * each.running

    if not any(costly(each) for each in ranks):
        return []
    found = []
    for group in _together([each for each in ranks if each.items >= (1 if each.kernels else MANY_ITEMS)]):
        first = max(group, key=cost)
        many = f"{first.items:.0f} calls" if first.items >= 1.5 else "1 call"
        waits = "waiting for the device" if first.kernels else "each of which stops the training for one number"
        text = (
            f"{_names(group)} {'takes' if len(group) == 1 else 'take'} {_percent(cost(first) / first.running)} of each "
            f"step in {many} of item(), {waits}{_at(first.item_line)}; keep the tensors, and read them "
            "once per epoch or every 100 steps"
        )
        found.append(Finding("reads_of_values", text, _numbers(group), _lines([first.item_line]), cost(first)))
    return found


def small_operations(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report ranks that spend most of a step launching small operations."""

    def many(each: RankFacts) -> bool:
        if each.kernels:
            return each.kernels >= MANY_KERNELS and each.kernel_seconds / each.kernels < 10e-6
        return each.small_ops >= MANY_OPS and each.small_ops >= 0.7 * each.ops

    def costly(each: RankFacts) -> bool:
        if each.kernels:
            return each.kernel_seconds < 0.5 * each.step
        return each.small_seconds >= LEAST_SMALL * each.running

    found = []
    launching = [each for each in ranks if many(each) and not each.compiled]
    for group in _together(launching if any(costly(each) for each in launching) else []):
        first = max(group, key=lambda each: each.small_seconds)
        count, seconds, whole = (
            (first.kernels, first.step - first.kernel_seconds, first.step)
            if first.kernels
            else (first.small_ops, first.small_seconds, first.running)
        )
        text = (
            f"{_percent(seconds / whole)} of each step of {_names(group)} is {count:,.0f} launches of small "
            f"{'kernels' if first.kernels else 'operations'}: try torch.compile, or larger batches"
        )
        found.append(Finding("small_operations", text, _numbers(group), (), seconds))
    return found


def barriers(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report barriers that ranks call in each step.

    The smallest time of all ranks is reported. The last rank to enter does not wait for others, so its time is the cost
    of the barrier itself.
    """
    group = [each for each in ranks if each.barriers >= 0.9 and each.barrier_seconds >= 0.01 * each.step]
    if not group:
        return []
    first = min(group, key=lambda each: each.barrier_seconds)
    number = "a barrier" if first.barriers < 1.5 else f"{first.barriers:.0f} barriers"
    line = next((each.barrier_line for each in group if each.barrier_line is not None), None)
    text = (
        f"{_names(group)} {'calls' if len(group) == 1 else 'call'} {number} in each step"
        f"{_at(line)}, {_time(first.barrier_seconds)}: the all_reduce of the gradients already waits for all "
        "ranks; remove the barrier"
    )
    return [Finding("barriers", text, _numbers(group), _lines([line]), first.barrier_seconds)]


def growing_graphs(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report variables that hold more tensors with their graphs after each step."""
    found = []
    for name in dict.fromkeys(name for each in ranks for name, _, _ in each.grown):
        group = [each for each in ranks if any(name == other for other, _, _ in each.grown)]
        count, growth = next((count, growth) for other, count, growth in group[0].grown if other == name)
        memory = f", {size_text(group[0].memory_growth)} per step" if group[0].memory_growth else ""
        each = growth / max(1, group[0].steps)
        text = (
            f"{name} on {rank_names(list(_numbers(group)))} keeps the graph of every step: {count:,} tensors or nodes, "
            f"{each:.0f} more in each step{memory}; add loss.detach() or loss.item() to it instead"
        )
        found.append(Finding("growing_graphs", text, _numbers(group), (name,)))
    return found


def retained_activations(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report variables that keep activations between steps."""
    found = []
    for name in dict.fromkeys(name for each in ranks for name, _ in each.retained):
        group = [each for each in ranks if any(name == other for other, _ in each.retained)]
        size = max(size for each in group for other, size in each.retained if other == name)
        if size >= 1 << 20:
            text = (
                f"{name} on {rank_names(list(_numbers(group)))} keeps {size_text(size)} of activations after backward, "
                "through the next step: store detached copies, or delete it; the graph is freed only without "
                "retain_graph=True"
            )
            found.append(Finding("retained_activations", text, _numbers(group), (name,)))
    return found


def full_precision(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report matrix products in float32 even though a reduced precision was requested."""

    def wrong(each: RankFacts) -> bool:
        whole = sum(each.matrix.values())
        asked = each.asked.get("mixed_precision") in ("bf16", "fp16", "fp8")
        return asked and whole >= 0.02 * each.step and each.matrix.get("float", 0.0) >= 0.5 * whole

    found = []
    for group in _together([each for each in ranks if wrong(each)]):
        first = group[0]
        share = first.matrix["float"] / sum(first.matrix.values())
        text = (
            f"{_percent(share)} of the time of matrix products on {rank_names(list(_numbers(group)))} is in float32, "
            f"although mixed_precision={first.asked['mixed_precision']!r} was requested: call the model that prepare() "
            "returned, or use accelerator.autocast()"
        )
        found.append(Finding("full_precision", text, _numbers(group), (), first.matrix["float"]))
    return found


def logging_storm(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report printing and logging that take much of each step."""
    found = []
    for group in _together([each for each in ranks if min(each.logging, each.idle) >= LEAST_SHARE * each.step]):
        first = max(group, key=lambda each: each.logging)
        text = (
            f"{_of(group, 'printing and logging')} takes {_percent(first.logging / first.step)} of each step "
            f"({_time(first.logging)}){_at(first.logging_line)}; write less often"
        )
        found.append(Finding("logging_storm", text, _numbers(group), _lines([first.logging_line]), first.logging))
    return found


def checkpoint_each_step(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report checkpoints that are saved in each step."""

    def saves(each: RankFacts, share: float, steps: float) -> bool:
        return min(each.saving, each.idle) >= share * each.step and each.steps > 1 and each.saving_steps >= steps

    found = []
    surely = any(saves(each, LEAST_SHARE, 0.66) for each in ranks)
    for group in _together([each for each in ranks if surely and saves(each, LEAST_SHARE / 2, 0.34)]):
        first = max(group, key=lambda each: each.saving)
        text = (
            f"{_names(group)} {'saves' if len(group) == 1 else 'save'} a checkpoint in each step, "
            f"{_percent(first.saving / first.step)} of it ({_time(first.saving)}){_at(first.saving_line)}; save every "
            "few hundred steps"
        )
        found.append(Finding("checkpoint_each_step", text, _numbers(group), _lines([first.saving_line]), first.saving))
    return found


def interpreter_lock(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report a Python thread that holds the interpreter lock for much of the time."""
    found = []
    for each in ranks:
        busy = [row for row in each.threads if row[1] >= 0.25 and not row[2].place.startswith("<")]
        if not busy or each.blocked < LEAST_WAIT:
            continue
        name, share, line = max(busy, key=lambda row: row[1])
        text = (
            f"on rank {each.rank} the thread {name!r} takes {_percent(share)} of the CPU time, in Python at "
            f"{line.text()}: "
            "it holds the interpreter lock, and the training waits; move its work to a process"
        )
        found.append(Finding("interpreter_lock", text, (each.rank,), (line.text(),), min(share, 1.0) * each.step))
    return found


def not_compiled(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Report that no compiled code runs even though compilation was requested."""
    group = [each for each in ranks if each.asked.get("compiled") and not each.compiled and each.ops + each.kernels]
    if not group:
        return []
    asked = group[0].asked["compiled"]
    text = (
        f"no compiled code runs on {rank_names(list(_numbers(group)))}, although {asked} requests it: call the "
        "compiled model, not the original; set TORCH_LOGS=recompiles,graph_breaks to log other causes"
    )
    return [Finding("not_compiled", text, _numbers(group), (asked,))]


RULES: tuple[Callable[[Sequence[RankFacts]], list[Finding]], ...] = (
    slow_loader, unbalanced_batches, reads_of_values, small_operations, barriers, growing_graphs,
    retained_activations, full_precision, logging_storm, checkpoint_each_step, interpreter_lock, not_compiled,
)  # fmt: skip


# ---- the words of findings


def _numbers(group: Iterable[RankFacts]) -> tuple[int, ...]:
    return tuple(each.rank for each in group)


def _together(group: list[RankFacts]) -> list[list[RankFacts]]:
    return [group] if group else []


def _alike(group: list[RankFacts], of: Callable[[RankFacts], float]) -> list[list[RankFacts]]:
    """Return groups of ranks for which ``of`` returns similar numbers."""
    groups: list[list[RankFacts]] = []
    for each in sorted(group, key=lambda one: -of(one)):
        if groups and of(groups[-1][0]) < 1.5 * of(each):
            groups[-1].append(each)
        else:
            groups.append([each])
    return [sorted(each, key=lambda one: one.rank) for each in groups]


def _names(group: Sequence[RankFacts]) -> str:
    return rank_names([each.rank for each in group])


def _of(group: Sequence[RankFacts], what: str) -> str:
    return f"{_names(group)}'s {what}" if len(group) == 1 else f"the {what} of {_names(group)}"


def _waiting(ranks: list[int]) -> str:
    return f"{rank_names(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _others(others: Sequence[RankFacts]) -> str:
    return f"rank {others[0].rank}" if len(others) == 1 else "the other ranks"


def _at(line: Line | None) -> str:
    return f" at {line.text()}" if line is not None else ""


def _lines(lines: Iterable[Line | None]) -> tuple[str, ...]:
    return tuple(line.text() for line in lines if line is not None)


def _percent(share: float) -> str:
    return f"{100 * min(share, 1.0):.0f} %"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.3g} ms"
