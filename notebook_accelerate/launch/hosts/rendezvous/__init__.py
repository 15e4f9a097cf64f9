"""One run in several notebooks: a child process of each kernel joins the others through torch's rendezvous.

``rendezvous_loop`` is that process. In it, ``joining`` hosts or finds the store and waits for the other notebooks, and
``keep_alive`` sends keep-alives and news while the ranks run; ``participant`` is the state that both share. In the
kernel, ``rendezvous_client`` starts the child process, and ``notebook_group`` uses it for a launch:
``wait_for_peers`` handles commands while the launch waits, ``peer_pauses`` suspends the clocks of all notebooks while
one of them waits for its user, and ``peer_failures`` merges the failures of all. ``membership`` holds the decisions as
pure functions.
"""

from __future__ import annotations
