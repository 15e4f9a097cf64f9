"""Ranks on other machines and in other notebooks."""
