"""Ranks on other machines: an authenticated stream to each host, and its two ends."""
