"""The state of a run: its events, failures and prompts, and the error messages about failures."""
