"""A request to the L3 process that has not been answered, as whoever sent it sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from moonpool_worker.cache.store_tier import messages


class Call(ABC):
    """Exactly one of :meth:`answered` and :meth:`lost` is called, once, on the engine's thread."""

    kind: ClassVar[str]
    deadline: float = 0.0

    @abstractmethod
    def request(self, number: int) -> messages.Request:
        """The packet, under the call's number."""

    @abstractmethod
    def answered(self, reply: messages.Reply) -> None: ...

    @abstractmethod
    def lost(self) -> None:
        """The process is gone without an answer: it cannot touch the arena any more."""

    @property
    def quarantined(self) -> int:
        """Slots that the process may still write to although nobody waits for them."""
        return 0
