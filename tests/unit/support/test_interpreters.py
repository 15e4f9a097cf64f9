"""An interpreter forked from a server exits like a newly started one."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.interpreters import InterpreterServer

_EXIT = """
import atexit, ctypes, sys, threading, time, weakref

class Last:
    def __del__(self):
        print("an object was destroyed", sys.is_finalizing())

def late():
    time.sleep(0.2)
    print("a thread ended")

last, temporary = Last(), Last()
weakref.finalize(temporary, print, "a finalizer ran")
atexit.register(print, "a handler ran")
threading.Thread(target=late).start()
sys.stdout.write("text without an end of line; ")
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.fputs(b"output of C code", ctypes.c_void_p(libc.fdopen(1, b"w")))
sys.exit(3)
"""


def test_a_forked_interpreter_exits_like_a_new_one(interpreters: InterpreterServer) -> None:
    forked = interpreters.run("-c", _EXIT, env=os.environ)
    own = subprocess.run([sys.executable, "-c", _EXIT], capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stdout, forked.stderr) == (3, own.stdout, own.stderr)
    assert own.stdout.count("an object was destroyed") == 2
    assert own.stdout.endswith("output of C code")
