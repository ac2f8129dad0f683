"""Attention of one DeepSeek-V4 layer: last tokens, compressed text, sinks.

One KV head whose row is key and value at once, RoPE included; what attention returns is turned back by the query's
position, so that a value counts by its distance too. The output projection is low-rank by groups of heads.
"""

from __future__ import annotations

import torch

from moonpool_worker.kernels.compressed_attention import Piece, attend, choose
from moonpool_worker.kernels.interface import Kernels, Linear
from moonpool_worker.models.deepseek_v4.caches import tail_of, tail_width
from moonpool_worker.models.deepseek_v4.compressor import Compressor, compressor_shapes
from moonpool_worker.models.deepseek_v4.config import DeepseekV4Config
from moonpool_worker.models.deepseek_v4.rotation import rotate_last
from moonpool_worker.models.deepseek_v4.step import Shared, V4Step
from moonpool_worker.weights.tensor_reader import TensorReader


def attention_shapes(config: DeepseekV4Config, number: int) -> dict[str, tuple[int, ...]]:
    """Tensors of layer ``number``'s attention, under the names of DeepSeek's checkpoints."""
    c, prefix = config, _prefix(number)
    width = c.heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}wq_a.weight": (c.q_rank, c.hidden),
        f"{prefix}q_norm.weight": (c.q_rank,),
        f"{prefix}wq_b.weight": (width, c.q_rank),
        f"{prefix}wkv.weight": (c.head_dim, c.hidden),
        f"{prefix}norm.weight": (c.head_dim,),
        f"{prefix}attn_sink": (c.heads,),
        f"{prefix}wo_a.weight": (c.out_groups * c.out_rank, width // c.out_groups),
        f"{prefix}wo_b.weight": (c.hidden, c.out_groups * c.out_rank),
    }
    kind = c.kinds[number]
    if kind == "csa":
        shapes[f"{prefix}indexer.wq_b.weight"] = (c.index_heads * c.index_dim, c.q_rank)
        shapes[f"{prefix}indexer.weights_proj.weight"] = (c.index_heads, c.hidden)
    return shapes | compressor_shapes(c, kind, prefix)


class V4Attention:
    def __init__(self, config: DeepseekV4Config, reader: TensorReader, kernels: Kernels, number: int) -> None:
        c, prefix = config, _prefix(number)
        self._config, self._number, self._kind = c, number, c.kinds[number]
        #: What is applied to the input is one matrix: low-rank query, row, raw row, the indexer's weights of heads.
        down = ["wq_a.weight", "wkv.weight"]
        self._widths = [c.q_rank, c.head_dim]
        self._compressor: Compressor | None = None
        self._index_up: Linear | None = None
        if self._kind != "window":
            raw = [
                name for name in compressor_shapes(c, self._kind, "") if name.endswith(("wkv.weight", "wgate.weight"))
            ]
            down += raw
            self._widths.append(tail_width(c, self._kind))
            self._compressor = Compressor(c, reader, self._kind, prefix)
        if self._kind == "csa":
            down.append("indexer.weights_proj.weight")
            self._widths.append(c.index_heads)
            self._index_up = kernels.linear(reader.read(f"{prefix}indexer.wq_b.weight"))
        self._down = kernels.linear(reader.read(*(prefix + name for name in down)))
        self._q_norm, self._norm, self._sinks = (
            reader.read(prefix + name, dtype=torch.float32) for name in ("q_norm.weight", "norm.weight", "attn_sink")
        )
        self._head_norm = torch.ones(c.head_dim, device=self._norm.device)
        self._q_up = kernels.linear(reader.read(f"{prefix}wq_b.weight"))
        out = reader.read(f"{prefix}wo_a.weight")
        self._out_down = out.view(c.out_groups, c.out_rank, -1).transpose(1, 2).contiguous()
        self._out = kernels.linear(reader.read(f"{prefix}wo_b.weight"))

    def __call__(self, x: torch.Tensor, step: V4Step) -> torch.Tensor:
        """[T, hidden] → [T, hidden]; this step's rows and the entries that they complete are in the cache then."""
        c, kernels, shared = self._config, step.kernels, step.shared[self._kind]
        low, row, *rest = self._down(x).split(self._widths, dim=-1)
        low = kernels.rms_norm(low, self._q_norm, c.norm_eps)
        q = self._q_up(low).view(-1, c.heads, c.head_dim)
        q = rotate_last(kernels.rms_norm(q, self._head_norm, c.norm_eps), *_per_head(shared))
        recent = step.rows("window", self._number)
        row = kernels.rms_norm(row, self._norm, c.norm_eps)
        recent[step.recent] = rotate_last(row, shared.cos, shared.sin)
        chain = self._compress(rest[0], shared, step) if rest else None
        out = torch.empty_like(q)
        for piece in shared.pieces:
            mine = q[piece.rows].view(piece.texts, -1, c.heads, c.head_dim)
            entries, hidden = None, None
            if chain is not None and piece.entries is not None:
                found = chain[piece.entries.place]
                entries = found[..., : c.head_dim]
                hidden = self._hidden(piece, found[..., c.head_dim :], low, rest, shared)
            out[piece.rows] = attend(piece, mine, recent, entries, hidden, self._sinks, c.scale).flatten(0, 1)
        cos, sin = _per_head(shared)
        rotate_last(out, cos, -sin)
        grouped = out.view(out.shape[0], c.out_groups, -1).transpose(0, 1)
        return self._out(torch.bmm(grouped, self._out_down).transpose(0, 1).reshape(out.shape[0], -1))

    def _compress(self, raw: torch.Tensor, shared: Shared, step: V4Step) -> torch.Tensor:
        """The layer's chain of entries, with those that this step's raw rows [T, width] complete."""
        assert self._compressor is not None and shared.tail is not None
        tail, chain = step.rows(tail_of(self._kind), self._number), step.rows(self._kind, self._number)
        tail[shared.tail] = raw
        if shared.closing is not None:
            entries = self._compressor(tail[shared.closing.sources], shared.closing, step.kernels)
            chain[shared.closing.place] = entries
        return chain

    def _hidden(
        self,
        piece: Piece,
        keys: torch.Tensor,
        low: torch.Tensor,
        rest: list[torch.Tensor],
        shared: Shared,
    ) -> torch.Tensor:
        """Which entries the rows of a piece do not look at, bool [G, R, M]: later ones, and what the indexer, whose
        ``keys`` are [G, M, Di], leaves out."""
        c = self._config
        assert piece.entries is not None
        hidden = piece.entries.hidden
        if self._index_up is None or hidden.shape[-1] <= c.index_top_k:
            return hidden
        q = self._index_up(low[piece.rows]).view(-1, c.index_heads, c.index_dim)
        q = rotate_last(q, shared.cos[piece.rows].unsqueeze(1), shared.sin[piece.rows].unsqueeze(1))
        weights = rest[1][piece.rows].float() * (c.index_heads * c.index_dim) ** -0.5
        shape = (piece.texts, -1, c.index_heads)
        return choose(q.view(*shape, c.index_dim), keys, weights.view(shape), hidden, c.index_top_k)


def _prefix(number: int) -> str:
    return f"model.layers.{number}.attn."


def _per_head(shared: Shared) -> tuple[torch.Tensor, torch.Tensor]:
    return shared.cos.unsqueeze(1), shared.sin.unsqueeze(1)
