"""Kept runs: a run's journal in a folder, written while the run goes on, and read again by any process."""
