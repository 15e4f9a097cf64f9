"""Analyse the profile of a run: the traces of its ranks, the facts in them, and the findings.

Everything here is pure: it turns traces and events into facts, sentences and rows, without side effects.
"""
