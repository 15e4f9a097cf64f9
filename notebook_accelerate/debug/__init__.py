"""Seeing into ranks: stacks, hang diagnosis, questions, pauses and breakpoints.

``protocol`` is shared. ``agent``, ``frames``, ``flight`` and ``breakpoints`` work in a rank; ``session``, ``diagnosis``
and ``dumps`` work in the kernel and import nothing of the worker's side.
"""
