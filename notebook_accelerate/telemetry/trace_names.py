"""Names that a rank writes into the trace of a profile, and that its readers look for."""

from __future__ import annotations

KEY = "notebook_accelerate"
"""The key of the trace's file with what torch's profiler does not record: samples and other facts of the rank."""
AFTER_STEPS = "after the last ProfilerStep"
"""What follows the steps in a trace: HTA leaves out the last event with such a name, and all that begins after it."""
