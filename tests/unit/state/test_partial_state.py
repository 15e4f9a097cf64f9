from __future__ import annotations

import pickle

import pytest
import torch

from notebook_accelerate.config.enums import DistributedType
from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.state import AcceleratorState, GradientState, PartialState, is_initialized, reset_shared_state
from notebook_accelerate.state.partial_state import ThreadLocalSharedDict


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_DEBUG_MODE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")


def test_without_a_launcher_there_is_one_process() -> None:
    state = PartialState()
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.distributed_type == DistributedType.NO
    assert state.device == torch.device("cpu")
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert state.initialized
    assert not state.debug
    assert "Num processes: 1" in repr(state)
    state.wait_for_everyone()


def test_the_precision_is_that_of_the_accelerator_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PartialState().mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert PartialState().mixed_precision == "fp16"
    AcceleratorState(mixed_precision="bf16")
    assert PartialState().mixed_precision == "bf16"


def test_instances_share_one_dictionary() -> None:
    first = PartialState()
    first.marker = "seen"
    assert PartialState().marker == "seen"
    PartialState._reset_state()
    with pytest.raises(AttributeError, match="state was reset"):
        _ = first.device


def test_a_pickled_state_becomes_the_state_of_the_process_that_loads_it() -> None:
    state = PartialState()
    again = pickle.loads(pickle.dumps(state))
    assert again.__dict__ is state.__dict__


@pytest.mark.parametrize(("text", "on"), [("1", True), ("true", True), ("yes", True), ("on", True), ("0", False)])
def test_debug_mode_is_read_as_a_truth_value(monkeypatch: pytest.MonkeyPatch, text: str, on: bool) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", text)
    assert PartialState().debug is on


def test_a_rank_outside_its_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK=2 is outside WORLD_SIZE=2"):
        PartialState()


def test_decorators_run_on_their_ranks() -> None:
    state = PartialState()
    calls: list[str] = []

    @state.on_main_process
    def main(value: int) -> int:
        calls.append("main")
        return value

    @state.on_process(process_index=1)
    def second() -> None:
        calls.append("second")

    @state.on_local_process(local_process_index=0)
    def local() -> None:
        calls.append("local")

    assert main(3) == 3
    assert main.__name__ == "main"
    second()
    local()
    state.on_last_process(lambda: calls.append("last"))()
    state.on_local_main_process()(lambda: calls.append("local main"))()
    assert calls == ["main", "second", "local", "last", "local main"]  # A single rank has all of these roles.


def test_the_old_parameter_of_on_local_process_still_works() -> None:
    with pytest.warns(UserWarning, match="local_process_index="):
        decorated = PartialState().on_local_process(lambda: "ran", local_process_idx=1)
    assert decorated() == "ran"


def test_decorators_check_the_rank_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    state = PartialState()
    decorated = state.on_main_process(lambda: "ran")
    assert decorated() == "ran"
    state.process_index = 1
    assert decorated() is None


def test_main_process_first_releases_the_others_even_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), PartialState().main_process_first():
        _ = 1 / 0


def test_print_prints_on_the_local_main_process(capsys: pytest.CaptureFixture[str]) -> None:
    state = PartialState()
    state.print("here")
    state.local_process_index = 1
    state.print("not here")
    assert capsys.readouterr().out == "here\n"


def test_each_thread_has_its_own_dictionary() -> None:
    import threading

    class Holder:
        shared = ThreadLocalSharedDict()

    Holder.shared["mine"] = 1
    seen: list[dict[str, int]] = []
    thread = threading.Thread(target=lambda: seen.append(dict(Holder.shared)))
    thread.start()
    thread.join()
    assert seen == [{}]
    assert Holder.shared == {"mine": 1}


def test_reset_clears_all_three_states() -> None:
    AcceleratorState(mixed_precision="bf16")
    kept = GradientState()
    kept.sync_gradients = False
    assert is_initialized()
    reset_shared_state()
    assert not is_initialized()
    assert AcceleratorState().mixed_precision == "no"
    assert GradientState().sync_gradients is True
    assert kept.sync_gradients is False  # Objects that were prepared earlier keep their own state.


class TestAcceleratorState:
    def test_precision_comes_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert AcceleratorState().mixed_precision == "bf16"

    def test_a_later_instance_changes_its_settings_and_warns_once(self, recwarn: pytest.WarningsRecorder) -> None:
        first = AcceleratorState(mixed_precision="no")
        second = AcceleratorState(mixed_precision="bf16")
        AcceleratorState(mixed_precision="bf16")
        AcceleratorState()
        assert first.mixed_precision == second.mixed_precision == "bf16"
        words = [str(warning.message) for warning in recwarn]
        assert len(words) == 1
        assert "mixed_precision from no to bf16" in words[0]
        assert str(recwarn[0].filename) == __file__

    def test_an_unknown_precision_lists_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"'int3' is not known; pass one of 'no', 'fp8', 'fp16', 'bf16'"):
            AcceleratorState(mixed_precision="int3")

    def test_plugins_decide_the_distributed_type(self) -> None:
        state = AcceleratorState(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        assert state.distributed_type == DistributedType.FSDP
        assert state.is_fsdp2

    def test_an_unknown_deepspeed_plugin_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no DeepSpeed plugin is named 'x'"):
            AcceleratorState().get_deepspeed_plugin("x")

    def test_reset_can_include_partial_state(self) -> None:
        AcceleratorState()
        AcceleratorState._reset_state(reset_partial_state=True)
        assert PartialState._shared_state == {}


class TestGradientState:
    def test_defaults_synchronise_every_step(self) -> None:
        state = GradientState()
        assert state.sync_gradients
        assert state.num_steps == 1
        assert state.sync_with_dataloader
        assert not state.adjust_scheduler
        assert not state.in_dataloader
        assert not state.end_of_dataloader
        assert state.remainder == -1
        assert state.active_dataloader is None
        assert not state.is_xla_gradients_synced

    def test_loaders_are_a_stack(self) -> None:
        class Loader:
            end_of_dataloader = False
            remainder = 3

        state, outer, inner = GradientState(), Loader(), Loader()
        state._add_dataloader(outer)
        state._add_dataloader(inner)
        assert state.active_dataloader is inner
        assert state.in_dataloader
        inner.end_of_dataloader = True
        assert state.end_of_dataloader
        assert state.remainder == 3
        state._remove_dataloader(inner)
        assert state.active_dataloader is outer
        assert not state.end_of_dataloader

    def test_other_settings_do_not_change_the_earlier_state(self) -> None:
        from notebook_accelerate.config.kwargs_handlers import GradientAccumulationPlugin

        first = GradientState(GradientAccumulationPlugin(num_steps=2))
        second = GradientState(GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False))
        assert (first.num_steps, second.num_steps) == (2, 4)
        assert first.sync_with_dataloader
        assert not second.sync_with_dataloader
        assert GradientState().num_steps == 4
        second._set_sync_gradients(False)
        assert first.sync_gradients
        assert not GradientState().sync_gradients


@pytest.mark.parametrize("name", ["on_main_process", "on_local_main_process", "on_process", "on_local_process"])
def test_a_decorator_of_a_class_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"instead of an instance: write accelerator = Accelerator\(\)"):
        getattr(PartialState, name)(len)
