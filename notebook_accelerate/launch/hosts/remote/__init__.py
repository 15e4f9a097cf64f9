"""Ranks on other machines, with an authenticated stream to each host."""
