"""The rank's side of a launch: entry, agent, console, breakpoints and stacks."""
