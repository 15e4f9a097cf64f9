"""Ranks on other machines, and the authenticated stream to the host on each machine."""
