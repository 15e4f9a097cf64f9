"""Fully sharded data parallelism, with both of torch's implementations."""
