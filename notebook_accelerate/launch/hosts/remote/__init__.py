"""Ranks on other machines: an authenticated stream to each host, and what both of its ends do."""
