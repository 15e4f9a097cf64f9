"""Where the output of ranks goes in the notebook."""
