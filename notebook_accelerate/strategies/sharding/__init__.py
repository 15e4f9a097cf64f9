"""Sharded parameters: what FSDP and tensor parallelism share when they save, load and report."""
