"""Parallel strategies: one class each, chosen from a table by `DistributedType`."""

from __future__ import annotations

from notebook_accelerate.strategies.ddp_strategy import DDPStrategy
from notebook_accelerate.strategies.strategy import SingleStrategy
from notebook_accelerate.strategies.strategy import Strategy
from notebook_accelerate.strategies.strategy_setup import Setup
from notebook_accelerate.strategies.strategy_table import STRATEGIES, make_strategy, register_strategy
from notebook_accelerate.strategies.module_queries import extract_model_from_parallel, is_compiled_module

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
