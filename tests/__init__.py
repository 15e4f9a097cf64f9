"""Tests, grouped by what they need: one process, ranks, a kernel, a browser or a device."""
