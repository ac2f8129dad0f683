"""Prometheus metrics of one worker, all named ``moonpool:*``.

What the server sees of requests is counted as it happens; what cache and engine counted is read when scraped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool_worker.cache.events.publisher import EventPublisher
from moonpool_worker.cache.stats import CacheStats
from moonpool_worker.server.request_log import RequestStats

if TYPE_CHECKING:
    from moonpool_worker.server.worker import Worker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_E2E = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
DRAIN_STATES = ("serving", "announced", "refusing", "drained")
_STORE_STATES = ("off", "closed", "opening", "open", "failing")


class Metrics:
    """``requests`` counts API calls by outcome: success, client_gone, slow_reader, cut, error, refused."""

    def __init__(self, worker: Worker) -> None:
        # A *_created series for each counter doubles what is scraped and says nothing that boot does not.
        disable_created_metrics()
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("moonpool:requests", "API calls by outcome.", ["outcome"], registry=registry)
        self.prompt_tokens = Counter("moonpool:prompt_tokens", "Tokens of prompts.", registry=registry)
        self.generation_tokens = Counter("moonpool:generation_tokens", "Tokens generated.", registry=registry)
        self.ttft = Histogram(
            "moonpool:time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_TTFT,
            registry=registry,
        )
        self.itl = Histogram(
            "moonpool:inter_token_latency_seconds", "Between two tokens of a choice.", buckets=_ITL, registry=registry
        )
        self.e2e = Histogram(
            "moonpool:e2e_request_latency_seconds", "From arrival to the last token.", buckets=_E2E, registry=registry
        )
        self.queue = Histogram(
            "moonpool:request_queue_time_seconds",
            "From a sequence's arrival to its admission, the wait for L3 included.",
            buckets=_TTFT,
            registry=registry,
        )
        self.per_token = Histogram(
            "moonpool:request_time_per_output_token_seconds",
            "Mean over a sequence's tokens but the first.",
            buckets=_ITL,
            registry=registry,
        )
        self.prefill = Histogram(
            "moonpool:request_prefill_time_seconds",
            "From admission to the first token.",
            buckets=_TTFT,
            registry=registry,
        )
        self.fetch = Histogram(
            "moonpool:l3_wait_seconds",
            "What sequences that looked into L3 waited for it.",
            buckets=_TTFT,
            registry=registry,
        )
        self.preempted = Histogram(
            "moonpool:request_preempted_seconds",
            "What preempted sequences waited for room.",
            buckets=_E2E,
            registry=registry,
        )
        self.step = Histogram(
            "moonpool:engine_step_seconds", "One forward pass with its sampling.", buckets=_STEP, registry=registry
        )
        self.drain_finished = Gauge("moonpool:drain_requests_finished", "Finished during the drain.", registry=registry)
        self.drain_cut = Gauge("moonpool:drain_requests_cut", "Cut at the drain's deadline.", registry=registry)
        for outcome in ("success", "client_gone", "slow_reader", "cut", "error", "refused"):
            self.requests.labels(outcome)
        registry.register(_WorkerState(worker))

    def observe_request(self, stats: RequestStats) -> None:
        """A sequence is over."""
        if stats.commit_ts:
            self.queue.observe(stats.queue_ms / 1000)
        if stats.ttft_ms:
            self.prefill.observe(stats.prefill_ms / 1000)
        if stats.decode_tps:
            self.per_token.observe(1 / stats.decode_tps)
        if stats.fetch_ms:
            self.fetch.observe(stats.fetch_ms / 1000)
        if stats.preempt_count:
            self.preempted.observe(stats.preempt_ms / 1000)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _WorkerState(Collector):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def describe(self) -> list[Metric]:
        # Nothing can be said before the model is loaded; an empty list keeps registration from collecting.
        return []

    def collect(self) -> Iterator[Metric]:
        worker = self._worker
        yield _states("moonpool:drain_state", "How far the drain is.", DRAIN_STATES, worker.drain.state)
        yield CounterMetricFamily(
            "moonpool:requests_overloaded", "API calls refused with 429: too much at once.", worker.load.refused
        )
        yield GaugeMetricFamily("moonpool:ready", "Whether /ready says yes.", float(worker.readiness.check().ready))
        supervised = worker.settings.supervised
        yield CounterMetricFamily(
            "moonpool:engine_crashes", "Engine processes that crashed.", supervised.crashes if supervised else 0
        )
        loaded = worker.loaded
        if loaded is None:
            return
        info = GaugeMetricFamily(
            "moonpool:worker_info",
            "What this worker serves.",
            labels=["namespace", "weight_version", "model", "weights_digest", "dtype", "attention_backend", "boot"],
        )
        inputs = loaded.inputs
        info.add_metric(
            [
                loaded.namespace,
                inputs.weight_version,
                worker.model_name,
                inputs.weights_digest,
                inputs.dtype,
                inputs.attention_backend,
                worker.boot,
            ],
            1.0,
        )
        yield info
        engine = worker.engine
        if engine is None:
            return
        stats = engine.stats
        yield GaugeMetricFamily("moonpool:num_requests_running", "Sequences in the batch.", stats.running)
        yield GaugeMetricFamily("moonpool:num_requests_waiting", "Sequences that wait.", stats.waiting)
        yield CounterMetricFamily("moonpool:preemptions", "Sequences that gave their blocks back.", stats.preemptions)
        yield CounterMetricFamily(
            "moonpool:prefill_tokens", "Prompt tokens computed, not cached.", stats.prefill_tokens
        )
        if worker.cache_stats is not None:
            yield from _cache_metrics(worker.cache_stats)
        if loaded.events is not None:
            yield from _event_metrics(loaded.events)


def _cache_metrics(stats: CacheStats) -> Iterator[Metric]:
    hits = {"l1": stats.hit_tokens.l1, "l2": stats.hit_tokens.l2, "l3": stats.hit_tokens.l3}
    yield _counters("moonpool:prefix_cache_hits", "Prompt tokens taken from the cache.", "tier", hits)
    yield CounterMetricFamily(
        "moonpool:prefix_cache_queries", "Tokens of admitted prompts: hits and misses.", stats.prompt_tokens
    )
    yield CounterMetricFamily("moonpool:prefix_cache_misses", "Prompt tokens that were computed.", stats.miss_tokens)
    yield CounterMetricFamily("moonpool:cache_admissions_refused", "Admissions without room in L1.", stats.refused)
    yield CounterMetricFamily("moonpool:cache_published_blocks", "Blocks made findable.", stats.published_blocks)
    yield CounterMetricFamily(
        "moonpool:cache_duplicate_blocks", "Blocks computed although another had them.", stats.duplicate_blocks
    )
    usage = stats.l1_used_blocks / stats.l1_blocks if stats.l1_blocks else 0.0
    yield GaugeMetricFamily("moonpool:kv_cache_usage_perc", "Share of L1 that requests hold, 0 to 1.", usage)
    yield CounterMetricFamily("moonpool:cache_suspended", "Requests that made room by going to L2.", stats.suspended)
    yield CounterMetricFamily("moonpool:cache_resumed", "Requests that came back from L2.", stats.resumed)
    yield _group_pages(stats)
    blocks = {
        ("l1", "used"): stats.l1_used_blocks,
        ("l1", "free"): stats.l1_free_blocks,
        ("l1", "cached"): stats.l1_cached_blocks,
        ("l1", "evictable"): stats.l1_evictable_blocks,
        ("l1", "total"): stats.l1_blocks,
        ("l2", "free"): stats.l2_free_slots,
        ("l2", "cached"): stats.l2_cached_blocks,
        ("l2", "lent"): stats.l2_lent_slots,
        ("l2", "quarantined"): stats.l2_quarantined_slots,
        ("l2", "total"): stats.l2_slots,
    }
    gauge = GaugeMetricFamily("moonpool:cache_blocks", "Blocks by tier and state.", labels=["tier", "state"])
    for (tier, state), value in blocks.items():
        gauge.add_metric([tier, state], value)
    yield gauge
    evictions = CounterMetricFamily(
        "moonpool:cache_evictions", "Blocks forgotten, by tier and reason.", labels=["tier", "reason"]
    )
    for tier, counter in (("l1", stats.l1_evictions), ("l2", stats.l2_evictions)):
        for reason, value in counter.items():
            evictions.add_metric([tier, reason], value)
    yield evictions
    copied = CounterMetricFamily("moonpool:l2_copied_bytes", "Bytes between L1 and L2.", labels=["direction"])
    seconds = CounterMetricFamily("moonpool:l2_copy_seconds", "Seconds spent copying them.", labels=["direction"])
    copied.add_metric(["write"], stats.l2_write_bytes)
    copied.add_metric(["read"], stats.l2_read_bytes)
    seconds.add_metric(["write"], stats.l2_write_seconds)
    seconds.add_metric(["read"], stats.l2_read_seconds)
    yield copied
    yield seconds
    yield CounterMetricFamily("moonpool:l2_writes_dropped", "Blocks without room in L2.", stats.l2_write_dropped)
    yield _counters(
        "moonpool:cache_header_mismatches",
        "Blocks that were not what was asked for.",
        "reason",
        stats.header_mismatches,
    )
    yield from _store_metrics(stats)


def _group_pages(stats: CacheStats) -> Metric:
    family = GaugeMetricFamily("moonpool:cache_pages", "Pages that can be found.", labels=["tier", "group", "state"])
    for group in stats.groups:
        for tier, pages, idle in (
            ("l1", group.l1_pages, group.l1_idle_pages),
            ("l2", group.l2_pages, group.l2_idle_pages),
        ):
            family.add_metric([tier, group.name, "idle"], idle)
            family.add_metric([tier, group.name, "referred"], pages - idle)
    return family


def _store_metrics(stats: CacheStats) -> Iterator[Metric]:
    store = stats.store
    yield _states("moonpool:l3_state", "State of L3.", _STORE_STATES, stats.store_state)
    yield _states("moonpool:l3_breaker", "Breaker before L3.", ("closed", "open", "half-open"), stats.breaker)
    yield CounterMetricFamily("moonpool:l3_breaker_opened", "Times the breaker opened.", store.breaker_opened)
    errors = CounterMetricFamily(
        "moonpool:l3_errors", "Answers of the store that were errors.", labels=["operation", "code"]
    )
    for operation, codes in (("get", store.get_errors), ("put", store.put_errors), ("exist", store.exist_errors)):
        for code, value in codes.items():
            errors.add_metric([operation, code], value)
    yield errors
    for name, text, values in (
        ("moonpool:l3_calls", "Calls to the store.", (store.get_calls, store.put_calls, store.exist_calls)),
        ("moonpool:l3_call_seconds", "Seconds in them.", (store.get_seconds, store.put_seconds, store.exist_seconds)),
    ):
        yield _counters(name, text, "operation", dict(zip(("get", "put", "exist"), values, strict=True)))
    for name, text, pair in (
        ("moonpool:l3_blocks", "Blocks read from and written to the store.", (store.get_blocks, store.put_blocks)),
        ("moonpool:l3_bytes", "Bytes of them.", (store.get_bytes, store.put_bytes)),
    ):
        yield _counters(name, text, "operation", dict(zip(("get", "put"), pair, strict=True)))
    yield _counters("moonpool:l3_put_dropped", "Blocks not written, by reason.", "reason", store.put_dropped)
    yield _counters("moonpool:l3_fetches", "Fetches by how they ended.", "outcome", store.fetches)
    yield _counters("moonpool:l3_unread", "Requests not looked up in L3, by reason.", "reason", store.unread)
    yield GaugeMetricFamily("moonpool:l3_bandwidth_bytes_per_second", "Measured; 0: unknown.", store.bandwidth)
    yield GaugeMetricFamily("moonpool:l3_latency_seconds", "Of a call, besides the bytes; measured.", store.latency)
    yield GaugeMetricFamily("moonpool:prefill_tokens_per_second", "What L3 has to beat; measured.", store.prefill_rate)
    yield CounterMetricFamily("moonpool:l3_fetch_seconds", "Seconds requests waited for L3.", store.fetch_seconds)
    yield CounterMetricFamily("moonpool:l3_late_blocks", "Blocks that came after the deadline.", store.late_blocks)
    yield CounterMetricFamily("moonpool:l3_negative_hits", "Lookups spared: known absent.", store.negative_hits)
    yield CounterMetricFamily("moonpool:l3_client_starts", "Client processes started.", store.client_starts)
    yield _counters("moonpool:l3_client_losses", "Client processes lost, by reason.", "reason", store.client_losses)
    yield GaugeMetricFamily("moonpool:l3_put_queue", "Blocks that wait to be written.", stats.put_queue)
    yield GaugeMetricFamily("moonpool:l3_fetches_active", "Fetches under way.", stats.fetches_active)


def _event_metrics(events: EventPublisher) -> Iterator[Metric]:
    batches = {"published": events.published, "dropped": events.dropped}
    yield _counters("moonpool:kv_event_batches", "Batches of KV events, by what became of them.", "state", batches)
    yield GaugeMetricFamily("moonpool:kv_event_queue", "Batches that wait to be sent.", events.queued)
    yield CounterMetricFamily("moonpool:kv_event_replays", "Times a subscriber asked for missed ones.", events.replays)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _states(name: str, text: str, states: tuple[str, ...], current: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state in states:
        family.add_metric([state], float(state == current))
    return family
