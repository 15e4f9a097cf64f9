"""Runs with ranks on other machines or in other notebooks."""
