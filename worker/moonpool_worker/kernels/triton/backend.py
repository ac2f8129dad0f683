"""The Triton kernels as a backend, for GPUs; with TRITON_INTERPRET=1 anywhere, slowly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from moonpool_api.geometry import GroupGeometry

from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.decoder import DecoderParts, WholeDecoder
from moonpool_worker.kernels.linear import Linear, Weight
from moonpool_worker.kernels.packed_linear import PlainLinear
from moonpool_worker.kernels.triton.activations import gelu_mul, silu_mul
from moonpool_worker.kernels.triton.latent_attention import latent_attention
from moonpool_worker.kernels.triton.paged_attention import paged_attention
from moonpool_worker.kernels.triton.rms_norm import add_rms_norm, rms_norm
from moonpool_worker.kernels.triton.rope import rope
from moonpool_worker.kernels.triton.sampling import sample
from moonpool_worker.kernels.triton.scans_backend import TritonScans
from moonpool_worker.kernels.triton.step_plan import StepPlan, make_plan
from moonpool_worker.kernels.triton.write_rows import write_rows
from moonpool_worker.sampling.sampler import list_of_likeliest
from moonpool_worker.weights.quantised import QuantisedMatrix


class TritonKernels(TritonScans):
    """See :class:`moonpool_worker.kernels.interface.Kernels` for what each of these does."""

    name = "triton"
    formats: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    rope = staticmethod(rope)
    silu_mul = staticmethod(silu_mul)
    gelu_mul = staticmethod(gelu_mul)
    write_rows = staticmethod(write_rows)
    sample = staticmethod(sample)

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """The vendor's matrix product, which no kernel of ours would beat."""
        if isinstance(weight, QuantisedMatrix):
            weight = weight.dense(torch.bfloat16).to(self.device)
        return PlainLinear(weight, bias)

    def decoder(self, parts: DecoderParts) -> WholeDecoder | None:
        return None

    def argmax(self, logits: torch.Tensor) -> list[int]:
        return list_of_likeliest(logits)

    def plan(self, chunks: Sequence[SequenceChunk], index: int, group: GroupGeometry, device: torch.device) -> StepPlan:
        return make_plan(chunks, index, group, device)

    def attention(
        self,
        plan: StepPlan,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return paged_attention(plan, q, keys, values, scale, sinks).view(q.shape[0], -1)

    def latent_attention(
        self, plan: StepPlan, q: torch.Tensor, latent: torch.Tensor, value_dim: int, *, scale: float
    ) -> torch.Tensor:
        return latent_attention(plan, q, latent, value_dim, scale)
