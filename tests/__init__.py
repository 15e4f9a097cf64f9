"""Tests, by what they need: one process, ranks, a kernel, a browser, a device."""
