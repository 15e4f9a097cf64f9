"""Support code for tests, such as ranks, kernels and the leak check."""
