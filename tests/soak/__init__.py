"""An hour of random launches, faults, stops, saves and suspensions in one kernel: ``make soak``."""
