"""What is known of a run: failures, prompts, and the words for both."""
