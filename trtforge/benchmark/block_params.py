"""BlockParams of plugins/csrc/kernels/block_params.h for ctypes; a test compares the two field by field."""

from __future__ import annotations

import ctypes

TYPES = {"fp16": 0, "bf16": 1}  # ElementType
ACTIVATIONS = {"gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}  # Activation
ORDERS = {"pre": 0, "post": 1}  # NormOrder


class BlockLinear(ctypes.Structure):
    """One product with a weight."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("input_scale", ctypes.c_float),
    )


class BlockNorm(ctypes.Structure):
    """One LayerNorm."""

    _fields_ = (("gamma", ctypes.c_void_p), ("beta", ctypes.c_void_p))


class DeviceTraits(ctypes.Structure):
    """The device, as far as launchers need to know it."""

    _fields_ = (
        ("compute_capability", ctypes.c_int),
        ("num_multiprocessors", ctypes.c_int),
    )


class BlockParams(ctypes.Structure):
    """All that launch_block is told."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("attention_bias", ctypes.c_void_p),
        ("attention_bias_dims", ctypes.c_int * 4),
        ("lengths", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("qkv", BlockLinear),
        ("out", BlockLinear),
        ("up", BlockLinear),
        ("down", BlockLinear),
        ("norm1", BlockNorm),
        ("norm2", BlockNorm),
        ("batch", ctypes.c_int),
        ("sequence", ctypes.c_int),
        ("width", ctypes.c_int),
        ("inner_width", ctypes.c_int),
        ("num_heads", ctypes.c_int),
        ("softmax_scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("activation", ctypes.c_int),
        ("order", ctypes.c_int),
        ("type", ctypes.c_int),
        ("is_causal", ctypes.c_bool),
        ("is_int8", ctypes.c_bool),
        ("strategy", ctypes.c_int),
        ("device", DeviceTraits),
    )
