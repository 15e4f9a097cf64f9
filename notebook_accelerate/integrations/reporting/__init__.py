"""Reports what any training code does in a rank to its run: losses, steps, progress, scalars of other trackers.

Each library is connected when it is imported; without a sink, outside a launched rank, nothing is installed.
"""

from __future__ import annotations

from notebook_accelerate.integrations.reporting.sources import install as install
from notebook_accelerate.integrations.reporting.sources import preload as preload
