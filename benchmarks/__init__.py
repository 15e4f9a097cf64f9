"""Times and memory, measured side by side with the peers: `make bench`."""
