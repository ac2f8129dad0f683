"""Draws tokens: what the sampling kernel does, in plain torch, with the same chance to the bit.

The noise of a token is a function of the row's seed, the number of the draw and the token's id, by a counter-based
generator (Philox4x32-10, Salmon et al., 2011): a request draws the same tokens whatever runs beside it.
"""

from __future__ import annotations

import torch

#: Ids that share their counters: of each 4 * LANES ids, id 0, LANES, 2 LANES and 3 LANES are one counter's four words.
LANES = 1024
_WORD = 0xFFFFFFFF
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def philox(seed: int, counter: torch.Tensor, draw: int) -> torch.Tensor:
    """Four 32-bit words for each ``counter`` int64 [n]: int64 [4, n]."""
    a, b = counter & _WORD, torch.full_like(counter, draw & _WORD)
    c, d = torch.zeros_like(counter), torch.zeros_like(counter)
    key = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(10):
        low, high = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = ((high >> 32) & _WORD) ^ b ^ key[0], ((low >> 32) & _WORD) ^ d ^ key[1]
        b, d = high & _WORD, low & _WORD
        key = [(word + step) & _WORD for word, step in zip(key, _WEYL, strict=True)]
    return torch.stack([a, b, c, d])


def exponential_noise(seed: int, draw: int, vocab: int) -> torch.Tensor:
    """One value of the exponential distribution for each token id, float32 [vocab]."""
    ids = torch.arange(-(-vocab // (4 * LANES)) * LANES)
    words = philox(seed, ids, draw).view(4, -1, LANES).transpose(0, 1).reshape(-1)[:vocab]
    # float32 is fine near zero, where the winners are, and too coarse near one.
    return -torch.log1p(-(words.double() + 0.5) * 2.0**-32).float()


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
) -> torch.Tensor:
    """One token for each row of ``logits`` [rows, vocab]: int64 [rows].

    ``temperature`` [rows], 0 is greedy; ``top_k`` [rows] int, 0 is off; ``top_p`` [rows], 1 is off; ``seeds`` [rows]
    int64; ``draws`` [rows], how many tokens the request has drawn before. Temperature, then top-k, then top-p (Holtzman
    et al., 2020) over what is left; the token that crosses the limit stays in, and so do all that are as likely as it.
    """
    tokens = [
        _draw(row, float(temperature[i]), float(top_p[i]), int(top_k[i]), int(seeds[i]), int(draws[i]))
        for i, row in enumerate(logits.float().cpu())
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _draw(logits: torch.Tensor, temperature: float, top_p: float, top_k: int, seed: int, draw: int) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    ordered = logits.sort(descending=True).values
    if 0 < top_k < ordered.numel():
        ordered = ordered[ordered >= ordered[top_k - 1]]
    limit = ordered[-1]
    if top_p < 1.0:
        masses = torch.softmax(ordered.double() / temperature, dim=-1)
        likelier = masses.cumsum(-1) - masses
        firsts = torch.searchsorted(-ordered, -ordered)
        limit = ordered[(likelier[firsts] < top_p).nonzero().max()] if top_p > 0.0 else ordered[0]
    scores = logits / temperature - exponential_noise(seed, draw, logits.numel()).log()
    return int(scores.masked_fill(logits < limit, float("-inf")).argmax())
