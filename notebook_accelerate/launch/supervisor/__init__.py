"""The supervisor of a run: the event loop over the ranks, the stop sequence and the time limits."""
