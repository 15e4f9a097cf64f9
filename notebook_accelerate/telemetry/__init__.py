"""Events, the duplex channel that carries them, the sampler, and the bounded store that keeps them.

The kernel's side and the worker's side share this package. It imports no torch.
"""

from __future__ import annotations

from notebook_accelerate.errors import ExceptionInfo, FrameInfo, RankFailure
from notebook_accelerate.telemetry.channel import Channel, Decoder, Stamped, encode
from notebook_accelerate.telemetry.events import (
    AnsweredEvent,
    DisplayEvent,
    DroppedEvent,
    Event,
    GroupTimeoutEvent,
    InputReply,
    InputRequest,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    ResourceEvent,
    ResultEvent,
    ShardingEvent,
    StatusEvent,
    TraceEvent,
)
from notebook_accelerate.telemetry.failure import FailureEvent
from notebook_accelerate.telemetry.sink import Sink, current_sink, emit, install_sink
from notebook_accelerate.telemetry.step_time import StepTimeEvent
from notebook_accelerate.telemetry.store import Metrics, MetricSeries, Store

__all__ = [
    "AnsweredEvent",
    "Channel",
    "Decoder",
    "DisplayEvent",
    "DroppedEvent",
    "Event",
    "ExceptionInfo",
    "FailureEvent",
    "FrameInfo",
    "GroupTimeoutEvent",
    "InputReply",
    "InputRequest",
    "LogEvent",
    "MetricEvent",
    "MetricSeries",
    "Metrics",
    "ProgressEvent",
    "RankFailure",
    "ResourceEvent",
    "ResultEvent",
    "ShardingEvent",
    "Sink",
    "Stamped",
    "StatusEvent",
    "StepTimeEvent",
    "Store",
    "TraceEvent",
    "current_sink",
    "emit",
    "encode",
    "install_sink",
]
