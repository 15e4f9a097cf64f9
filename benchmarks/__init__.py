"""Benchmarks of time and memory, compared with Accelerate and other peers: `make bench`."""
