"""Fully sharded data parallel, on both of torch's implementations."""
