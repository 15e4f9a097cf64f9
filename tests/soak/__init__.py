"""An hour of random launches, faults, stops, saves and suspends in one kernel: ``make soak``."""
