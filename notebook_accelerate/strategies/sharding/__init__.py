"""Training, checkpoints and reports for sharded parameters, shared by FSDP and tensor parallelism."""
