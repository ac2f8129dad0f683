"""The C structures that the library takes; see ``native/*.h``, which they must match."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p


class Weights(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("panels", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class Chunk(ctypes.Structure):
    _fields_ = (("row", c_int32), ("count", c_int32), ("start", c_int32), ("pad", c_int32), ("table", c_void_p))


class Cache(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("block_rows", c_int32),
        ("kv_heads", c_int32),
        ("head", c_int32),
    )


class Attention(ctypes.Structure):
    _fields_ = (
        ("chunks", c_void_p),
        ("chunk_count", c_int32),
        ("heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("sinks", c_void_p),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("out", c_void_p),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", POINTER(Weights)),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
        ("out", POINTER(Weights)),
        ("behind_attention", c_void_p),
        ("post_norm", c_void_p),
        ("gate_up", POINTER(Weights)),
        ("down", POINTER(Weights)),
        ("behind_feed_forward", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("block_rows", c_int32),
        ("group", c_int32),
        ("window", c_int32),
        ("pad", c_int32),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("layer_count", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head", c_int32),
        ("ffn", c_int32),
        ("vocabulary", c_int32),
        ("activation", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("embedding_scale", c_float),
        ("pad", c_int32),
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("output", POINTER(Weights)),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("chunk_count", c_int32),
        ("wanted", c_int32),
        ("pad", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("chunks", c_void_p),
        ("rows", c_void_p),
        ("logits", c_void_p),
    )
