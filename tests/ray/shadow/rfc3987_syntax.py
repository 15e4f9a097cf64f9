"""Stands before the real one: jsonschema does without, and it compiles a grammar for seconds at each `import ray`."""

from __future__ import annotations

raise ImportError("left out of the tests on Ray")
