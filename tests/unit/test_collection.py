"""Work during which automatic garbage collection is off, and lists of the objects that the collector tracks."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from notebook_accelerate._collection import gc_paused, instances


def test_collections_are_off_inside_the_block_only() -> None:
    found = [gc.isenabled()]
    with suppress(ZeroDivisionError), gc_paused():
        found.append(gc.isenabled())
        raise ZeroDivisionError
    found.append(gc.isenabled())
    assert found == [True, False, True]


def test_disabled_collections_stay_disabled() -> None:
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collections_are_off_until_the_last_of_several_threads_ends_its_block() -> None:
    entered, end = threading.Event(), threading.Event()

    def other() -> None:
        with gc_paused():
            entered.set()
            end.wait(30)

    thread = threading.Thread(target=other)
    with gc_paused():
        thread.start()
        assert entered.wait(30)
    found = [gc.isenabled()]
    end.set()
    thread.join()
    assert [*found, gc.isenabled()] == [False, True]


FORKED = """
import gc, os
from notebook_accelerate._collection import gc_paused
with gc_paused():
    child = os.fork()
    on = [gc.isenabled()]
if child == 0:
    with gc_paused():
        on.append(gc.isenabled())
    os._exit(on == [True, False] and gc.isenabled())
print(gc.isenabled(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_forked_inside_the_block_collects() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "1"]


COUNTED = """
import gc, torch
gc.collect()  # what it has counted until now is over
found = []
gc.callbacks.append(lambda phase, info: found.append(info["generation"]) if phase == "start" else None)
from notebook_accelerate import Accelerator, data_loader
in_imports = list(found)
try:
    import notebook_accelerate.missing
except ImportError:
    pass
print(gc.isenabled(), max(in_imports, default=0), hasattr(data_loader, "skip_first_batches"))
"""


def test_the_first_use_of_a_name_collects_no_old_objects() -> None:
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "True"]


class Kind:
    pass


class Derived(Kind):
    pass


class Proxy:
    """An object whose ``__class__`` cannot be read, like a weakref proxy whose object is gone."""

    @property
    def __class__(self) -> Any:
        raise ReferenceError


def test_instances_of_a_class_and_its_subclasses_are_listed_once() -> None:
    objects = [Kind(), Derived(), Kind()]
    others = [Proxy(), Kind]
    assert sorted(map(id, instances(Kind))) == sorted(map(id, objects))
    assert instances(Derived, Proxy) in ([objects[1], others[0]], [others[0], objects[1]])


def test_instances_are_listed_by_generation() -> None:
    with gc_paused():
        gc.collect()
        young = Kind()
        assert instances(Kind, generation=0) == [young]
        gc.collect()
        assert instances(Kind, generation=0) == []
        assert instances(Kind) == [young]


def test_no_collection_runs_while_instances_are_listed() -> None:
    marker, before = Kind(), gc.get_threshold()
    lists: list[int] = []

    def find(*_: object) -> None:
        lists.extend(len(each) for each in gc.get_referrers(marker) if type(each) is list)

    gc.callbacks.append(find)
    try:
        gc.set_threshold(1)
        instances(Proxy)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(find)
    assert lists == []


def test_other_threads_can_create_tuples_while_instances_are_listed() -> None:
    ended, errors = threading.Event(), []

    def create() -> None:
        while not ended.is_set():
            try:
                tuple(each for each in range(200))
            except SystemError as error:
                errors.append(error)

    many = [[each] for each in range(200_000)]
    thread = threading.Thread(target=create)
    thread.start()
    try:
        for _ in range(20):
            instances(Kind)
    finally:
        ended.set()
        thread.join()
    assert many
    assert errors == []
