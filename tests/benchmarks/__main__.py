"""``python -m tests.benchmarks [AREA or ROW ...]``: measure, side by side with the peers, and print the table."""

from __future__ import annotations

import sys

from tests.benchmarks import big_models, checkpoints, launch, panels, training  # noqa: F401 - importing an area registers its rows
from tests.benchmarks.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
