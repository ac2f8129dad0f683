"""All of a step of an ordinary decoder in one call into the library."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import POINTER

import torch

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.cpu import structures
from moonpool_worker.kernels.cpu.linear import CpuLinear
from moonpool_worker.kernels.cpu.packed import BLOCK, PANEL
from moonpool_worker.kernels.cpu.step import StepChunks
from moonpool_worker.kernels.decoder import DecoderParts, PagedCache

#: What ``native/attention.h`` allows.
LARGEST_HEAD = 256
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_VECTORS = ("input_norm", "post_norm", "q_norm", "k_norm", "behind_attention", "behind_feed_forward", "sinks")
_MATRICES = ("qkv", "out", "gate_up", "down")


def can_fuse(parts: DecoderParts) -> bool:
    linears = [parts.head]
    for layer in parts.layers:
        linears += [layer.qkv, layer.out, layer.gate_up, layer.down]
    return (
        all(isinstance(linear, CpuLinear) for linear in linears)
        and parts.embedding.dtype == torch.bfloat16
        and parts.embedding.shape[1] % BLOCK == 0
        and parts.ffn % PANEL == 0
        and parts.head_dim % 2 == 0
        and parts.head_dim <= LARGEST_HEAD
        and parts.heads % parts.kv_heads == 0
    )


class FusedDecoder:
    """See :class:`moonpool_worker.kernels.decoder.WholeDecoder`. IndexError for tokens and positions out of range."""

    def __init__(self, lib: ctypes.CDLL, parts: DecoderParts) -> None:
        self._call, self._parts = lib.mp_decoder, parts
        self._floats: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._layers = (structures.Layer * len(parts.layers))()
        angles = parts.angles(torch.float32)
        for structure, layer in zip(self._layers, parts.layers, strict=True):
            for name in _VECTORS:
                setattr(structure, name, self._wide(getattr(layer, name)))
            for name in _MATRICES:
                setattr(structure, name, ctypes.pointer(getattr(layer, name).matrix.structure))
            structure.cosines, structure.sines = map(self._wide, angles[layer.group])
            structure.group, structure.window = layer.group, layer.window or 0
        self._positions = min(cos.shape[0] for cos, _ in angles)
        self._known_tokens = parts.embedding.shape[0]
        head = parts.head
        assert isinstance(head, CpuLinear)
        self._vocabulary = head.matrix.rows
        self._decoder = structures.Decoder(
            layer_count=len(parts.layers),
            hidden=parts.embedding.shape[1],
            heads=parts.heads,
            kv_heads=parts.kv_heads,
            head=parts.head_dim,
            ffn=parts.ffn,
            vocabulary=self._vocabulary,
            activation=_ACTIVATIONS[parts.activation],
            eps=parts.eps,
            scale=parts.scale,
            embedding_scale=parts.embedding_scale,
            layers=ctypes.cast(self._layers, POINTER(structures.Layer)),
            embedding=parts.embedding.data_ptr(),
            norm=self._wide(parts.norm),
            output=ctypes.pointer(head.matrix.structure),
        )
        self._reference = ctypes.byref(self._decoder)
        #: Rows of a block in each group, once a cache is bound.
        self._block_rows: list[int] = []
        self._bound: PagedCache | None = None

    def forward(self, batch: StepBatch, cache: PagedCache) -> torch.Tensor:
        if self._bound is not cache:
            self._bind(cache)
        groups = [StepChunks(batch.chunks, group, rows) for group, rows in enumerate(self._block_rows)]
        addresses = array("Q", [group.address for group in groups])
        ids, rows = array("i"), array("i")
        for chunk in batch.chunks:
            ids.extend(chunk.token_ids)
            if chunk.wants_logits:
                rows.append(len(ids) - 1)
        if ids and not 0 <= min(ids) <= max(ids) < self._known_tokens:
            raise IndexError(f"token ids are 0 to {self._known_tokens - 1}, got {min(ids)} to {max(ids)}")
        if groups[0].end > self._positions:
            raise IndexError(f"the model has {self._positions} positions, got {groups[0].end}")
        positions = groups[0].positions()
        logits = torch.empty(len(rows), self._vocabulary)
        step = structures.Step(
            tokens=len(ids),
            chunk_count=len(batch.chunks),
            wanted=len(rows),
            ids=ids.buffer_info()[0],
            positions=positions.buffer_info()[0],
            chunks=addresses.buffer_info()[0],
            rows=rows.buffer_info()[0],
            logits=logits.data_ptr(),
        )
        self._call(self._reference, ctypes.byref(step))
        return logits

    def _bind(self, cache: PagedCache) -> None:
        """Note where the layers' keys and values are; once for a cache."""
        rows: dict[int, int] = {}
        for number, structure in enumerate(self._layers):
            keys, values = (cache.view(structure.group, number, plane) for plane in ("k", "v"))
            structure.keys, structure.values = keys.data_ptr(), values.data_ptr()
            structure.key_stride, structure.value_stride = keys.stride(0), values.stride(0)
            structure.block_rows = rows[structure.group] = keys.shape[1]
        self._block_rows = [rows[group] for group in range(len(rows))]
        self._bound = cache

    def _wide(self, tensor: torch.Tensor | None) -> int | None:
        """The address of a float32 copy that is kept; layers that share a tensor share the copy."""
        if tensor is None:
            return None
        if id(tensor) not in self._floats:
            self._floats[id(tensor)] = (tensor, tensor.float().contiguous())
        return self._floats[id(tensor)][1].data_ptr()
