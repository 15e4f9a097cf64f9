"""From a configuration and the machine's facts to a launch plan; nothing is started."""
