"""Reading, patching and clearing environment variables."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import unittest

import pytest

from notebook_accelerate.config import environ
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes
from notebook_accelerate.utils import environment


@pytest.mark.parametrize("word", ["1", "true", "TRUE", "yes", "On", " y ", "t"])
def test_true_in_all_spellings(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", word)
    assert environ.parse_flag(word) is True
    assert environ.flag("ACCELERATE_DEBUG_MODE") is True
    assert environ.str_to_bool(word) == 1


@pytest.mark.parametrize("word", ["0", "False", "no", "off", "n", "f"])
def test_false_in_all_spellings(word: str) -> None:
    assert environ.parse_flag(word) is False
    assert environ.str_to_bool(word, to_bool=True) is False


def test_other_words_raise_with_the_variable_and_the_allowed_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "maybe")
    with pytest.raises(ValueError, match=r"ACCELERATE_USE_CPU.*'maybe'.*1, true, yes, on"):
        environ.flag("ACCELERATE_USE_CPU")


def test_unset_and_empty_variables_give_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_EMPTY", "")
    for name in ("SOME_EMPTY", "SOME_UNSET"):
        assert environ.flag(name, default=True) is True
        assert environ.text(name, "x") == "x"
        assert environ.integer(name, 7) == 7
        assert environ.choice(name, ("a", "b"), "b") == "b"


def test_numbers_and_choices_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NUMBER", "2x")
    monkeypatch.setenv("SOME_CHOICE", "BF16")
    with pytest.raises(ValueError, match="SOME_NUMBER='2x' is not a whole number"):
        environ.integer("SOME_NUMBER")
    assert environ.choice("SOME_CHOICE", ("no", "bf16")) == "bf16"
    with pytest.raises(ValueError, match="allowed: no, fp16"):
        environ.choice("SOME_CHOICE", ("no", "fp16"))


def test_the_first_variable_with_a_number_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECOND_RANK", "3")
    monkeypatch.setenv("FIRST_RANK", "-1")
    assert environ.get_int_from_env(["FIRST_RANK", "SECOND_RANK"], 9) == 3
    assert environ.get_int_from_env(["THIRD_RANK"], 9) == 9


def test_patched_variables_are_upper_case_text_and_are_restored_after_an_error() -> None:
    os.environ["KEPT_VALUE"] = "before"
    try:
        with contextlib.suppress(RuntimeError), environ.patch_environment(kept_value=1, fresh_value=True):
            assert os.environ["KEPT_VALUE"] == "1"
            assert os.environ["FRESH_VALUE"] == "True"
            raise RuntimeError
        assert os.environ["KEPT_VALUE"] == "before"
        assert "FRESH_VALUE" not in os.environ
    finally:
        del os.environ["KEPT_VALUE"]


def test_a_patched_variable_may_be_removed_inside() -> None:
    with environ.patch_environment(short_lived="1"):
        del os.environ["SHORT_LIVED"]
    assert "SHORT_LIVED" not in os.environ


def test_a_cleared_environment_is_empty_inside_and_restored_afterwards() -> None:
    before = dict(os.environ)
    with contextlib.suppress(KeyError), environment.clear_environment():
        assert not os.environ
        os.environ["SET_INSIDE"] = "1"
        raise KeyError
    assert dict(os.environ) == before


def test_set_variables_writes_flags_in_lower_case_and_removes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_ONE", "")
    monkeypatch.setenv("ACCELERATE_TWO", "x")
    environ.set_variables({"ACCELERATE_ONE": True, "ACCELERATE_TWO": None})
    assert os.environ["ACCELERATE_ONE"] == "true"
    assert "ACCELERATE_TWO" not in os.environ


def test_ignored_variables_are_ignored_in_one_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_NUMBER", "5")
    seen: list[int | None] = []
    with environ.ignored():
        assert environ.integer("SOME_NUMBER", 0) == 0
        thread = threading.Thread(target=lambda: seen.append(environ.integer("SOME_NUMBER", 0)))
        thread.start()
        thread.join()
    assert seen == [5]
    assert environ.integer("SOME_NUMBER", 0) == 5


def test_an_environment_file_omits_values_that_would_break_its_lines(caplog: pytest.LogCaptureFixture) -> None:
    lines = environment.convert_dict_to_env_variables({"GOOD": "a=b", "BAD": "a b", "WORSE": "a;rm", "EMPTY": ""})
    assert lines == ["GOOD=a=b\n"]
    assert [record.getMessage().partition("=")[0] for record in caplog.records] == ["BAD", "WORSE", "EMPTY"]


def test_a_purged_function_restores_accelerate_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "1")

    @environment.purge_accelerate_environment
    def change() -> str:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
        os.environ["ACCELERATE_KEPT"] = "2"
        return "result"

    @environment.purge_accelerate_environment
    async def change_later() -> None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"

    assert change() == "result"
    asyncio.run(change_later())
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
    assert os.environ["ACCELERATE_KEPT"] == "1"


def test_a_purged_function_can_be_sent_to_ranks() -> None:
    @environment.purge_accelerate_environment
    def train() -> str:
        return "result"

    assert load_bytes(dump_bytes(train, "the function"))() == "result"


def test_a_purged_class_and_its_subclasses_restore_variables_after_each_test() -> None:
    @environment.purge_accelerate_environment
    class Base(unittest.TestCase):
        def setUp(self) -> None:
            os.environ["ACCELERATE_FROM_SETUP"] = "1"

    class Derived(Base):
        def test_it(self) -> None:
            assert os.environ["ACCELERATE_FROM_SETUP"] == "1"
            os.environ["ACCELERATE_FROM_TEST"] = "1"

    result = unittest.TestResult()
    Derived("test_it").run(result)
    assert result.wasSuccessful()
    assert result.testsRun == 1
    assert not [name for name in os.environ if name.startswith("ACCELERATE_FROM")]


def test_a_purged_plain_class_restores_variables_after_setup_method() -> None:
    @environment.purge_accelerate_environment
    class Tests:
        def setup_method(self) -> None:
            os.environ["ACCELERATE_FROM_SETUP"] = "1"

        def test_it(self) -> None:
            os.environ["ACCELERATE_FROM_TEST"] = "1"

    tests = Tests()
    tests.setup_method()
    tests.test_it()
    assert "ACCELERATE_FROM_TEST" not in os.environ
    tests.teardown_method()  # type: ignore[attr-defined]
    assert "ACCELERATE_FROM_SETUP" not in os.environ
