"""Training, checkpoints and reports of sharded parameters, shared by FSDP and tensor parallelism."""
