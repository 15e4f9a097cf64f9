"""Kept runs, whose journal is written to a folder while they run and can be read by any process."""
