"""Launch runs. The entry point is ``start``, which takes a configuration and a function, and returns a run."""

from __future__ import annotations

from notebook_accelerate.launch.attaching import attach
from notebook_accelerate.launch.kept.opened_run import open_run
from notebook_accelerate.launch.kept.kept_runs import KeptRun, KeptRuns
from notebook_accelerate.launch.plan.planner import KernelFacts, LaunchPlan, make_plan
from notebook_accelerate.launch.report.samples import RunMemory
from notebook_accelerate.launch.report.profile import Profile
from notebook_accelerate.launch.report.run_report import Report
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.run_state import Attempt, ResumePoint, RankInfo
from notebook_accelerate.launch.run_registry import debug, runs, shutdown
from notebook_accelerate.launch.starting import start

__all__ = [
    "Attempt",
    "KeptRun",
    "KeptRuns",
    "KernelFacts",
    "LaunchPlan",
    "Profile",
    "RankInfo",
    "Report",
    "ResumePoint",
    "Run",
    "RunMemory",
    "attach",
    "debug",
    "make_plan",
    "open_run",
    "runs",
    "shutdown",
    "start",
]
