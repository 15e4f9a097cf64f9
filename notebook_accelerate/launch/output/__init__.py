"""The output of ranks and panels in the notebook."""
