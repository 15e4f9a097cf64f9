"""Detached runs: how kernels find their processes and control them."""
