"""Megatron-LM: its engine trains, its own checkpoints are read and written."""
