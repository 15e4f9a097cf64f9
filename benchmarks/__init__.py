"""Benchmarks of time and memory that compare this package with Accelerate and other packages. Run `make bench`."""
