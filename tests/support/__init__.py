"""Support for the tests: ranks, kernels, the leak check."""
