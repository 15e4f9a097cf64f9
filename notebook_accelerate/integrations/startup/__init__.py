"""A folder for PYTHONPATH, whose ``sitecustomize`` runs when an interpreter starts."""

from __future__ import annotations
