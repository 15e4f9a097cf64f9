"""DeepSpeed: ZeRO's engine, its configuration and checkpoints, and Ulysses sequence parallelism."""
