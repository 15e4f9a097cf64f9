"""Loggers with the names of Accelerate's loggers, so that code can silence or capture the same records by name."""

from __future__ import annotations

import logging

OWN = "notebook_accelerate"
THEIRS = "accelerate"


def accelerate_logger(module: str) -> logging.Logger:
    """Return the logger of a module of Accelerate.

    The logger ``notebook_accelerate`` is the parent of the logger ``accelerate``, so its level and handlers apply, too.

    Args:
        module: The name of the module without its package, such as ``utils.modeling``.
    """
    logging.getLogger(THEIRS).parent = logging.getLogger(OWN)
    return logging.getLogger(f"{THEIRS}.{module}")
