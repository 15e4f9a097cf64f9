"""Megatron-LM: training with its engine, and reading and writing its checkpoints."""
