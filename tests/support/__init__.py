"""Support code for the tests, such as ranks, kernels and the leak check."""
