"""Small models whose input shapes depend on each other, and data for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support import save_onnx

RECURRENT = """recurrent (float[batch, n] x, float[2, batch, 32] state, int64 rate) =>
    (float[batch, 1] y, float[2, batch, 32] next) <int64 wide = {16000}, int64[1] first = {0}> {
    e = Mul(x, half)
    is_wide = Equal(rate, wide)
    w = If (is_wide) <then_branch = a () => (float[b1, n1] p) { p = Identity(e) },
                      else_branch = b () => (float[b2, n2] q) { q = Neg(e) }>
    m = MatMul(w, weight) t = Unsqueeze(m, first) s = Add(t, state) next = Tanh(s)
    r = ReduceMean<keepdims = 0>(next, first) y = MatMul(r, head) }"""
DECODER = """decoder (int64[batch, seq] ids, float[batch, 2, past, 16] past_key, int64[batch, total] mask) =>
    (float[batch, 2, seq, 16] y, float[batch, 2, kept, 16] present) <int64[4] heads = {0, 0, 2, 16},
    int64[2] axes = {1, 2}> {
    x = Gather(table, ids) h = MatMul(x, weight) r = Reshape(h, heads) q = Transpose<perm = [0, 2, 1, 3]>(r)
    present = Concat<axis = 2>(past_key, q) k = Transpose<perm = [0, 1, 3, 2]>(present) s = MatMul(q, k)
    f = Cast<to = 1>(mask) m = Unsqueeze(f, axes) b = Add(s, m) p = Softmax(b) y = MatMul(p, present) }"""
U_NET = """u_net (float[batch, 3, h, w] x) => (float[batch, 7, h2, w2] y) <float[1] roi = {0.0}> {
    c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]>(x, kernel)
    [pool] d = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c)
    u = Resize<mode = "nearest">(d, roi, scales)
    [skip] y = Concat<axis = 1>(x, u) }"""
FIXED = """fixed (float[batch, n] x) => (float[one, 5] y) <int64[2] shape = {1, 40}> {
    [flat] r = Reshape(x, shape) h = MatMul(x, weight) [both] z = MatMul(r, wide) y = Add(h, z) }"""


def _normal(*shape: int) -> np.ndarray:
    return (np.random.default_rng(7).standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def save_recurrent(path: Path) -> Path:
    """x [batch, 32], a state with the batch on axis 1 and a scalar that chooses a branch."""
    return save_onnx(path, RECURRENT, half=np.array(0.5, np.float32), weight=_normal(32, 32), head=_normal(32, 1))


def save_decoder(path: Path) -> Path:
    """Token ids [batch, seq], a cache [batch, 2, past, 16] and a mask [batch, past + seq]."""
    return save_onnx(path, DECODER, table=_normal(9, 32), weight=_normal(32, 32))


def save_u_net(path: Path) -> Path:
    """Images whose height and width have to be multiples of 4."""
    return save_onnx(path, U_NET, kernel=_normal(4, 3, 3, 3), scales=np.array([1, 1, 4, 4], np.float32))


def save_fixed(path: Path) -> Path:
    """x [batch, n], of which the graph takes [1, 40] alone."""
    return save_onnx(path, FIXED, weight=_normal(40, 5), wide=_normal(40, 5))


def save_feeds(folder: Path, count: int = 12) -> Path:
    """A folder with feeds of the recurrent model: one file each, nothing in common on the first axis."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(3)
    for index in range(count):
        np.savez(
            folder / f"{index:03d}.npz",
            x=random.standard_normal((3, 32)).astype(np.float32),
            state=random.standard_normal((2, 3, 32)).astype(np.float32),
            rate=np.array(16000, np.int64),
        )
    return folder
