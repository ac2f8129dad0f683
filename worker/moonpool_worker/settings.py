"""What a worker was told on its command line, checked and in plain units."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from moonpool_worker.cache.events.config import EventsConfig
from moonpool_worker.cache.store_tier.options import StoreOptions
from moonpool_worker.supervisor.handover import Supervised


class SettingsError(Exception):
    """One sentence that says what to change."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod that this process runs in; empty without a cluster."""

    name: str = ""
    uid: str = ""
    ip: str = ""

    @classmethod
    def from_environment(cls) -> Pod:
        get = os.environ.get
        return cls(get("POD_NAME", ""), get("POD_UID", ""), get("POD_IP", ""))


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in bytes, times in seconds; ``None`` for what the model decides.

    L1 has room for ``l1_tokens``, else ``l1_bytes``. L2 has ``l2_bytes``, else ``l2_ratio`` times L1, else as much as
    L1. ``kv_events``: None for no events. ``podinfo``: the downward-API folder, None for a worker without a cluster.
    ``l3_master``: host:port of a Mooncake master to use without a grant. ``supervised``: what the supervisor handed
    over, None without one.
    """

    model: str
    host: str = "0.0.0.0"
    port: int = 8000
    served_name: str | None = None
    weight_version: str = ""
    isolation: str = ""
    dtype: str = "auto"
    attention_backend: str = "auto"
    quantization: str = "none"
    prefix_granularity: int = 16
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_running: int = 32
    max_waiting: int = 512
    prefix_caching: bool = True
    l1_bytes: int = 512 << 20
    l1_tokens: int | None = None
    l2_bytes: int | None = None
    l2_ratio: float | None = None
    kv_events: EventsConfig | None = None
    l3: bool = False
    l3_master: str = ""
    l3_tenant: str = "default"
    store: StoreOptions = field(default_factory=StoreOptions)
    podinfo: Path | None = None
    drain_timeout: float = 60.0
    log_request_stats: bool = False
    pod: Pod = field(default_factory=Pod)
    supervised: Supervised | None = None

    def check(self) -> None:
        """Raises SettingsError for values that contradict each other."""
        if self.max_batch_tokens < self.max_running:
            raise SettingsError(
                f"--max-batch-tokens {self.max_batch_tokens} is less than --max-running {self.max_running}: "
                "every running request needs a token per step"
            )
        if self.max_batch_tokens < self.prefix_granularity:
            raise SettingsError(
                f"--max-batch-tokens {self.max_batch_tokens} is less than --prefix-granularity "
                f"{self.prefix_granularity}: a step must hold a page"
            )
        if self.quantization != "none" and (self.dtype == "float32" or self.attention_backend in ("torch", "triton")):
            raise SettingsError(
                f"--quantization {self.quantization} is for bfloat16 on the backend cpu: "
                "drop it, or --dtype and --attention-backend"
            )
        if self.l3_master and ":" not in self.l3_master:
            raise SettingsError(f"--l3-master {self.l3_master!r} has no port: write HOST:PORT")
        if not self.prefix_caching and (self.l3 or self.l3_master):
            raise SettingsError("--no-prefix-caching leaves nothing to keep in L3: drop it, or drop --l3")

        if not self.prefix_caching and self.kv_events is not None:
            raise SettingsError("--no-prefix-caching leaves no KV events to tell: drop it, or --kv-events-config")

    @property
    def uses_store(self) -> bool:
        return self.l3 or bool(self.l3_master)
