"""What `gpu_check` runs: each Triton kernel at sizes of real models, with its bytes and operations counted by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from moonpool_api.geometry import GroupGeometry, PlaneGeometry
from moonpool_worker.engine.batch import SequenceChunk, StateSlots

#: ``tiny`` is for the interpreter, ``small`` is compared with torch, ``full`` is timed.
SIZES = ("tiny", "small", "full")
PAGE = 16
CPU = torch.device("cpu")

Tensors = dict[str, torch.Tensor]


@dataclass
class Case:
    """``run(kernels, plan, tensors)`` is one launch; ``plan(kernels, device)`` is made once for all launches.

    ``moved`` bytes and ``operations`` are the least that a launch needs: each byte once. ``exact``: results are ids or
    copies, compared one by one.
    """

    tensors: Tensors
    run: Callable[[Any, Any, Tensors], torch.Tensor | tuple[torch.Tensor, ...]]
    moved: float
    operations: float = 0.0
    plan: Callable[[Any, torch.device], Any] = field(default=lambda kernels, device: None)
    exact: bool = False


class Maker:
    """Random tensors of one type on one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.itemsize = dtype.itemsize

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        # In float32 first: the interpreter's machine has no random numbers of every type.
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)

    def like_cache(self, *shape: int) -> torch.Tensor:
        """Large and of little variety: filling gigabytes with random numbers takes longer than reading them."""
        part = self.normal(1 << 16)
        count = torch.Size(shape).numel()
        return part.repeat(-(-count // part.numel()))[:count].view(shape)


def _pick(size: str, tiny: Any, small: Any, full: Any) -> Any:
    return dict(zip(SIZES, (tiny, small, full), strict=True))[size]


# -- rows --------------------------------------------------------------------------------------------------------------


def _norm(make: Maker, size: str, *, add: bool) -> Case:
    rows, hidden = _pick(size, (3, 96), (300, 8192), (32768, 8192))
    tensors = {"x": make.normal(rows, hidden), "weight": make.normal(hidden)}
    if add:
        tensors["residual"] = make.normal(rows, hidden)
        return Case(
            tensors,
            lambda k, _, t: k.add_rms_norm(t["x"], t["residual"], t["weight"], 1e-5),
            4 * rows * hidden * make.itemsize,
        )
    return Case(tensors, lambda k, _, t: k.rms_norm(t["x"], t["weight"], 1e-5), 2 * rows * hidden * make.itemsize)


def _rope(make: Maker, size: str) -> Case:
    rows, heads, dim = _pick(size, (3, 5, 32), (300, 72, 128), (32768, 72, 128))
    angle = torch.rand(rows, 1, dim // 2, device=make.device) * 6
    tensors = {"x": make.normal(rows, heads, dim), "cos": angle.cos().to(make.dtype), "sin": angle.sin().to(make.dtype)}
    return Case(tensors, lambda k, _, t: k.rope(t["x"], t["cos"], t["sin"]), 2 * rows * heads * dim * make.itemsize)


def _gated(make: Maker, size: str, name: str) -> Case:
    rows, width = _pick(size, (3, 96), (300, 14336), (16384, 14336))
    moved = 3 * rows * width * make.itemsize
    return Case({"x": make.normal(rows, 2 * width)}, lambda k, _, t: getattr(k, name)(t["x"]), moved)


def _sampling(make: Maker, size: str) -> Case:
    rows, vocab = _pick(size, (4, 300), (64, 151936), (256, 151936))
    tensors = {
        "logits": make.normal(rows, vocab, dtype=torch.float32) * 3,
        "temperature": torch.linspace(0, 1.5, rows),
        "top_k": (torch.arange(rows) % 3 * 20).int(),
        "top_p": torch.where(torch.arange(rows) % 2 == 0, 1.0, 0.9),
        "seeds": torch.arange(rows) * 7919,
        "draws": torch.arange(rows).int(),
    }
    tensors = {name: tensor.to(make.device) for name, tensor in tensors.items()}
    return Case(tensors, lambda k, _, t: k.sample(*t.values()), rows * vocab * 4, exact=True)


# -- history groups ----------------------------------------------------------------------------------------------------


def _group(row: tuple[int, ...], window: int | None) -> GroupGeometry:
    plane = PlaneGeometry(name="rows", shape=row, dtype="bfloat16")
    return GroupGeometry(name="group", block_tokens=PAGE, layers=(0,), planes=(plane,), window=window)


def _chunks(shape: list[tuple[int, int]]) -> tuple[list[SequenceChunk], int]:
    """Over blocks that lie anywhere, and how many blocks there must be."""
    counts = [-(-(start + tokens) // PAGE) for start, tokens in shape]
    blocks = list(range(1, sum(counts) + 1))
    random.Random(0).shuffle(blocks)
    chunks = []
    for (start, tokens), count in zip(shape, counts, strict=True):
        chunks.append(SequenceChunk([0] * tokens, start, (blocks[:count],)))
        blocks = blocks[count:]
    return chunks, sum(counts) + 1


def _seen(shape: list[tuple[int, int]], window: int | None) -> tuple[int, int]:
    """Rows of the cache that are read, and pairs of a query and a position that it sees."""
    rows = sum(min(start + tokens, (window or start + tokens) + tokens) for start, tokens in shape)
    pairs = sum(min(at + 1, window or at + 1) for start, tokens in shape for at in range(start, start + tokens))
    return rows, pairs


def _paged(
    make: Maker,
    shape: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None = None,
    sinks: bool = False,
) -> Case:
    chunks, blocks = _chunks(shape)
    tokens = sum(count for _, count in shape)
    rows, pairs = _seen(shape, window)
    tensors = {
        "q": make.normal(tokens, heads, dim),
        "keys": make.like_cache(blocks, PAGE, kv_heads, dim),
        "values": make.like_cache(blocks, PAGE, kv_heads, dim).flip(0),
    }
    if sinks:
        tensors["sinks"] = make.normal(heads)
    group = _group((kv_heads, dim), window)
    return Case(
        tensors,
        lambda k, plan, t: k.attention(plan, t["q"], t["keys"], t["values"], sinks=t.get("sinks")),
        (2 * rows * kv_heads * dim + 2 * tokens * heads * dim) * make.itemsize,
        4 * pairs * heads * dim,
        lambda k, device: k.plan(chunks, 0, group, device),
    )


def _latent(make: Maker, shape: list[tuple[int, int]], heads: int, rank: int, turned: int) -> Case:
    chunks, blocks = _chunks(shape)
    tokens = sum(count for _, count in shape)
    rows, pairs = _seen(shape, None)
    tensors = {"q": make.normal(tokens, heads, rank + turned), "latent": make.like_cache(blocks, PAGE, rank + turned)}
    group = _group((rank + turned,), None)
    return Case(
        tensors,
        lambda k, plan, t: k.latent_attention(plan, t["q"], t["latent"], rank, scale=0.07),
        (rows * (rank + turned) + tokens * heads * (2 * rank + turned)) * make.itemsize,
        2 * pairs * heads * (2 * rank + turned),
        lambda k, device: k.plan(chunks, 0, group, device),
    )


def _decodes(size: str) -> list[tuple[int, int]]:
    return _pick(size, [(20, 1), (300, 1)], [(2000, 1), (7, 1), (900, 1)], [(8191, 1)] * 64)


def _write(make: Maker, size: str) -> Case:
    shape = _pick(size, [(3, 5)], [(100, 300)], [(0, 32768)])
    chunks, blocks = _chunks(shape)
    row = (8, 128)
    tensors = {"rows": make.normal(shape[0][1], *row), "cache": make.like_cache(blocks, PAGE, *row)}

    def write(kernels: Any, plan: Any, t: Tensors) -> torch.Tensor:
        kernels.write_rows(plan, t["cache"], t["rows"])
        return t["cache"]

    moved = 2 * tensors["rows"].numel() * make.itemsize
    group = _group(row, None)
    return Case(tensors, write, moved, plan=lambda k, device: k.plan(chunks, 0, group, device), exact=True)


def _long_past(make: Maker, size: str) -> Case:
    """A prompt that the cache holds nearly all of: few tokens to compute, much to look at."""
    shape = _pick(size, [(60, 3)], [(5000, 16)], [(131072 - 16, 16)])
    return _paged(make, shape, *_pick(size, (4, 2, 64), (32, 8, 128), (32, 8, 128)))


# -- state groups ------------------------------------------------------------------------------------------------------


def _states_of(shape: list[tuple[int, int]]) -> list[SequenceChunk]:
    """Each sequence has a block of its own, read and written in place."""
    return [
        SequenceChunk([0] * tokens, start, ((),), states=(StateSlots(block, [(start + tokens, block)]),))
        for block, (start, tokens) in enumerate(shape, 1)
    ]


def _scan(name: str, shape: list[tuple[int, int]], tensors: Tensors, operations: float) -> Case:
    chunks = _states_of(shape)

    def run(kernels: Any, plan: Any, t: Tensors) -> tuple[torch.Tensor, ...]:
        return getattr(kernels, name)(plan, **t), t["states"]

    moved = sum(tensor.nbytes * (2 if label == "states" else 1) for label, tensor in tensors.items())
    written = next(tensors[label] for label in ("v", "x") if label in tensors)
    return Case(tensors, run, moved + written.nbytes, operations, lambda k, device: k.state_plan(chunks, 0, device))


def _scan_shape(size: str, decodes: bool) -> list[tuple[int, int]]:
    if decodes:
        return _pick(size, [(5, 1)] * 2, [(5, 1)] * 8, [(5, 1)] * 256)
    return _pick(size, [(0, 70)], [(0, 300), (64, 77)], [(0, 8192)] * 4)


def _gated_delta(make: Maker, size: str, *, decodes: bool, by_channel: bool) -> Case:
    shape = _scan_shape(size, decodes)
    heads, dim = _pick(size, (2, 16), (32, 128), (32, 128))
    tokens = sum(count for _, count in shape)
    full = (tokens, heads, dim)
    tensors = {
        "q": torch.nn.functional.normalize(make.normal(*full).float(), dim=-1).mul(dim**-0.5).to(make.dtype),
        "k": torch.nn.functional.normalize(make.normal(*full).float(), dim=-1).to(make.dtype),
        "v": make.normal(*full),
        "g": -torch.exp(make.normal(*(full if by_channel else full[:2]), dtype=torch.float32) - 2),
        "beta": torch.rand(tokens, heads, device=make.device),
        "states": make.normal(len(shape) + 1, heads, dim, dim, dtype=torch.float32),
    }
    return _scan("gated_delta", shape, tensors, 6.0 * tokens * heads * dim * dim)


def _mamba2(make: Maker, size: str, *, decodes: bool) -> Case:
    shape = _scan_shape(size, decodes)
    heads, dim, state = _pick(size, (2, 16, 16), (80, 64, 128), (80, 64, 128))
    tokens = sum(count for _, count in shape)
    tensors = {
        "x": make.normal(tokens, heads, dim),
        "dt": torch.nn.functional.softplus(make.normal(tokens, heads, dtype=torch.float32)),
        "a": -torch.rand(heads, device=make.device),
        "b": make.normal(tokens, 1, state) * state**-0.5,
        "c": make.normal(tokens, 1, state),
        "d": make.normal(heads, dtype=torch.float32),
        "states": make.normal(len(shape) + 1, heads, dim, state, dtype=torch.float32),
    }
    return _scan("mamba2", shape, tensors, 4.0 * tokens * heads * dim * state)


def _conv(make: Maker, size: str, *, decodes: bool) -> Case:
    # Enough of them that the launch is not what is timed.
    shape = [(5, 1)] * 8192 if decodes and size == "full" else _scan_shape(size, decodes)
    channels = _pick(size, 72, 8192, 8192)
    tokens = sum(count for _, count in shape)
    tensors = {
        "x": make.normal(tokens, channels),
        "weight": make.normal(channels, 4),
        "bias": make.normal(channels),
        "states": make.normal(len(shape) + 1, channels, 3),
    }
    return _scan("causal_conv", shape, tensors, 8.0 * tokens * channels)


def _latent_decode(make: Maker, size: str, heads: int) -> Case:
    return _latent(make, _decodes(size), *_pick(size, (heads // 3, 32, 16), (heads, 512, 64), (heads, 512, 64)))


#: By name, a function of a maker and a size.
CASES: dict[str, Callable[[Maker, str], Case]] = {
    "rms_norm": lambda make, size: _norm(make, size, add=False),
    "add_rms_norm": lambda make, size: _norm(make, size, add=True),
    "rope": _rope,
    "silu_mul": lambda make, size: _gated(make, size, "silu_mul"),
    "gelu_mul": lambda make, size: _gated(make, size, "gelu_mul"),
    "sampling": _sampling,
    "write_rows": _write,
    "decode_gqa": lambda make, size: _paged(make, _decodes(size), *_pick(size, (4, 2, 64), (64, 8, 128), (64, 8, 128))),
    "decode_mqa_256": lambda make, size: _paged(make, _decodes(size), 4, 1, _pick(size, 64, 256, 256)),
    "decode_window_sinks": lambda make, size: _paged(
        make,
        _pick(size, [(20, 1), (300, 1)], [(2000, 1), (7, 1), (900, 1)], [(300, 1)] * 2048),
        *_pick(size, (4, 2, 64), (64, 8, 64), (64, 8, 64)),
        window=128,
        sinks=True,
    ),
    "prefill_gqa": lambda make, size: _paged(
        make,
        _pick(size, [(5, 20)], [(0, 300), (500, 100)], [(0, 8192)]),
        *_pick(size, (4, 2, 64), (32, 8, 128), (32, 8, 128)),
    ),
    "prefill_window_sinks": lambda make, size: _paged(
        make,
        _pick(size, [(30, 20)], [(0, 300), (500, 100)], [(0, 32768)]),
        *_pick(size, (4, 2, 64), (64, 8, 64), (64, 8, 64)),
        window=_pick(size, 10, 128, 128),
        sinks=True,
    ),
    "prefill_mqa_256": lambda make, size: _paged(
        make, _pick(size, [(5, 20)], [(0, 300)], [(0, 8192)]), 4, 1, _pick(size, 64, 256, 256)
    ),
    "tail_of_a_long_prompt": _long_past,
    "decode_latent_16": lambda make, size: _latent_decode(make, size, 16),
    "decode_latent_128": lambda make, size: _latent_decode(make, size, 128),
    "prefill_latent_16": lambda make, size: _latent(
        make, _pick(size, [(5, 20)], [(0, 200)], [(0, 8192)]), *_pick(size, (4, 32, 16), (16, 512, 64), (16, 512, 64))
    ),
    "conv_prefill": lambda make, size: _conv(make, size, decodes=False),
    "conv_decode": lambda make, size: _conv(make, size, decodes=True),
    "gdn_prefill": lambda make, size: _gated_delta(make, size, decodes=False, by_channel=False),
    "gdn_decode": lambda make, size: _gated_delta(make, size, decodes=True, by_channel=False),
    "kda_prefill": lambda make, size: _gated_delta(make, size, decodes=False, by_channel=True),
    "kda_decode": lambda make, size: _gated_delta(make, size, decodes=True, by_channel=True),
    "mamba2_prefill": lambda make, size: _mamba2(make, size, decodes=False),
    "mamba2_decode": lambda make, size: _mamba2(make, size, decodes=True),
}
