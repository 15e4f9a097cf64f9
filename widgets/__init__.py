"""Panels and forms of the notebook, importable as notebook_accelerate.widgets: views of a store, never its owner."""
