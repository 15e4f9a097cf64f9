"""A folder for PYTHONPATH: its ``sitecustomize`` runs when an interpreter starts."""

from __future__ import annotations
