"""Make a launch plan from a configuration and facts about the machine, without starting anything."""
