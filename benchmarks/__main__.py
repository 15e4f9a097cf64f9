"""``python -m benchmarks [AREA or ROW ...]``: measure, side by side with the peers, and print the table."""

from __future__ import annotations

import os
import sys

# Importing an area registers its rows.
from benchmarks import (  # noqa: F401
    big_models,
    checkpoints,
    debugging,
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
from benchmarks.bench import main

if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode, the peer's and ours
    sys.exit(main(sys.argv[1:]))
