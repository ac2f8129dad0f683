"""L1 and L2 as the engine uses them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from moonpool_worker.cache.kv_cache import KVCache
from moonpool_worker.cache.stats import TierTokens

from tests.worker.cache.texts import BIG, P, compute, make_cache, serve, text, wrong_pages


def test_a_second_request_hits_in_l1() -> None:
    cache = make_cache()
    assert serve(cache, text(3)).cached == TierTokens()
    assert serve(cache, text(3)).cached == TierTokens(l1=3 * P)


def test_the_last_token_is_always_computed() -> None:
    cache = make_cache()
    serve(cache, text(3, extra=0))
    assert serve(cache, text(3, extra=0)).cached_tokens == 2 * P
    assert serve(cache, text(3, extra=1)).cached_tokens == 3 * P


def test_a_block_evicted_from_l1_comes_from_l2_bit_for_bit() -> None:
    cache = make_cache(blocks=8)
    serve(cache, text(5, seed=1))
    serve(cache, text(5, seed=2))
    assert serve(cache, text(5, seed=1)).cached == TierTokens(l1=P, l2=4 * P)
    assert cache.stats().l1_evictions["capacity"] > 0


@pytest.mark.parametrize("pages", [1, 7, 8, 9, 30])
def test_copies_of_a_real_geometry_are_bit_exact(pages: int) -> None:
    cache = make_cache(blocks=40, l2_bytes=16 << 20, geometry=BIG)
    tokens = text(pages, granularity=16)
    serve(cache, tokens)
    cache.flush({"l1"})
    assert serve(cache, tokens).cached.l2 == pages * 16


def test_l2_remembers_what_l1_keeps_hitting() -> None:
    cache = make_cache(blocks=16, l2_bytes=12 * 4096)
    serve(cache, text(3, seed=1))
    for seed in range(10, 20):
        serve(cache, text(3, seed=seed))
        serve(cache, text(3, seed=1))
    cache.flush({"l1"})
    assert serve(cache, text(3, seed=1)).cached == TierTokens(l2=3 * P)


def test_what_l2_forgot_is_spilled_when_l1_lets_it_go() -> None:
    cache = make_cache(blocks=8)
    serve(cache, text(3, seed=1))
    cache.flush({"l2"})
    serve(cache, text(7, seed=2, extra=0))
    assert serve(cache, text(3, seed=1)).cached == TierTokens(l2=3 * P)


def test_admit_is_all_or_nothing() -> None:
    cache = make_cache(blocks=8)
    running = cache.admit([], 5 * P)
    assert running is not None
    before = cache.stats()
    assert cache.admit(cache.chain(text(3)), 3 * P) is None
    after = cache.stats()
    assert (before.l1_free_blocks, before.l1_cached_blocks) == (after.l1_free_blocks, after.l1_cached_blocks)
    cache.free(running)


def test_own_hits_do_not_count_as_room() -> None:
    cache = make_cache(blocks=6)
    serve(cache, text(3))
    running = cache.admit([], 2 * P)
    assert running is not None
    # Five usable blocks: two run, three are the hits themselves, so a fourth block has nowhere to be.
    assert cache.admit(cache.chain(text(3)), 3 * P + 1) is None
    cache.free(running)
    assert serve(cache, text(3)).cached_tokens == 3 * P


def test_extend_grows_in_place_and_fails_whole() -> None:
    cache = make_cache(blocks=8)
    allocation = cache.admit([], 1)
    assert allocation is not None
    assert cache.extend(allocation, P)
    assert cache.extend(allocation, 7 * P)
    assert allocation.block_ids == list(range(1, 8))
    assert not cache.extend(allocation, 7 * P + 1)
    assert len(allocation.block_ids) == 7
    cache.free(allocation)
    assert cache.available_blocks == 7


def test_equal_pages_computed_at_once_are_kept_once() -> None:
    cache = make_cache()
    tokens = text(3)
    chain = cache.chain(tokens)
    both = [cache.admit(chain, len(tokens)) for _ in range(2)]
    for allocation in both:
        assert allocation is not None
        compute(cache, allocation, chain)
        cache.publish(allocation, chain, len(tokens))
    assert cache.stats().l1_cached_blocks == 3
    assert cache.stats().duplicate_blocks == 3
    for allocation in both:
        assert allocation is not None
        cache.free(allocation)
    assert cache.available_blocks == cache.usable_blocks
    assert cache.stats().l1_free_blocks == cache.usable_blocks - 3


def test_only_computed_pages_are_published() -> None:
    cache = make_cache()
    tokens = text(3)
    chain = cache.chain(tokens)
    allocation = cache.admit(chain, len(tokens))
    assert allocation is not None
    compute(cache, allocation, chain)
    cache.publish(allocation, chain, 2 * P - 1)
    assert cache.probe(chain).blocks == 1
    cache.publish(allocation, chain, 2 * P)
    assert (cache.probe(chain).l1, cache.probe(chain).l2) == (2, 0)
    cache.free(allocation)


def test_a_running_requests_blocks_survive_a_flush() -> None:
    cache = make_cache()
    tokens = text(3)
    chain = cache.chain(tokens)
    serve(cache, tokens)
    running = cache.admit(chain, len(tokens))
    assert running is not None
    assert cache.flush({"l1", "l2"}) == {"l1_blocks": 0, "l2_blocks": 3}
    assert not wrong_pages(cache, running, chain, 3)
    cache.free(running)
    assert cache.flush({"l1"}) == {"l1_blocks": 3}
    with pytest.raises(ValueError, match="choose from l1, l2"):
        cache.flush({"l3"})


def test_damaged_l2_bytes_are_a_miss_with_a_reason() -> None:
    cache = make_cache()
    tokens = text(3)
    serve(cache, tokens)
    cache.flush({"l1"})
    host = cache._host
    assert host is not None
    node = host.index.get(0, cache.chain(tokens)[1])
    assert node is not None
    host.slot(0, node.slot)[200] ^= 1
    node.checked = False
    assert serve(cache, tokens).cached == TierTokens(l2=P)
    assert cache.stats().header_mismatches == {"l2.checksum": 1}
    cache.flush({"l1"})
    assert serve(cache, tokens).cached == TierTokens(l2=3 * P)


def test_a_salt_separates() -> None:
    cache = make_cache()
    tokens = text(3)
    serve(cache, tokens)
    assert cache.probe(cache.chain(tokens, b"tenant")).blocks == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = make_cache(prefix_caching=False)
    serve(cache, text(3))
    assert serve(cache, text(3)).cached_tokens == 0
    assert cache.stats().l1_free_blocks == cache.usable_blocks


def test_without_l2_eviction_forgets() -> None:
    cache = make_cache(blocks=8, l2_bytes=0)
    serve(cache, text(5, seed=1))
    serve(cache, text(5, seed=2))
    assert serve(cache, text(5, seed=1)).cached_tokens == P


def test_freeing_twice_is_a_bug() -> None:
    cache = make_cache()
    allocation = cache.admit([], 1)
    assert allocation is not None
    cache.free(allocation)
    with pytest.raises(RuntimeError, match="freed twice"):
        cache.free(allocation)


def test_a_new_request_gets_consecutive_blocks_behind_its_hit() -> None:
    cache = make_cache(blocks=64)
    serve(cache, text(3))
    tokens = text(3) + text(4, seed=9)
    allocation = cache.admit(cache.chain(tokens), len(tokens))
    assert allocation is not None
    first = allocation.block_ids[0]
    assert allocation.block_ids == list(range(first, first + len(allocation.block_ids)))
    cache.free(allocation)


def test_too_small_an_l2_says_what_a_slot_takes() -> None:
    with pytest.raises(ValueError, match="one slot takes 4096 bytes"):
        make_cache(l2_bytes=4095)


def test_another_namespace_cannot_be_opened() -> None:
    with pytest.raises(ValueError, match="not for blocks"):
        make_cache().open_store("b" * 64, "tenant", "127.0.0.1:1")


def test_close_gives_the_memory_back() -> None:
    cache: KVCache = make_cache()
    serve(cache, text(3))
    cache.close()


def test_the_l3_process_does_not_load_torch() -> None:
    code = "import sys, moonpool_worker.cache.store_tier.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
