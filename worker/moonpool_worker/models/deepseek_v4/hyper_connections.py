"""Manifold-constrained hyper-connections (Xie et al., 2026): several parallel residual streams in place of one.

Before a layer the streams are collapsed into its input, after it its output is spread over them while they mix among
themselves, all with weights that the streams themselves give. The mixing matrix is made doubly stochastic by
Sinkhorn-Knopp, so that a deep stack neither grows nor shrinks. Weights are computed in float32. On a GPU the many
small operations here ask for one kernel that does a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moonpool_worker.weights.tensor_reader import TensorReader


class HyperConnection:
    """Around one layer, from the tensors ``prefix`` + ``_fn`` [(2 + N) N, N * hidden], ``_base`` and ``_scale`` [3]."""

    def __init__(
        self, reader: TensorReader, prefix: str, streams: int, steps: int, eps: float, norm_eps: float
    ) -> None:
        self._streams, self._steps, self._eps, self._norm_eps = streams, steps, eps, norm_eps
        self._weight, base, scale = (
            reader.read(f"{prefix}_{name}", dtype=torch.float32) for name in ("fn", "base", "scale")
        )
        widths = [streams, streams, streams * streams]
        self._base, self._scale = base, scale.repeat_interleave(torch.tensor(widths, device=scale.device))
        self._widths = widths

    def collapse(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``x`` [T, N, hidden] → the layer's input [T, hidden], and for :meth:`spread` weights [T, N], mixing
        [T, N, N]."""
        weights = _perceive(x, self._weight, self._norm_eps) * self._scale + self._base
        before, after, mixing = weights.split(self._widths, dim=-1)
        mixing = mixing.view(-1, self._streams, self._streams).softmax(-1) + self._eps
        mixing = mixing / (mixing.sum(-2, keepdim=True) + self._eps)
        for _ in range(self._steps - 1):
            mixing = mixing / (mixing.sum(-1, keepdim=True) + self._eps)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + self._eps)
        return _collapsed(x, before.sigmoid() + self._eps), 2 * after.sigmoid(), mixing

    def spread(self, x: torch.Tensor, out: torch.Tensor, after: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
        """The streams behind a layer that returned ``out`` [T, hidden]."""
        mixed = torch.bmm(mixing.to(x.dtype).transpose(1, 2), x)
        return mixed + after.to(x.dtype).unsqueeze(-1) * out.unsqueeze(1)


class HyperHead:
    """The last collapse, from the tensors ``prefix`` + ``_fn`` [N, N * hidden], ``_base`` [N] and ``_scale`` [1]."""

    def __init__(self, reader: TensorReader, prefix: str, eps: float, norm_eps: float) -> None:
        self._eps, self._norm_eps = eps, norm_eps
        self._weight, self._base, self._scale = (
            reader.read(f"{prefix}_{name}", dtype=torch.float32) for name in ("fn", "base", "scale")
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, N, hidden] → [T, hidden]."""
        weights = _perceive(x, self._weight, self._norm_eps) * self._scale + self._base
        return _collapsed(x, weights.sigmoid() + self._eps)


def connection_shapes(prefix: str, streams: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a :class:`HyperConnection`."""
    weights = (2 + streams) * streams
    return {f"{prefix}_fn": (weights, streams * hidden), f"{prefix}_base": (weights,), f"{prefix}_scale": (3,)}


def head_shapes(prefix: str, streams: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a :class:`HyperHead`."""
    return {f"{prefix}_fn": (streams, streams * hidden), f"{prefix}_base": (streams,), f"{prefix}_scale": (1,)}


def _perceive(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """All streams of a token, normalised together, through one matrix."""
    flat = x.flatten(1).float()
    return F.linear(flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps), weight)


def _collapsed(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (weights.unsqueeze(-1) * x).sum(1).to(x.dtype)
