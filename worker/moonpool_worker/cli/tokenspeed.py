"""TokenSpeed's flags: what each becomes here, or why it cannot be honoured. None is ignored.

The table knows the flags of TokenSpeed 0.1.1 that our command line does not have under the same name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


class FlagError(Exception):
    """One sentence that begins with the flag."""


@dataclass(frozen=True, slots=True)
class Row:
    """One flag. ``takes`` says whether a value follows; ``becomes`` gives our arguments, or raises ValueError with why.

    ``meaning`` is for the documentation.
    """

    flag: str
    takes: bool
    becomes: Callable[[str], list[str]]
    meaning: str


def _renamed(flag: str, ours: str, convert: Callable[[str], str] = str, note: str = "") -> Row:
    return Row(flag, True, lambda value: [ours, convert(value)], f"`{ours}`{note}")


def _switch(flag: str, *ours: str) -> Row:
    return Row(flag, False, lambda value: list(ours), f"`{' '.join(ours)}`")


def _always(flag: str, why: str) -> Row:
    return Row(flag, False, lambda value: [], f"taken: {why}")


def _only(flag: str, allowed: str, why: str) -> Row:
    def check(value: str) -> list[str]:
        if value != allowed:
            raise ValueError(f"only {allowed} is possible here: {why}")
        return []

    return Row(flag, True, check, f"only `{allowed}`: {why}")


def _refused(why: str, *flags: str) -> list[Row]:
    """A flag that ends in ``=`` takes a value."""

    def refuse(value: str) -> list[str]:
        raise ValueError(why)

    return [Row(flag.rstrip("="), flag.endswith("="), refuse, f"refused: {why}") for flag in flags]


def _gigabytes(value: str) -> str:
    """Decimal, as TokenSpeed counts them."""
    return str(int(_number(value) * 10**9))


def _milliseconds(value: str) -> str:
    return f"{round(_number(value) * 1000)}ms"


def _number(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is no number") from None
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is no finite number")
    return number


def _chunk(value: str) -> str:
    if value.strip() == "-1":
        raise ValueError("-1 cannot be honoured: a step always has a budget of tokens here, so give one")
    return value


def _host_memory(value: str) -> list[str]:
    # 0 means "by the ratio", there as well as here without a size.
    return [] if _number(value) == 0 else ["--l2-size", _gigabytes(value)]


def _backend(value: str) -> list[str]:
    if value != "mooncake":
        raise ValueError(f"{value!r} is not possible here: L3 is a Mooncake store")
    return []


def _store(text: str) -> list[str]:
    """The JSON object beside ``--kvstore-storage-backend mooncake``, and TokenSpeed's environment."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as failure:
        raise ValueError(f"it is not valid JSON: {failure}") from failure
    if not isinstance(config, dict):
        raise ValueError("it must be a JSON object")
    unknown = config.keys() - {
        "master_server_address", "client_server_address", "tenant_id", "protocol", "device_name",
        "metadata_server", "global_segment_size", "local_hostname",
    }  # fmt: skip
    if unknown:
        raise ValueError(f"the key {sorted(unknown)[0]!r} is not known")
    if config.get("metadata_server", "P2PHANDSHAKE") != "P2PHANDSHAKE":
        raise ValueError("metadata_server can only be P2PHANDSHAKE: there is no metadata service")
    if str(config.get("global_segment_size", 0)) != "0":
        raise ValueError("global_segment_size can only be 0: a worker gives the store no memory, the KVStore does")
    if config.get("local_hostname"):
        raise ValueError("local_hostname cannot be set: the pod's own address (POD_IP) is used")
    master = config.get("master_server_address") or config.get("client_server_address")
    master = master or os.environ.get("MOONCAKE_MASTER")
    if not master:
        raise ValueError("master_server_address is missing")
    arguments = ["--l3-master", str(master)]
    for key, ours in (("tenant_id", "--l3-tenant"), ("protocol", "--l3-protocol"), ("device_name", "--l3-device")):
        if config.get(key):
            arguments += [ours, str(config[key])]
    return arguments


_ONE_DEVICE = "a replica is one process on one device here; more throughput is more replicas"
_GRAPHS = "there are no CUDA graphs here"
_KERNELS = "kernels are chosen by --attention-backend alone"
_SPECULATION = "there is no speculative decoding here"
_SPLIT = "prefill and decode run in the same worker"
_MODEL = "MODEL is one path that holds everything"
_NUMERICS = "for a fixed batch shape results are the same bit for bit without it"
_ROLLOUT = "weights change by a rollout of the operator, which proves that no stale KV is left"
_OBSERVE = "see moonpool:* at /metrics, and --log-request-stats"
_MULTIMODAL = "models take text only here"
_GRAMMAR = "there is no structured output here"

TABLE: tuple[Row, ...] = (
    Row("--model", True, lambda value: [value], "the argument MODEL"),
    Row("--model-path", True, lambda value: [value], "the argument MODEL"),
    _renamed("--served-model-name", "--served-name"),
    _renamed("--max-num-seqs", "--max-running"),
    _renamed("--chunked-prefill-size", "--max-batch-tokens", _chunk, "; -1 is refused"),
    _renamed("--max-total-tokens", "--l1-tokens"),
    _switch("--enable-prefix-caching", "--prefix-caching"),
    _switch("--disable-prefix-caching", "--no-prefix-caching"),
    _renamed("--kvstore-ratio", "--l2-ratio"),
    Row("--kvstore-size", True, _host_memory, "`--l2-size`, in units of 10⁹ bytes; 0: by the ratio"),
    _switch("--disable-kvstore", "--l2-size", "0"),
    Row("--kvstore-storage-backend", True, _backend, "`mooncake` alone, with the next flag; `memory` is refused"),
    Row(
        "--kvstore-storage-backend-extra-config",
        True,
        _store,
        "`--l3-master`, `--l3-tenant`, `--l3-protocol`, `--l3-device`; other keys are refused",
    ),
    _renamed("--kvstore-prefetch-min-pages", "--prefetch-min-pages"),
    _renamed("--kvstore-prefetch-timeout-base-s", "--prefetch-timeout-base", _milliseconds, ", in seconds"),
    _renamed("--kvstore-prefetch-timeout-per-page-s", "--prefetch-timeout-per-page", _milliseconds, ", in seconds"),
    _renamed("--kvstore-prefetch-batch-pages", "--prefetch-batch-pages"),
    _switch("--enable-log-request-stats", "--log-request-stats"),
    _switch("--no-enable-log-request-stats", "--no-log-request-stats"),
    _only("--kv-cache-dtype", "auto", "KV has the data type of the weights"),
    _only("--kv-cache-quant-method", "none", "KV is not quantized"),
    _only("--mamba-ssm-dtype", "float32", "recurrent states are float32"),
    _only("--load-format", "auto", "the format is read from the files"),
    _only("--tokenizer-mode", "auto", "the tokenizer comes with the model"),
    _only("--stream-interval", "1", "every token is sent at once"),
    _only("--log-requests-level", "0", "texts are never logged"),
    _only("--metrics-reporters", "prometheus", "metrics are at /metrics"),
    _only("--grammar-backend", "none", _GRAMMAR),
    _only("--disaggregation-mode", "null", _SPLIT),
    *(
        _only(flag, "1", _ONE_DEVICE)
        for flag in (
            "--tensor-parallel-size", "--tp", "--attn-tp-size", "--dense-tp-size", "--moe-tp-size",
            "--attn-head-tp-size", "--lm-head-tp-size", "--data-parallel-size", "--pipeline-parallel-size",
            "--expert-parallel-size", "--ep-size", "--decode-context-parallel-size",
            "--prefill-context-parallel-size", "--nnodes", "--nprocs-per-node", "--world-size",
        )
    ),
    _only("--node-rank", "0", _ONE_DEVICE),
    _always("--enable-metrics", "/metrics is always there"),
    _always("--enable-mixed-batch", "prompts and decodes always share a step"),
    _always("--enable-output-logprobs", "log probabilities are always possible"),
    _always("--disable-overlap-schedule", "steps never overlap"),
    _always("--enforce-eager", _GRAPHS),
    _always("--disable-prefill-graph", _GRAPHS),
    _always("--disable-kda-prefill-graph", _GRAPHS),
    _always("--no-enable-log-requests", "texts are never logged"),
    _always("--no-trust-remote-code", "no code of a checkpoint is ever run"),
    _always("--no-skip-tokenizer-init", "the tokenizer is always loaded"),
    _always("--language-model-only", _MULTIMODAL),
    *_refused("texts are never logged; --log-request-stats logs figures", "--enable-log-requests"),
    *_refused("no code of a checkpoint is ever run", "--trust-remote-code"),
    *_refused("give L1's size in --l1-size or --l1-tokens", "--gpu-memory-utilization="),
    *_refused("a step's budget is --max-batch-tokens", "--max-prefill-tokens="),
    *_refused("L1 and L2 are copied in one way", "--kvstore-io-backend="),
    *_refused(
        "a preempted request goes to L2: size that",
        "--retraction-snapshot-host-gb=", "--retraction-snapshot-ratio=", "--retraction-snapshot-max-requests=",
        "--debug-force-retraction-interval=",
    ),
    *_refused("the device is found, kernels are chosen by --attention-backend", "--device="),
    *_refused("KV is not quantized", "--quantization-param-path="),
    *_refused(
        _MODEL, "--tokenizer=", "--skip-tokenizer-init", "--revision=", "--hf-overrides=", "--download-dir=",
        "--ext-yaml=", "--weight-loader-prefetch-num-threads=", "--disable-weight-loader-prefetch-checkpoints",
        "--engram-host-table", "--engram-host-table-dir=", "--engram-host-table-layout=",
    ),
    *_refused("a request says what it wants", "--preferred-sampling-params=", "--seed=", "--stream-output"),
    *_refused(_OBSERVE, "--log-level=", "--decode-log-interval=", "--app-key=", "--enable-nvtx",
              "--enable-nan-detection"),
    *_refused(
        _ONE_DEVICE, "--zmq-msgpack", "--data-parallel-address=", "--data-parallel-rpc-port=", "--zmq-engine-index=",
        "--distributed-timeout-seconds=", "--base-gpu-id=", "--gpu-id-step=", "--pp-layer-partition=",
        "--load-balance-method=", "--load-watch-interval=", "--init-expert-location=",
        "--ep-num-redundant-experts=", "--ep-dispatch-algorithm=", "--eplb-algorithm=",
        "--expert-distribution-recorder-mode=", "--enable-eplb", "--eplb-rebalance-num-iterations=",
        "--eplb-rebalance-layers-per-chunk=", "--all2all-backend=", "--deepep-mode=", "--dist-init-addr=",
        "--enable-expert-parallel", "--disable-nccl-nvls", "--disable-symm-mem", "--comm-fusion-max-num-tokens=",
        "--enable-allreduce-fusion", "--dp-sampling", "--dp-sampling-min-bs=", "--disable-sampling-tp-sync",
        "--low-latency-max-num-tokens-per-gpu=", "--disable-flashinfer-cutlass-moe-fp4-allgather",
    ),
    *_refused(
        _KERNELS, "--dense-gemm-backend=", "--moe-backend=", "--moe-mxfp4-fp8-activation", "--kda-backend=",
        "--skip-softmax-threshold=", "--sampling-backend=", "--sampling-stream=", "--attention-use-fp4-indexer-cache=",
        "--deepseek-v4-mega-moe-max-num-tokens=", "--deepseek-v4-indexer-prefill-max-logits-mb=",
        "--deepseek-v4-prefill-chunk-size=", "--mla-disable-ragged", "--disable-pdl", "--disable-autotune",
        "--disable-flashinfer-autotune", "--disable-tf32", "--mla-chunk-multiplier=", "--input-logprob-chunk-tokens=",
    ),
    *_refused(
        _GRAPHS, "--disable-cuda-graph-padding", "--enable-cudagraph-gc", "--max-cudagraph-capture-size=",
        "--cudagraph-capture-sizes=", "--prefill-graph-max-tokens=", "--prefill-graph-capture-token-sizes=",
        "--prefill-graph-capture-sizes=", "--prefill-graph-capture-batch-sizes=",
        "--disable-cudagraph-memory-reserve", "--enable-memory-saver",
    ),
    *_refused(
        _GRAMMAR, "--reasoning-parser=", "--grammar-compile-timeout-secs=", "--grammar-compile-max-retries=",
        "--disable-any-whitespace", "--disable-capturable-grammar",
    ),
    *_refused(
        _SPECULATION, "--draft-moe-backend=", "--drafter-attention-backend=", "--draft-model-path-use-base",
        "--speculative-config=", "--speculative-algorithm=", "--speculative-draft-model-path=",
        "--speculative-draft-model-quantization=", "--speculative-num-steps=", "--speculative-eagle-topk=",
        "--speculative-num-draft-tokens=", "--enable-speculative-sampling", "--spec-reject-draft-prob-threshold=",
        "--eagle3-layers-to-capture=", "--disable-replay-ssm", "--enable-replay-ssm",
    ),
    *_refused(
        _NUMERICS, "--tp-batch-invariant=", "--force-deterministic-rsag", "--batch-invariant-collectives",
        "--numerics=", "--yarn-ramp-mask-device=", "--mla-lora-scale=", "--layer-boundary-norm=", "--router-topk=",
        "--logprob-order=", "--moe-combine-order=", "--dsa-slot-order=",
    ),
    *_refused(_MULTIMODAL, "--mm-attention-backend=", "--mm-encoder-tp-mode="),
    *_refused(
        _SPLIT, "--disaggregation-bootstrap-port=", "--disaggregation-transfer-backend=",
        "--disaggregation-ib-device=", "--disaggregation-layerwise-interval=", "--pdlb-url=",
    ),
    *_refused(
        _ROLLOUT, "--rl-control-port=", "--rl-control-host=", "--rl-control-api-key=", "--model-update-config=",
        "--model-update-sdk-module=", "--model-update-engine-type=", "--model-update-draft-weights=",
    ),
)  # fmt: skip


#: A longer value is not repeated in an error.
_SHOWN = 40


def translate(arguments: Sequence[str]) -> list[str]:
    """A command line for ``serve`` in our own words; other commands' are returned as they are.

    Raises FlagError for what cannot be honoured, and for an option that is given under two names.
    """
    if list(arguments[:1]) != ["serve"]:
        return list(arguments)
    rows = {row.flag: row for row in TABLE}
    translated: list[str] = []
    ours: dict[str, str] = {}
    for flag, value, words in _words(arguments, rows):
        row = rows.get(flag)
        if row is None:
            result = words
        else:
            try:
                result = row.becomes(value)
            except ValueError as failure:
                shown = f"{flag} {value}" if value and len(value) <= _SHOWN else flag
                raise FlagError(f"{shown}: {failure}") from failure
        for option in filter(_is_option, result):
            positive = option.replace("--no-", "--", 1).split("=", 1)[0]
            first = ours.setdefault(positive, flag)
            if first != flag:
                raise FlagError(f"{first} and {flag} both set {positive}: give one of them")
        translated += result
    return translated


def _words(arguments: Sequence[str], rows: dict[str, Row]) -> Iterator[tuple[str, str, list[str]]]:
    """Each flag with its value ("" if none) and the words that it was; other words by themselves."""
    rest = iter(arguments)
    for word in rest:
        flag, separator, value = word.partition("=")
        row = rows.get(flag)
        if row is None or not row.takes or separator:
            if row is not None and not row.takes and separator:
                raise FlagError(f"{flag}: it takes no value")
            yield flag, value, [word]
            continue
        following = next(rest, None)
        if following is None:
            raise FlagError(f"{flag}: its value is missing")
        yield flag, following, [word, following]


def _is_option(word: str) -> bool:
    return word.startswith("--")
