"""What tests share: ranks, kernels, the leak check."""
