"""The ways to be parallel: one class each, chosen from a table by the kind of world."""

from __future__ import annotations

from notebook_accelerate.strategies.base import Strategy
from notebook_accelerate.strategies.ddp import DDPStrategy
from notebook_accelerate.strategies.setup import Setup
from notebook_accelerate.strategies.single import SingleStrategy
from notebook_accelerate.strategies.table import STRATEGIES, make_strategy, register_strategy
from notebook_accelerate.strategies.unwrap import extract_model_from_parallel, is_compiled_module

__all__ = [
    "STRATEGIES",
    "DDPStrategy",
    "Setup",
    "SingleStrategy",
    "Strategy",
    "extract_model_from_parallel",
    "is_compiled_module",
    "make_strategy",
    "register_strategy",
]
