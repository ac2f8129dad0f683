"""What can be set about L3, with the defaults that were measured or chosen."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Times in seconds, sizes in bytes.

    A fetch of fewer than ``min_pages`` pages is not worth it, nor, unless ``always``, one that takes longer than
    computing by what was measured. A request waits ``timeout_base + pages * timeout_per_page`` for its pages, half of
    the base to hear what there is; then it is computed. None: from the measured rates, and ``timeout_limit`` in all at
    most. Pages are read in calls of ``batch_pages``. The other time-outs are the engine's patience with the client
    process: past one of them the process is killed.
    """

    min_pages: int = 2
    always: bool = False
    timeout_base: float | None = None
    timeout_per_page: float | None = None
    timeout_limit: float = 2.0
    batch_pages: int = 128
    hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    device: str = ""
    local_buffer_bytes: int = 1 << 20
    #: Used when L2 is off.
    staging_bytes: int = 64 << 20
    open_timeout: float = 15.0
    call_timeout: float = 8.0
    close_timeout: float = 4.0
    restart_pause: float = 0.5
    max_restart_pause: float = 15.0
    breaker_faults: int = 3
    breaker_pause: float = 1.0
    breaker_max_pause: float = 15.0
    negative_ttl: float = 2.0
    #: Blocks that may wait to be written; they never hold more than a quarter of L2.
    put_queue: int = 4096
    put_batch: int = 16
    #: After a refused put (quota, tenant, no room) no put is sent for this long.
    refused_put_pause: float = 0.5
    #: Bytes of the object that a store is measured with, and how long a store that is found too slow is left alone.
    measure_bytes: int = 1 << 20
    measure_again: float = 60.0
    environment: dict[str, str] = field(default_factory=dict)
