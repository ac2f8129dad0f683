"""``--kv-events-config``: TokenSpeed's JSON object, with two fields of our own."""

from __future__ import annotations

import msgspec

from moonpool_worker.cache.events.sink import Tier

_TIERS: tuple[Tier, ...] = ("l1", "l2")
#: ZMQ keeps it in a C int.
_MOST_WAITING = 2**31 - 1


class EventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where events go.

    ``endpoint`` and ``replay_endpoint`` are ZMQ addresses; one with ``*`` is bound, another host is connected to.
    ``buffer_steps`` batches can be replayed; ``hwm`` messages wait in ZMQ for a slow subscriber, and
    ``max_queue_size`` batches for ZMQ: what does not fit is dropped.

    Ours: ``tiers`` that are told about, and ``layout`` of an event: ``array`` as TokenSpeed and vLLM up to 0.27 write
    it, ``map`` as vLLM does since 0.28.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    tiers: tuple[str, ...] = ("l1", "l2")
    layout: str = "array"

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def parse_events_config(text: str) -> EventsConfig:
    """ValueError, with one sentence, for what is no such object."""
    try:
        config = msgspec.json.decode(text, type=EventsConfig)
    except msgspec.DecodeError as failure:
        raise ValueError(f'{failure}; write for example {{"enable_kv_cache_events": true}}') from failure
    if config.publisher not in (None, "null", "zmq"):
        raise ValueError(f"the publisher is null or zmq, not {config.publisher!r}")
    if config.layout not in ("array", "map"):
        raise ValueError(f"the layout is array or map, not {config.layout!r}")
    if not config.tiers or not set(config.tiers) <= set(_TIERS):
        raise ValueError(f"tiers are l1, l2 or both, not {', '.join(config.tiers) or 'none'}")
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is at least 1, not {getattr(config, name)}")
    if config.hwm > _MOST_WAITING:
        raise ValueError(f"hwm is at most {_MOST_WAITING}, not {config.hwm}")
    return config
