"""Show the output of ranks and the panels of runs in the notebook."""
