"""A small encoder with attention, whose GEMMs are wide enough for INT8, and data for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support import save_onnx

WIDTH = 32

_GRAPH = f"""
encoder (float[batch, seq, {WIDTH}] x, int64[batch, seq] attention_mask) => (float[batch, seq, {WIDTH}] y) {{
    qkv_shape = Constant <value_ints = [0, 0, 2, 16]> ()
    flat_shape = Constant <value_ints = [0, 0, {WIDTH}]> ()
    axes = Constant <value_ints = [1, 2]> ()
    one = Constant <value_float = 1.0> ()
    low = Constant <value_float = -10000.0> ()
    scale = Constant <value_float = 0.25> ()
    [norm] n = LayerNormalization <axis = -1> (x, gamma, beta)
    [qkv] packed = MatMul (n, w_qkv)
    [qkv_bias] biased = Add (packed, b_qkv)
    [split] q, k, v = Split <axis = -1, num_outputs = 3> (biased)
    [q_heads] qh = Reshape (q, qkv_shape)
    [k_heads] kh = Reshape (k, qkv_shape)
    [v_heads] vh = Reshape (v, qkv_shape)
    [q_t] qt = Transpose <perm = [0, 2, 1, 3]> (qh)
    [k_t] kt = Transpose <perm = [0, 2, 3, 1]> (kh)
    [v_t] vt = Transpose <perm = [0, 2, 1, 3]> (vh)
    mask_f = Cast <to = 1> (attention_mask)
    mask_u = Unsqueeze (mask_f, axes)
    mask_i = Sub (one, mask_u)
    bias = Mul (mask_i, low)
    [scores] s = MatMul (qt, kt)
    [scaled] ss = Mul (s, scale)
    [masked] sm = Add (ss, bias)
    [softmax] p = Softmax <axis = -1> (sm)
    [context] c = MatMul (p, vt)
    [c_t] ct = Transpose <perm = [0, 2, 1, 3]> (c)
    [c_flat] cf = Reshape (ct, flat_shape)
    [out] o = MatMul (cf, w_out)
    [residual] h = Add (o, x)
    [up] u = MatMul (h, w_up)
    [gelu] g = Gelu (u)
    [down] d = MatMul (g, w_down)
    [y_add] y = Add (d, h)
}}"""


def save_encoder(path: Path) -> Path:
    """x [batch, seq, 32] and its mask -> y [batch, seq, 32]; the QKV projection is spelled with Split."""
    random = np.random.default_rng(5)

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)

    return save_onnx(
        path,
        _GRAPH,
        gamma=np.ones(WIDTH, np.float32),
        beta=np.zeros(WIDTH, np.float32),
        w_qkv=normal(WIDTH, 3 * WIDTH),
        b_qkv=normal(3 * WIDTH),
        w_out=normal(WIDTH, WIDTH),
        w_up=normal(WIDTH, 4 * WIDTH),
        w_down=normal(4 * WIDTH, WIDTH),
    )


def save_samples(path: Path, count: int = 48, seq: int = 16, seed: int = 0) -> Path:
    """Random samples with padding, as an `.npz` file."""
    random = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = random.integers(4, seq + 1, size=(count, 1))
    np.savez(
        path,
        x=random.normal(size=(count, seq, WIDTH)).astype(np.float32),
        attention_mask=(np.arange(seq)[None] < lengths).astype(np.int64),
    )
    return path


def save_profile(path: Path, text: str = "") -> Path:
    """The encoder's optimisation profile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    default = """\
dims: {batch: {min: 1, opt: 8, max: 16}, seq: {min: 4, opt: 16, max: 32}}
inputs: {x: [batch, seq, 32], attention_mask: [batch, seq]}
"""
    path.write_text(text or default)
    return path


def save_project(folder: Path) -> Path:
    """A folder with the model, its data and its profile where the conventions expect them; returns the model."""
    save_samples(folder / "calibration" / "encoder.npz")
    save_profile(folder / "profiles" / "encoder.yaml")
    return save_encoder(folder / "encoder.onnx")
