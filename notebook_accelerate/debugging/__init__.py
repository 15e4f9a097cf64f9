"""The kernel's side of debugging: stacks, hang diagnosis, evaluation, pauses, breakpoints and sanity checks."""
