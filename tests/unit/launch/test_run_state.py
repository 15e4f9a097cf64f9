"""The journal and its fold: every order of events respects the tables of transitions, and reaches an end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from notebook_accelerate import Run, WorkerError, notebook_launcher
from notebook_accelerate.launch.run import rebuild
from notebook_accelerate.launch.state import run_events as events
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.run_events import RUN, RunEvent
from notebook_accelerate.launch.state.run_state import (
    ATTEMPT_TRANSITIONS,
    ENDED,
    PROMPT_TRANSITIONS,
    RANK_TRANSITIONS,
    RUN_TRANSITIONS,
    STOP_TRANSITIONS,
    RunState,
    TransitionError,
)
from notebook_accelerate.telemetry import LogEvent, MetricEvent, RankFailure
from notebook_accelerate.telemetry.store import Record
from tests.support.runs import START, make_run, plan_run

RANKS = 3
PLAN = plan_run(RANKS).plan
RANK = st.integers(0, RANKS - 1)
FAILURE = st.builds(RankFailure, RANK, st.just("exception"), st.just(1.0), st.just("KeyError: 1"))
EVENT = st.one_of(
    st.builds(events.RunCreated, st.just("train")),
    st.builds(events.NoteAdded, st.sampled_from(["a", "b"])),
    st.builds(events.WarningAdded, st.sampled_from(["a", "b"])),
    st.builds(events.SavingChanged, st.sampled_from(["", "no space"])),
    st.builds(events.AttemptStarted, st.integers(0, 3)),
    st.builds(events.RankStarted, RANK, st.integers(1, 9)),
    st.builds(events.RankRunning, RANK),
    st.builds(events.RankReturned, RANK, st.integers()),
    st.builds(events.RankFailed, FAILURE),
    st.builds(events.RankStopped, RANK),
    st.builds(events.RankExited, RANK, st.sampled_from(ENDED), st.just("exit 0")),
    st.builds(events.PromptOpened, RANK, st.integers(1, 9), st.sampled_from(["input", "debugger"])),
    st.builds(events.PromptClosed, RANK, st.booleans()),
    st.builds(events.StopAdvanced, st.sampled_from(sorted(STOP_TRANSITIONS)), st.sampled_from(["", "it was stopped"])),
    st.builds(events.FailuresRecorded, st.lists(FAILURE, max_size=2)),
    st.builds(events.AttemptEnded, st.just("ended"), st.booleans()),
    st.builds(events.RunEnded, st.sampled_from(ENDED)),
    st.builds(events.RanksReleased),
    st.builds(events.RunPlanned, st.just(PLAN), st.just(0), st.just(RANKS)),
)
TABLES: Mapping[str, Mapping[str, frozenset[str]]] = {
    "run": RUN_TRANSITIONS,
    "attempt": ATTEMPT_TRANSITIONS,
    "stop": STOP_TRANSITIONS,
    "rank": RANK_TRANSITIONS,
    "prompt": PROMPT_TRANSITIONS,
}
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def statuses(state: RunState) -> dict[tuple[str, int], str]:
    """Return the current state of everything that has a table of transitions."""
    found = {("run", 0): state.status, ("attempt", 0): state.attempt_status, ("stop", 0): state.stop_phase}
    found |= {("rank", info.rank): info.state for info in state.ranks}
    return found | {("prompt", info.rank): "open" if info.rank in state.prompts else "none" for info in state.ranks}


def check_step(before: RunState, after: RunState, event: RunEvent) -> None:
    """Check that every change is a transition in its table. A new attempt may start from the beginning."""
    if isinstance(event, (events.RunPlanned, events.AttemptStarted)):
        assert {info.state for info in after.ranks} == {"starting"}
        return
    if isinstance(event, events.AttemptEnded) and event.restarts:
        assert after.stop_phase == "none"
        after = replace(after, stop_phase=before.stop_phase)
    old, new = statuses(before), statuses(after)
    for (kind, rank), status in new.items():
        if old[kind, rank] != status:
            assert status in TABLES[kind][old[kind, rank]], (kind, rank, event)
    assert after.starting == sum(info.state == "starting" for info in after.ranks)


def folded(found: list[RunEvent], state: RunState) -> tuple[RunState, list[RunEvent]]:
    """Apply the events that are valid. Return the state and the applied events."""
    applied: list[RunEvent] = []
    for number, event in enumerate(found):
        before = state
        try:
            state = state.apply(event, START + number)
        except TransitionError:
            assert state is before
            continue
        check_step(before, state, event)
        applied.append(event)
    return state, applied


@SETTINGS
@given(st.lists(EVENT, max_size=60))
def test_no_order_of_events_makes_a_transition_outside_the_tables(found: list[RunEvent]) -> None:
    for state in (RunState(), plan_run(RANKS)._internals.journal.state, make_run(RANKS)._internals.journal.state):
        folded(found, state)


@SETTINGS
@given(st.lists(EVENT, max_size=40))
def test_the_same_journal_gives_the_same_state(found: list[RunEvent]) -> None:
    state, applied = folded(found, RunState())
    again, same = folded(applied, RunState())
    assert len(same) == len(applied)
    assert len(again.notes) == len(state.notes)
    assert statuses(again) == statuses(state)


def closing(state: RunState) -> list[RunEvent]:
    """Return the events with which a supervisor ends a run from any state. All ranks are reaped first."""
    found: list[RunEvent] = []
    if state.attempt_status == "running" or state.held:
        found += [events.PromptClosed(rank, answered=False) for rank in state.prompts]
        for info in state.ranks:
            if not info.exited:
                found.append(events.RankExited(info.rank, info.state if info.state in ENDED else "stopped", "SIGKILL"))
    if state.attempt_status == "running":
        found.append(events.AttemptEnded("stopped"))
    if state.ended is None:
        found.append(events.RunEnded("stopped", "RunStoppedError", "it was stopped"))
    elif state.held:
        found.append(events.RanksReleased())
    return found


@SETTINGS
@given(st.lists(EVENT, max_size=60))
def test_a_run_reaches_its_end_from_every_state(found: list[RunEvent]) -> None:
    state, _ = folded(found, plan_run(RANKS)._internals.journal.state)
    for event in closing(state):
        state = state.apply(event, START)
    if state.held:  # The run was about to hold its ranks when it ended.
        for event in closing(state):
            state = state.apply(event, START)
    assert state.status in ENDED
    assert state.ended is not None
    assert not state.held


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_the_tables_name_only_their_own_states(table: Mapping[str, frozenset[str]]) -> None:
    assert {after for row in table.values() for after in row} <= set(table)


def test_an_invalid_event_does_not_change_the_journal() -> None:
    journal = make_run()._internals.journal
    before, count = journal.state, len(journal.records)
    with pytest.raises(TransitionError, match="'running' cannot become 'running'"):
        journal.append(events.RankRunning(0))
    with pytest.raises(TransitionError, match="is not an event of a run"):
        journal.append(LogEvent("stdout", "x"))  # type: ignore[arg-type]
    assert journal.state is before
    assert len(journal.records) == count


def recorded(function: Any, **options: Any) -> tuple[Run, list[Record]]:
    """Launch a function. Return the run, and every event that the listeners of its journal received."""
    records: list[Record] = []
    subscribe = Journal.__init__

    def listening(journal: Journal) -> None:
        subscribe(journal)
        journal.subscribe(records.extend)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "__init__", listening)
        try:
            run = notebook_launcher(function, use_port=0, **options)
        except WorkerError as error:
            run = error.run  # type: ignore[assignment]
    assert run is not None
    return run, records


def trained() -> int:
    from notebook_accelerate.telemetry import emit

    rank = int(os.environ["RANK"])
    print("line of rank", rank)
    for step in range(20):
        emit(MetricEvent({"loss": 1.0 / (step + 1) + rank}, step))
    return rank


def failing() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("missing")


@pytest.mark.parametrize(
    ("function", "method", "count"), [(trained, "fork", 2), (failing, "fork", 2), (trained, "inline", 1)]
)
def test_a_run_is_rebuilt_from_its_journal(function: Any, method: str, count: int) -> None:
    run, records = recorded(function, num_processes=count, start_method=method)
    again = rebuild(run.config, run.function_name, records)
    assert again._internals.journal.state == run._internals.journal.state
    assert again.logs() == run.logs()
    assert [info.result for info in again.ranks] == [info.result for info in run.ranks]
    assert {name: len(again.metrics[name].to_pandas()) for name in again.metrics} == {
        name: len(run.metrics[name].to_pandas()) for name in run.metrics
    }
    again.id = run.id
    assert again.report().text == run.report().text
    assert again.wait(0)


def test_the_records_of_the_run_itself_are_kept_in_order() -> None:
    run, records = recorded(trained, num_processes=2, start_method="fork")
    own = [record for record in records if record.rank == RUN]
    assert run._internals.journal.records == own
    names = [type(record.event).__name__ for record in own]
    assert names[:2] == ["RunCreated", "RunPlanned"]
    assert names[-2:] == ["AttemptEnded", "RunEnded"]
    assert names.index("AttemptStarted") < names.index("RankStarted") < names.index("RankExited")
