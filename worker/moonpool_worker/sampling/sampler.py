"""Draws one token per row of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from moonpool_worker.sampling.params import SamplingParams

#: Nucleus sampling looks at this many of the likeliest tokens first; a sort of the whole vocabulary is far slower.
_NUCLEUS = 1024


@dataclass(frozen=True, slots=True)
class SampledToken:
    """``logprob`` and ``top_logprobs`` (token id, logprob; likeliest first) are of the unscaled distribution."""

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


class SamplerState:
    """A request's source of chance: the same seed gives the same tokens, whatever runs beside it."""

    def __init__(self, params: SamplingParams) -> None:
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed & 0x7FFF_FFFF_FFFF_FFFF)


def list_of_likeliest(logits: torch.Tensor) -> list[int]:
    """The likeliest token of each row of [rows, vocab]."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens


class Sampler:
    """``argmax``: the kernels', where they have a faster one."""

    def __init__(self, argmax: Callable[[torch.Tensor], list[int]] = list_of_likeliest) -> None:
        self._argmax = argmax

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, params: Sequence[SamplingParams], states: Sequence[SamplerState]
    ) -> list[SampledToken]:
        """One token for each row of ``logits``, float32 [rows, vocab] on any device."""
        tokens = self._argmax(logits)
        if any(not wanted.greedy or wanted.logprobs is not None for wanted in params):
            # The sources of chance are the host's: the same seed gives the same tokens on every machine.
            logits = logits.cpu()
        for row, (wanted, state) in enumerate(zip(params, states, strict=True)):
            if not wanted.greedy:
                tokens[row] = _draw(logits[row], wanted, state.generator)
        return [_with_logprobs(logits[row], token, params[row].logprobs) for row, token in enumerate(tokens)]


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Temperature, then top-k, then top-p (Holtzman et al., 2020) over what is left."""
    scaled = logits / params.temperature
    if 0 < params.top_k < scaled.numel():
        values, ids = scaled.topk(params.top_k)
    elif params.top_p < 1.0:
        values, ids = _nucleus_candidates(scaled, params.top_p)
    else:
        return int(torch.multinomial(scaled.softmax(-1), 1, generator=generator))
    probabilities = values.softmax(-1) if params.top_k else (values - scaled.logsumexp(-1)).exp()
    if params.top_p < 1.0:
        # The token that crosses the limit stays in.
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)
        probabilities[0] = torch.clamp(probabilities[0], min=1e-30)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def _nucleus_candidates(scaled: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens, in order, enough of them to hold ``top_p`` of the probability."""
    values, ids = scaled.topk(min(_NUCLEUS, scaled.numel()))
    if float((values - scaled.logsumexp(-1)).exp().sum()) < top_p:
        values, ids = scaled.sort(descending=True)
    return values, ids


def _with_logprobs(logits: torch.Tensor, token: int, wanted: int | None) -> SampledToken:
    if wanted is None:
        return SampledToken(token)
    logprobs = logits.log_softmax(-1)
    top: list[tuple[int, float]] = []
    if wanted > 0:
        values, ids = logprobs.topk(wanted)
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)
