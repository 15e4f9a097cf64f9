"""Profiles of a run: traces of its ranks, the facts in them, and what they say.

Everything here is pure: traces and events in, facts, sentences and rows out.
"""
