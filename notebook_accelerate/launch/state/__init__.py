"""State of a run: its events, failures and prompts, and the error messages about them."""
