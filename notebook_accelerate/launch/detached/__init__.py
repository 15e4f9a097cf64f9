"""Detached runs: where their processes are found, and how a kernel steers one."""
