"""What the engine counted: plain numbers that the server turns into metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Gauges of now and counters since the start; ``step_seconds`` is the sum over ``steps``."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    #: Called with the seconds of each step, on the engine's thread.
    on_step: Callable[[float], None] = field(default=lambda seconds: None, repr=False)
