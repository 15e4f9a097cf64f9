"""Kept runs. A run's journal is written to a folder while the run is running, and any process can read it."""
