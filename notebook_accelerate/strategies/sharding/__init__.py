"""Sharded parameters: training, checkpoints and reports that FSDP and tensor parallelism share."""
