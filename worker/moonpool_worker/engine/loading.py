"""From settings to everything that the engine needs, and the namespace of what was really loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch
from moonpool_api.geometry import CacheGeometry
from moonpool_api.namespace import NamespaceInputs, RopeInputs, namespace_hash
from moonpool_api.quantity import format_bytes

from moonpool_worker.cache.arena_plan import plan_arena
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.events.publisher import EventPublisher, EventsError
from moonpool_worker.cache.events.residency import Residency
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.engine import memory_limit
from moonpool_worker.engine.memory_limit import HostMemory, container_limit
from moonpool_worker.kernels.interface import BackendError, select_backend
from moonpool_worker.kernels.threads import usable_cpus
from moonpool_worker.models.config import ModelConfig
from moonpool_worker.models.dtype import dtype_name, resolve_dtype
from moonpool_worker.models.registry import geometry as model_geometry
from moonpool_worker.models.registry import load_model
from moonpool_worker.models.runner import ModelRunner
from moonpool_worker.settings import Settings, SettingsError
from moonpool_worker.tokenizer.tokenizer import Tokenizer
from moonpool_worker.weights.open import open_checkpoint

_log = structlog.get_logger()

#: ``progress(what, done, total)``; ``total`` 0 when unknown.
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Loaded:
    """A model ready to run. ``max_model_len`` is in tokens, prompt and answer together."""

    config: ModelConfig
    runner: ModelRunner
    argmax: Callable[[torch.Tensor], list[int]]
    cache: KVCache
    events: EventPublisher | None
    tokenizer: Tokenizer
    inputs: NamespaceInputs
    namespace: str
    max_model_len: int
    weights_bytes: int
    l1_tokens: int
    l2_tokens: int


def load(settings: Settings, progress: Progress) -> Loaded:
    """Load weights, then claim L1 and L2. Raises SettingsError or ModelLoadError, each with one sentence."""
    progress("reading the checkpoint", 0, 0)
    checkpoint = open_checkpoint(settings.model)
    try:
        kernels = select_backend(settings.attention_backend, settings.quantization)
    except BackendError as failure:
        raise SettingsError(str(failure)) from failure
    _log.info("kernels", backend=kernels.name, threads=usable_cpus())
    config = checkpoint.config
    limit = container_limit()
    try:
        geometry = model_geometry(config, dtype_name(resolve_dtype(settings.dtype)), settings.prefix_granularity)
    except ValueError as failure:
        raise SettingsError(f"--prefix-granularity {settings.prefix_granularity}: {failure}") from failure
    l1_bytes = _l1_bytes(settings, geometry)
    l2_bytes = _l2_bytes(settings, l1_bytes)
    # Before the weights are read: what cannot fit without them is refused at once.
    on_host = kernels.device.type == "cpu"
    HostMemory(0, l1_bytes if on_host else 0, l2_bytes).check(limit)
    if settings.max_model_len is not None and settings.max_model_len > config.context_length:
        raise SettingsError(
            f"--max-model-len {settings.max_model_len} is more than the model's context of {config.context_length}"
        )
    model = load_model(
        checkpoint, settings.dtype, kernels, lambda done, total: progress("loading weights", done, total)
    )
    progress("computing the digest", 0, 0)
    digest = checkpoint.digest()
    tokenizer = checkpoint.tokenizer()
    checkpoint.close()
    progress("setting up the cache", 0, 0)
    HostMemory(model.weight_bytes if on_host else 0, l1_bytes if on_host else 0, l2_bytes).check(limit)
    parents = DeviceArena.parents_in(geometry, l1_bytes)
    if parents < 2:
        raise SettingsError(
            f"an L1 of {format_bytes(l1_bytes)} holds less than two blocks of "
            f"{format_bytes(plan_arena(geometry).parent_bytes)}: make it larger, or --prefix-granularity smaller"
        )
    inputs = NamespaceInputs(
        architecture=config.architecture,
        weights_digest=digest,
        weight_version=settings.weight_version,
        dtype=dtype_name(model.dtype),
        quantization=settings.quantization,
        attention_backend=kernels.name,
        rope=RopeInputs(theta=config.rope_theta, scaling=config.rope_scaling),
        geometry=geometry,
        isolation=settings.isolation,
    )
    namespace = namespace_hash(inputs)
    arena = DeviceArena(geometry, parents, kernels.device)
    store = settings.store if settings.uses_store else None
    if store is not None and settings.pod.ip:
        store = dataclasses.replace(store, hostname=settings.pod.ip)
    supervised = settings.supervised
    events, residency = _events(settings, geometry)
    cache = KVCache(
        arena,
        namespace,
        l2_bytes,
        store,
        settings.prefix_caching,
        events=residency,
        l2_fd=supervised.l2_fd if supervised else None,
    )
    if supervised is not None and supervised.crashes:
        restored = cache.restore()
        _log.info("L2 outlived a crash", pages=restored.pages, refused=restored.refused)
    l1_tokens = cache.longest(settings.max_batch_tokens)
    return Loaded(
        config=config,
        runner=ModelRunner(model, arena),
        argmax=kernels.argmax,
        cache=cache,
        events=events,
        tokenizer=tokenizer,
        inputs=inputs,
        namespace=namespace,
        # A sequence longer than L1 could never run, so it is not promised either.
        max_model_len=min(settings.max_model_len or config.context_length, l1_tokens),
        weights_bytes=model.weight_bytes,
        l1_tokens=l1_tokens,
        l2_tokens=cache.stats().l2_slots * geometry.prefix_granularity,
    )


def _events(settings: Settings, geometry: CacheGeometry) -> tuple[EventPublisher | None, Residency | None]:
    """Who tells the world about the cache, and who tells him."""
    config = settings.kv_events
    if config is None:
        return None, None
    try:
        publisher = EventPublisher(config)
    except EventsError as failure:
        raise SettingsError(f"--kv-events-config: {failure}") from failure
    return publisher, Residency(publisher, len(geometry.groups), geometry.prefix_granularity, config.tiers)


def _l1_bytes(settings: Settings, geometry: CacheGeometry) -> int:
    """With ``l1_tokens``: what a text of so many tokens fills in all groups, and the null parent."""
    if settings.l1_tokens is None:
        return settings.l1_bytes
    plan = plan_arena(geometry)
    parents = 1
    for group in plan.groups:
        blocks = -(-settings.l1_tokens // group.geometry.block_tokens)
        parents += -(-blocks // group.packing)
    return parents * plan.parent_bytes


def _l2_bytes(settings: Settings, l1_bytes: int) -> int:
    if not settings.prefix_caching:
        return 0
    return memory_limit.l2_bytes(settings.l2_bytes, settings.l2_ratio, l1_bytes)
