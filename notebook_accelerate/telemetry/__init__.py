"""Events, the channel that transmits them, the sampler that creates some, and the bounded store that keeps them.

The kernel's side and the worker's side share this package. It does not import torch.
"""

from __future__ import annotations

from notebook_accelerate.errors import (
    ExceptionInfo as ExceptionInfo,
    FrameInfo as FrameInfo,
    RankFailure as RankFailure,
)
from notebook_accelerate.telemetry.channel import (
    Channel as Channel,
    Decoder as Decoder,
    Stamped as Stamped,
    encode as encode,
)
from notebook_accelerate.telemetry.events import (
    AgentFailedEvent as AgentFailedEvent,
    AnsweredEvent as AnsweredEvent,
    CheckpointEvent as CheckpointEvent,
    DeviceMemoryEvent as DeviceMemoryEvent,
    DeviceUseEvent as DeviceUseEvent,
    DisplayEvent as DisplayEvent,
    DroppedEvent as DroppedEvent,
    EpochEvent as EpochEvent,
    Event as Event,
    ExitWaitEvent as ExitWaitEvent,
    GroupTimeoutEvent as GroupTimeoutEvent,
    ImportedEvent as ImportedEvent,
    InputReply as InputReply,
    InputRequest as InputRequest,
    LogEvent as LogEvent,
    MetricEvent as MetricEvent,
    ProgressEvent as ProgressEvent,
    ResourceEvent as ResourceEvent,
    ResultEvent as ResultEvent,
    ShardingEvent as ShardingEvent,
    StatusEvent as StatusEvent,
    TraceEvent as TraceEvent,
)
from notebook_accelerate.telemetry.events import FailureEvent as FailureEvent
from notebook_accelerate.telemetry.sink import (
    Sink as Sink,
    current_sink as current_sink,
    emit as emit,
    install_sink as install_sink,
    send_soon as send_soon,
)
from notebook_accelerate.telemetry.step_time import StepTimeEvent as StepTimeEvent
from notebook_accelerate.telemetry.store import Metrics as Metrics
from notebook_accelerate.telemetry.curves import MetricSeries as MetricSeries
from notebook_accelerate.telemetry.store import Store as Store
