"""Benchmarks of time and memory, compared with Accelerate and other packages: `make bench`."""
