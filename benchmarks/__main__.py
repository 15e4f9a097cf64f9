"""``python -m benchmarks [AREA or ROW ...]``: measure the rows, compare them with their peers, and print a table."""

from __future__ import annotations

import os
import sys

# Importing an area registers its rows.
from benchmarks import (  # noqa: F401
    big_models,
    checkpoints,
    debugging,
    first_panel,
    first_step,
    hosts,
    in_browser,
    kept_runs,
    launch,
    on_ray,
    panels,
    sampling,
    scale,
    strategies,
    trainer,
    training,
    training_api,
)
from benchmarks.runner import main

if __name__ == "__main__":
    # Peers are installed with their bytecode. With this variable, only this package would be compiled at each import.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main(sys.argv[1:]))
