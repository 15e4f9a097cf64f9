"""Several notebooks, one run: a child process of each kernel meets the others through torch's rendezvous.

``child`` is that process. In it ``joining`` hosts or finds the store and waits for the others, and ``watch`` keeps the
keep-alives and passes news on while the ranks run; ``seat`` is what both share. ``meeting`` is the kernel's end of it,
and ``party`` what a launch does with it: in the ``lobby`` while it waits, with a common ``standstill`` while a user is
asked, and with what each has told of its failures (``told_failures``) at the end. ``nodes`` holds the decisions,
without any process.
"""

from __future__ import annotations
