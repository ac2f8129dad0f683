"""A small cache, and texts whose KV is a function of the text: any wrong block shows."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence

import torch
from moonpool_api.geometry import CacheGeometry, full_attention
from moonpool_worker.cache.allocation import Allocation
from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.cache.store_tier.options import StoreOptions

P = 4
GEOMETRY = full_attention(layers=2, kv_heads=1, head_dim=8, dtype="bfloat16", prefix_granularity=P)
BIG = full_attention(layers=8, kv_heads=2, head_dim=64, dtype="bfloat16", prefix_granularity=16)
#: Blocks of 1 MiB: a transfer long enough to race with.
MEGABYTE = full_attention(layers=16, kv_heads=4, head_dim=128, dtype="bfloat16", prefix_granularity=32)
NAMESPACE = "a" * 64


def make_cache(
    blocks: int = 32,
    l2_bytes: int = 1 << 20,
    store: StoreOptions | None = None,
    geometry: CacheGeometry = GEOMETRY,
    namespace: str = NAMESPACE,
    prefix_caching: bool = True,
) -> KVCache:
    return KVCache(DeviceArena(geometry, blocks), namespace, l2_bytes, store, prefix_caching)


def text(pages: int, seed: int = 0, granularity: int = P, extra: int = 1) -> list[int]:
    """``pages`` full pages and ``extra`` tokens more."""
    source = random.Random(seed)
    return [source.randrange(50_000) for _ in range(pages * granularity + extra)]


def expected(cache: KVCache, digest: bytes) -> torch.Tensor:
    """The bytes ``[fields, field_bytes]`` that the model would compute for a page."""
    plan = cache.arena.plan.groups[0]
    return _expected(plan.fields, plan.field_bytes, digest)


@functools.lru_cache(maxsize=128)
def _expected(fields: int, field_bytes: int, digest: bytes) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # Every bit pattern, NaN included: what is cached is bytes, not numbers.
    return torch.randint(0, 256, (fields, field_bytes), dtype=torch.uint8, generator=generator)


def compute(cache: KVCache, allocation: Allocation, chain: Sequence[bytes]) -> None:
    """Fill the pages that were not cached, as a forward pass would."""
    first = allocation.cached_tokens // cache.granularity
    for page in range(first, len(chain)):
        cache.arena.fields(0)[:, allocation.block_ids[page]] = expected(cache, chain[page])


def wrong_pages(cache: KVCache, allocation: Allocation, chain: Sequence[bytes], pages: int) -> list[int]:
    """Which of the first pages do not hold what the model would have computed."""
    fields = cache.arena.fields(0)
    return [
        page
        for page in range(pages)
        if not torch.equal(fields[:, allocation.block_ids[page]], expected(cache, chain[page]))
    ]


def serve(cache: KVCache, tokens: Sequence[int], fetch: bool = False, seconds: float = 10) -> Allocation:
    """Admit, compute, publish and free a prompt as the engine does; returns the allocation for its figures."""
    chain = cache.chain(tokens)
    fetching = cache.start_fetch(chain) if fetch else None
    if fetching is not None:
        poll_until(cache, lambda: fetching.done, seconds)
    allocation = cache.admit(chain, len(tokens), fetching)
    assert allocation is not None
    assert not wrong_pages(cache, allocation, chain, allocation.cached_tokens // cache.granularity)
    compute(cache, allocation, chain)
    cache.publish(allocation, chain, len(tokens))
    cache.free(allocation)
    return allocation


def poll_until(cache: KVCache, done: Callable[[], bool], seconds: float = 10) -> float:
    """Poll as an idle engine does; returns how long it took, TimeoutError after ``seconds``."""
    started = time.monotonic()
    while True:
        cache.poll()
        waited = time.monotonic() - started
        if done():
            return waited
        if waited > seconds:
            raise TimeoutError(f"not in {seconds} s; {cache.store_state()}, {cache.stats().store}")
        time.sleep(0.002)
