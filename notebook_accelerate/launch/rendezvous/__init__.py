"""Several notebooks, one run: a child process of each kernel meets the others through torch's rendezvous.

``child`` is that process: it hosts or finds the store, joins, keeps the keep-alives and passes news on. ``meeting`` is
the kernel's end of it, and ``party`` what a launch does with it. ``nodes`` holds the decisions, without any process.
"""

from __future__ import annotations
