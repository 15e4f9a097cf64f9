"""DeepSpeed: the ZeRO engine, its configuration and checkpoints, and Ulysses sequence parallelism."""
