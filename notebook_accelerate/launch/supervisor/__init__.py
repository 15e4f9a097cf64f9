"""One run's supervisor: the event loop over its ranks, the stop sequence and the time limits."""
