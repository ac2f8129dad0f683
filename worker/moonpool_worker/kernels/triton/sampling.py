"""Draws tokens from logits: temperature, top-k and top-p, without a sort.

The least logit that stays in is searched for, over the integers that order floats, with three guesses per pass over the
row. What stays in is drawn from by exponential races (the Gumbel-max trick): the token whose exponential noise over its
probability is least. Noise and result are those of `torch_sampling`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool_worker.kernels.torch_sampling import LANES


@triton.jit
def ordered_bits(x):
    """An integer for each float32, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def guesses(low, high):
    """Three integers between ``low`` and ``high``, which are at least two apart."""
    width = high.to(tl.int64) - low
    one = tl.maximum(width // 4, 1)
    two = tl.maximum(width // 2, 1)
    three = tl.maximum(width - width // 4 - 1, 1)
    return (low + one).to(tl.int32), (low + two).to(tl.int32), (low + three).to(tl.int32)


@triton.jit
def least_of_top_k(row_ptr, vocab, top_k, low, high, BLOCK: tl.constexpr):
    """The greatest ``low`` that at least ``top_k`` tokens reach; fewer reach ``high``."""
    # The two may be further apart than 32 bits count.
    while high.to(tl.int64) - low > 1:
        one, two, three = guesses(low, high)
        reach_one = tl.zeros((BLOCK,), tl.int32)
        reach_two = tl.zeros((BLOCK,), tl.int32)
        reach_three = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            bits = ordered_bits(tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32))
            reach_one += ((bits >= one) & (ids < vocab)).to(tl.int32)
            reach_two += ((bits >= two) & (ids < vocab)).to(tl.int32)
            reach_three += ((bits >= three) & (ids < vocab)).to(tl.int32)
        first = tl.sum(reach_one, 0)
        second = tl.sum(reach_two, 0)
        third = tl.sum(reach_three, 0)
        if third >= top_k:
            low = three
        elif second >= top_k:
            low = two
            high = three
        elif first >= top_k:
            low = one
            high = two
        else:
            high = one
    return low


@triton.jit
def least_of_top_p(row_ptr, vocab, top, over_temperature, mass, low, high, BLOCK: tl.constexpr):
    """The least ``high`` above which there is less than ``mass``; above ``low`` there is more."""
    # The two may be further apart than 32 bits count.
    while high.to(tl.int64) - low > 1:
        one, two, three = guesses(low, high)
        above_one = tl.zeros((BLOCK,), tl.float32)
        above_two = tl.zeros((BLOCK,), tl.float32)
        above_three = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            bits = ordered_bits(x)
            weight = tl.exp((x - top) * over_temperature)
            above_one += tl.where(bits > one, weight, 0.0)
            above_two += tl.where(bits > two, weight, 0.0)
            above_three += tl.where(bits > three, weight, 0.0)
        if tl.sum(above_one, 0) < mass:
            high = one
        elif tl.sum(above_two, 0) < mass:
            low = one
            high = two
        elif tl.sum(above_three, 0) < mass:
            low = two
            high = three
        else:
            low = three
    return high


@triton.jit
def exponential(word):
    """From a 32-bit word, near zero as precisely as a float32 can be: -log(1 - u), by its series where u is small."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.01, series, -tl.log(1.0 - u))


@triton.jit
def sampling_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    draws_ptr,
    out_ptr,
    vocab,
    row_stride,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    temperature = tl.load(temperature_ptr + row)
    greatest = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        where = tl.where(x > greatest, ids, where)
        greatest = tl.maximum(x, greatest)
    top = tl.max(greatest, 0)
    token = tl.min(tl.where(greatest == top, where, vocab), 0)

    if temperature > 0.0:
        over_temperature = 1.0 / temperature
        high = ordered_bits(top)
        # Just below minus infinity: everything stays in.
        limit = tl.full((), -2139095042, tl.int32)
        top_k = tl.load(top_k_ptr + row).to(tl.int32)
        if (top_k > 0) & (top_k < vocab):
            limit = least_of_top_k(row_ptr, vocab, top_k, limit, high + 1, BLOCK)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            sums = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
                sums += tl.where(ordered_bits(x) >= limit, tl.exp((x - top) * over_temperature), 0.0)
            mass = tl.sum(sums, 0) * top_p
            limit = least_of_top_p(row_ptr, vocab, top, over_temperature, mass, limit - 1, high, BLOCK)

        seed = tl.load(seeds_ptr + row)
        draw = tl.load(draws_ptr + row).to(tl.int32)
        best = tl.full((LANES,), float("-inf"), tl.float32)
        winner = tl.zeros((LANES,), tl.int32)
        for start in range(0, vocab, 4 * LANES):
            counter = start // 4 + tl.arange(0, LANES)
            words = tl.philox(
                seed, counter, tl.zeros_like(counter) + draw, tl.zeros_like(counter), tl.zeros_like(counter)
            )
            for part in tl.static_range(4):
                ids = start + part * LANES + tl.arange(0, LANES)
                x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
                score = x * over_temperature - tl.log(exponential(words[part]))
                score = tl.where((ordered_bits(x) >= limit) & (ids < vocab), score, float("-inf"))
                winner = tl.where(score > best, ids, winner)
                best = tl.maximum(score, best)
        token = tl.min(tl.where(best == tl.max(best, 0), winner, vocab), 0)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
) -> torch.Tensor:
    """As :func:`moonpool_worker.kernels.torch_sampling.sample`; all on one device; any float type."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        sampling_kernel[(rows,)](
            logits, temperature, top_k, top_p, seeds, draws, out, vocab, logits.stride(0), LANES=LANES,
            BLOCK=4 * LANES, num_warps=16, maxnreg=128,
        )  # fmt: skip
    return out
