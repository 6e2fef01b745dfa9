"""Graphs with activations to equalize, and equalizations for them."""

from __future__ import annotations

import dataclasses

import numpy as np
from quant_cases import graph_from_text, normal, run

from trtforge.graph.edit import copy_graph
from trtforge.graph.names import make_names_unique
from trtforge.quantization.calibrate import channel_axes, table_from_observers
from trtforge.quantization.equalize import equalize_layers
from trtforge.quantization.formats import INT8
from trtforge.quantization.matrix import find_layers
from trtforge.quantization.observation import Observation
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.quantizer import Quantizer, with_rounded_weights
from trtforge.quantization.table import CalibrationTable, Equalization, TensorRange
from trtforge.recipe import QuantRecipe

PLAIN = QuantRecipe(
    method="minmax", smooth="none", shift=False, rounding="nearest", bias_correction=False, weight_range="minmax"
)


def recipe_with(**changes):
    """A recipe that does nothing but this."""
    return PLAIN.model_copy(update=changes)


LINEAR = {"w1": normal(32, 48, scale=0.2), "w2": normal(48, 32, seed=1, scale=0.2)}
BIASED = LINEAR | {"b1": normal(48, seed=2), "b2": normal(32, seed=3)}
NORM = {"g": 1 + normal(32, seed=4, scale=0.2), "b": normal(32, seed=5)}
CONV = {"w1": normal(48, 32, 3, 3, scale=0.1), "w2": normal(32, 48, 3, 3, seed=1, scale=0.1)}
IMAGE = {"x": normal(2, 32, 6, 6, seed=9)}
ROWS = {"x": normal(5, 32, seed=9)}
SEQUENCE = {"x": normal(2, 5, 32, seed=9)}


@dataclasses.dataclass
class Case:
    """A graph and where its equalizations go.

    `folded` and `explicit` are of scales alone; `shifted` are the tensors that an offset is folded into as well.
    """

    text: str
    weights: dict
    feeds: dict
    folded: tuple = ()
    explicit: tuple = ()
    shifted: tuple = ()

    def graph(self):
        graph = graph_from_text(f"g {self.text}", **self.weights)
        make_names_unique(graph)
        return graph


CASES = {
    "pre-norm": Case(
        "(float[b,s,32] x) => (float[b,s,48] y) { n = LayerNormalization<axis=-1>(x, g, b)  y = MatMul(n, w1) }",
        LINEAR | NORM,
        SEQUENCE,
        folded=("n",),
        shifted=("n",),
    ),
    "norm with a positive last axis": Case(
        "(float[b,s,32] x) => (float[b,s,48] y) { n = LayerNormalization<axis=2>(x, g, b)  y = MatMul(n, w1) }",
        LINEAR | NORM,
        SEQUENCE,
        folded=("n",),
        shifted=("n",),
    ),
    "norm without attributes": Case(
        "(float[b,32] x) => (float[b,48] y) { n = LayerNormalization(x, g, b)  y = MatMul(n, w1) }",
        LINEAR | NORM,
        ROWS,
        folded=("n",),
        shifted=("n",),
    ),
    "norm over two axes": Case(
        "(float[b,5,32] x) => (float[b,5,48] y) { n = LayerNormalization<axis=-2>(x, g2, b)  y = MatMul(n, w1) }",
        LINEAR | NORM | {"g2": normal(5, 32, seed=6), "b": normal(5, 32, seed=7)},
        SEQUENCE,
        explicit=("n",),
    ),
    "norm without bias": Case(
        "(float[b,s,32] x) => (float[b,s,48] y) { n = LayerNormalization(x, g)  y = MatMul(n, w1) }",
        LINEAR | NORM,
        SEQUENCE,
        folded=("n",),
    ),
    "RMS norm": Case(
        "(float[b,s,32] x) => (float[b,s,48] y) { n = RMSNormalization(x, g)  y = MatMul(n, w1) }",
        LINEAR | NORM,
        SEQUENCE,
        folded=("n",),
    ),
    "three readers of one norm": Case(
        """(float[b,s,32] x) => (float[b,s,48] q, float[b,s,48] k, float[b,s,48] v) {
        n = LayerNormalization(x, g, b)  q = MatMul(n, w1)  k = MatMul(n, w3)  v = MatMul(n, w1) }""",
        LINEAR | NORM | {"w3": normal(32, 48, seed=8)},
        SEQUENCE,
        folded=("n",),
        shifted=("n",),
    ),
    "post-norm": Case(
        """(float[b,s,32] x) => (float[b,s,32] y) { n = LayerNormalization(x, g, b)  h = MatMul(n, w1)
        r = Relu(h)  d = MatMul(r, w2)  y = Add(d, n) }""",
        LINEAR | NORM,
        SEQUENCE,
        folded=("r",),
        explicit=("n",),
    ),
    "linear after linear": Case(
        "(float[b,32] x) => (float[b,32] y) { h = MatMul(x, w1)  y = MatMul(h, w2) }",
        LINEAR,
        ROWS,
        folded=("h",),
        explicit=("x",),
        shifted=("h",),
    ),
    "biased linear layers": Case(
        """(float[b,32] x) => (float[b,32] y) {
        p = MatMul(x, w1)  h = Add(p, b1)  d = MatMul(h, w2)  y = Add(b2, d) }""",
        BIASED,
        ROWS,
        folded=("h",),
        explicit=("x",),
        shifted=("h",),
    ),
    "bias of higher rank": Case(
        """(float[b,32] x) => (float[1,b,32] y) {
        p = MatMul(x, w1)  h = Add(c1, p)  d = MatMul(h, w2)  y = Add(c2, d) }""",
        LINEAR | {"c1": normal(1, 1, 48, seed=2), "c2": normal(1, 1, 32, seed=3)},
        ROWS,
        folded=("h",),
        explicit=("x",),
        shifted=("h",),
    ),
    "bias of one value": Case(
        "(float[b,32] x) => (float[b,32] y) { p = MatMul(x, w1)  h = Add(p, c)  y = MatMul(h, w2) }",
        LINEAR | {"c": normal(1, seed=2)},
        ROWS,
        explicit=("x", "h"),
    ),
    "bias by row": Case(
        "(float[5,32] x) => (float[5,32] y) { p = MatMul(x, w1)  h = Add(p, c)  y = MatMul(h, w2) }",
        LINEAR | {"c": normal(5, 48, seed=2)},
        ROWS,
        explicit=("x", "h"),
    ),
    "linear, Relu, linear": Case(
        "(float[b,32] x) => (float[b,32] y) { p = MatMul(x, w1)  h = Add(p, b1)  r = Relu(h)  y = MatMul(r, w2) }",
        BIASED,
        ROWS,
        folded=("r",),
        explicit=("x",),
    ),
    "Relu read twice": Case(
        """(float[b,32] x) => (float[b,32] y, float[b,48] z) {
        h = MatMul(x, w1)  r = Relu(h)  y = MatMul(r, w2)  z = Neg(h) }""",
        LINEAR,
        ROWS,
        explicit=("x", "r"),
    ),
    "linear, Gelu, linear": Case(
        "(float[b,32] x) => (float[b,32] y) { h = MatMul(x, w1)  r = Gelu(h)  y = MatMul(r, w2) }",
        LINEAR,
        ROWS,
        explicit=("x", "r"),
    ),
    "an output in between": Case(
        "(float[b,32] x) => (float[b,48] h, float[b,32] y) { h = MatMul(x, w1)  y = MatMul(h, w2) }",
        LINEAR,
        ROWS,
        explicit=("x", "h"),
    ),
    "a product that is an output and gets a bias": Case(
        "(float[b,32] x) => (float[b,48] p, float[b,32] y) { p = MatMul(x, w1)  h = Add(p, b1)  y = MatMul(h, w2) }",
        BIASED,
        ROWS,
        explicit=("x", "h"),
    ),
    "read by a subgraph": Case(
        """(float[b,32] x, bool c) => (float[b,32] y, float[b,48] z) { h = MatMul(x, w1)  y = MatMul(h, w2)
        z = If (c) <then_branch = t () => (float[b,48] a) { a = Neg(h) },
                    else_branch = e () => (float[b,48] a) { a = Abs(h) }> }""",
        LINEAR,
        ROWS | {"c": np.array(True)},
        explicit=("x", "h"),
    ),
    "a product that a subgraph reads and that gets a bias": Case(
        """(float[b,32] x, bool c) => (float[b,32] y, float[b,48] z) { p = MatMul(x, w1)
        z = If (c) <then_branch = t () => (float[b,48] a) { a = Neg(p) },
                    else_branch = e () => (float[b,48] a) { a = Abs(p) }>
        h = Add(p, b1)  y = MatMul(h, w2) }""",
        BIASED,
        ROWS | {"c": np.array(True)},
        explicit=("x", "h"),
    ),
    "read twice by one other node": Case(
        "(float[b,32] x) => (float[b,32] y, float[b,48] z) { h = MatMul(x, w1)  y = MatMul(h, w2)  z = Mul(h, h) }",
        LINEAR,
        ROWS,
        explicit=("x", "h"),
    ),
    "read twice by its own reader": Case(
        "(float[32,32] x) => (float[32,32] y) { h = MatMul(x, w3)  y = Gemm(h, w4, h) }",
        {"w3": normal(32, 32, scale=0.2), "w4": normal(32, 32, seed=1, scale=0.2)},
        {"x": normal(32, 32, seed=9)},
        explicit=("x", "h"),
    ),
    "one initializer for two nodes": Case(
        "(float[b,32] x) => (float[b,32] y) { h = MatMul(x, w)  y = MatMul(h, w) }",
        {"w": normal(32, 32, scale=0.2)},
        ROWS,
        folded=("h",),
        explicit=("x",),
        shifted=("h",),
    ),
    "rank 4": Case(
        "(float[2,3,4,32] x) => (float[2,3,4,32] y) { h = MatMul(x, w1)  y = MatMul(h, w2) }",
        LINEAR,
        {"x": normal(2, 3, 4, 32, seed=9)},
        folded=("h",),
        explicit=("x",),
        shifted=("h",),
    ),
    "a product with a constant": Case(
        "(float[b,32] x) => (float[b,48] y) { n = Mul(g, x)  y = MatMul(n, w1) }",
        LINEAR | NORM,
        ROWS,
        folded=("n",),
    ),
    "a product with one number": Case(
        "(float[b,32] x) => (float[b,48] y) { n = Mul(x, c)  y = MatMul(n, w1) }",
        LINEAR | {"c": np.float32(1.5)},
        ROWS,
        explicit=("n",),
    ),
    "a product with a vector": Case(
        "(float[32,32] x) => (float[32] y) { h = MatMul(x, v)  y = MatMul(h, w3) }",
        {"v": normal(32), "w3": normal(32, 32, seed=1)},
        {"x": normal(32, 32, seed=9)},
        explicit=("h",),
    ),
    "norm over two axes with one row of scales": Case(
        "(float[b,1,32] x) => (float[b,1,48] y) { n = LayerNormalization<axis=1>(x, g2, b2)  y = MatMul(n, w1) }",
        LINEAR | {"g2": normal(1, 32, seed=6), "b2": normal(1, 32, seed=7)},
        {"x": normal(4, 1, 32, seed=9)},
        folded=("n",),
        shifted=("n",),
    ),
    "channels that move": Case(
        """(float[2,32,32] x) => (float[2,32,48] y) { h = MatMul(x, w3)  t = Transpose<perm=[0,2,1]>(h)
        y = MatMul(t, w1) }""",
        LINEAR | {"w3": normal(32, 32, seed=2)},
        {"x": normal(2, 32, 32, seed=9)},
        explicit=("x", "t"),
    ),
    "conv, Relu, conv": Case(
        """(float[b,32,6,6] x) => (float[b,32,h,w] y) {
        c = Conv<pads=[1,1,1,1]>(x, w1)  r = Relu(c)  y = Conv<pads=[1,1,1,1]>(r, w2) }""",
        CONV,
        IMAGE,
        folded=("r",),
        explicit=("x",),
    ),
    "biased conv, Relu, conv": Case(
        "(float[b,32,6,6] x) => (float[b,32,h,w] y) { c = Conv(x, w1, b1)  r = Relu(c)  y = Conv(r, w2, b2) }",
        CONV | {"b1": normal(48, seed=2), "b2": normal(32, seed=3)},
        IMAGE,
        folded=("r",),
        explicit=("x",),
    ),
    "batch normalization in between": Case(
        """(float[b,32,6,6] x) => (float[b,32,h,w] y) { c = Conv(x, w1)  n = BatchNormalization(c, s, s, s, v)
        r = Relu(n)  y = Conv(r, w2) }""",
        CONV | {"s": normal(48, seed=2), "v": 1 + np.abs(normal(48, seed=3))},
        IMAGE,
        explicit=("x", "r"),
    ),
    "depthwise, Relu, 1x1": Case(
        """(float[b,32,6,6] x) => (float[b,48,h,w] y) {
        c = Conv<group=32>(x, wd, bd)  r = Relu(c)  y = Conv(r, w3) }""",
        {"wd": normal(32, 1, 3, 3), "bd": normal(32, seed=1), "w3": normal(48, 32, 1, 1, seed=2)},
        IMAGE,
        folded=("r",),
    ),
    "1x1 convs": Case(
        "(float[b,32,6,6] x) => (float[b,32,h,w] y) { c = Conv(x, w3, b1)  y = Conv(c, w4) }",
        {"w3": normal(48, 32, 1, 1), "w4": normal(32, 48, 1, 1, seed=1), "b1": normal(48, seed=2)},
        IMAGE,
        folded=("c",),
        explicit=("x",),
        shifted=("c",),
    ),
    "1-D convs": Case(
        "(float[b,32,9] x) => (float[b,32,l] y) { c = Conv(x, w3)  r = Relu(c)  y = Conv(r, w4) }",
        {"w3": normal(48, 32, 3), "w4": normal(32, 48, 1, seed=1)},
        {"x": normal(2, 32, 9, seed=9)},
        folded=("r",),
        explicit=("x",),
    ),
    "3-D conv": Case(
        "(float[b,32,3,3,3] x) => (float[b,48,d,h,w] y) { n = Sigmoid(x)  y = Conv(n, w3) }",
        {"w3": normal(48, 32, 1, 1, 1)},
        {"x": normal(2, 32, 3, 3, 3, seed=9)},
        explicit=("n",),
    ),
    "conv with a bias that is computed": Case(
        "(float[b,32,6,6] x, float[48] v) => (float[b,48,h,w] y) { c = Neg(v)  y = Conv(x, w3, c) }",
        {"w3": normal(48, 32, 1, 1)},
        IMAGE | {"v": normal(48)},
        explicit=("x",),
    ),
    "conv of a product with a constant": Case(
        "(float[b,32,6,6] x) => (float[b,48,h,w] y) { n = Mul(x, k)  y = Conv(n, w1) }",
        CONV | {"k": normal(32, 1, 1, seed=3)},
        IMAGE,
        explicit=("n",),
    ),
    "flattened conv": Case(
        "(float[b,32,1,1] x) => (float[b,32] y) { c = Conv(x, w3)  f = Flatten(c)  y = MatMul(f, w2) }",
        LINEAR | {"w3": normal(48, 32, 1, 1, seed=2)},
        {"x": normal(2, 32, 1, 1, seed=9)},
        explicit=("x", "f"),
    ),
    "matrix product of a conv": Case(
        "(float[b,32,32] x) => (float[b,32,48] y) { c = Conv(x, w3)  y = MatMul(c, w1) }",
        LINEAR | {"w3": normal(32, 32, 1, seed=2)},
        {"x": normal(2, 32, 32, seed=9)},
        explicit=("x", "c"),
    ),
    "conv of a matrix product": Case(
        "(float[b,32,32] x) => (float[b,48,32] y) { c = MatMul(x, w3)  y = Conv(c, w4) }",
        {"w3": normal(32, 32, seed=2), "w4": normal(48, 32, 1, seed=3)},
        {"x": normal(2, 32, 32, seed=9)},
        explicit=("x", "c"),
    ),
}
_BIASES = {"none": None, "vector": (48,), "row": (1, 48), "one value": (1,), "scalar": (), "matrix": (5, 48)}
for _name, _shape in _BIASES.items():
    for _transposed in (0, 1):
        for _beta in (1, 0.5):
            _attrs = f"transB={_transposed}, beta={float(_beta)}"
            _is_vector = _shape in {None, (48,), (1, 48)} and _beta == 1
            CASES[f"Gemm transB={_transposed} beta={_beta} bias {_name}"] = Case(
                f"""(float[5,32] x) => (float[5,32] y) {{ h = Gemm<{_attrs}>(x, w3{"" if _shape is None else ", c"})
                y = Gemm<{_attrs}>(h, w4) }}""",
                {
                    "w3": normal(*((48, 32) if _transposed else (32, 48)), scale=0.2),
                    "w4": normal(*((32, 48) if _transposed else (48, 32)), seed=1, scale=0.2),
                }
                | ({} if _shape is None else {"c": normal(*_shape, seed=2)}),
                ROWS,
                folded=("h",) if _is_vector else (),
                explicit=("x",) if _is_vector else ("x", "h"),
                shifted=("h",) if _is_vector else (),
            )  # fmt: skip


def plan(graph, recipe=None):
    return plan_placement(graph, {}, recipe or PLAIN)


def any_equalization(size, seed=0, *, shift=False):
    """Multipliers from 1/4 to 4, and offsets of the size of the activations."""
    random = np.random.default_rng(seed)
    offset = tuple(random.normal(size=size).astype(np.float16).tolist()) if shift else None
    return Equalization(alpha=0.5, multiplier=tuple((2.0 ** random.integers(-2, 3, size)).tolist()), offset=offset)


def table_of(equalizations, amax=8.0, **amaxes):
    """A table of these tensors; a value of None is a tensor that stays as it is."""
    tensors = {
        name: TensorRange(amax=amaxes.get(name, amax), min=-amax, max=amax, rms=1.0, equalization=equalization)
        for name, equalization in equalizations.items()
    }
    sha = "a" * 64
    return CalibrationTable(
        method="minmax", samples=1, model_sha256=sha, data_sha256=sha, recipe_sha256=sha, tensors=tensors
    )


def any_table(graph, *, shift):
    """An equalization for every activation that can have one."""
    placement = plan(graph)
    layers = {layer.tensor: layer for layer in find_layers(graph, placement) if layer.is_closed}
    equalizations = dict.fromkeys(placement.tensors)
    for seed, (tensor, layer) in enumerate(layers.items()):
        can_shift = shift and all(view.takes_offset for view in layer.views)
        equalizations[tensor] = any_equalization(layer.num_channels, seed, shift=can_shift)
    return table_of(equalizations)


def observe(graph, placement, feeds):
    """What calibration on one batch would see of a placement's tensors."""
    tapped = copy_graph(graph)
    tensors = tapped.tensors()
    names = [name for name in placement.tensors if name not in feeds]
    tapped.outputs = [tensors[name] for name in names]
    taps = dict(zip(names, run(tapped, **feeds) if names else [], strict=True))
    observation = Observation(channel_axes(graph, placement.activations), keep_rows=True)
    observation.update(feeds, feeds | taps)
    return observation


def ignore(detail, done=0, total=0, level="progress"):
    """A note that nobody reads."""


def quantizer_of(graph, feeds, recipe, scale_dtype="float16", placement=None, table=None):
    """The quantizer that calibration on one batch gives, or that a table gives with the rows of that batch."""
    placement = placement or plan(graph, recipe)
    observation = observe(graph, placement, feeds)
    sha = "a" * 64
    table = table or table_from_observers(
        observation.observers,
        recipe,
        samples=1,
        model_sha256=sha,
        data_sha256=sha,
        equalized=equalize_layers(find_layers(graph, placement), observation, recipe, ignore),
    )
    rows = {name: sampler.rows() for name, sampler in observation.rows.items()}
    return with_rounded_weights(Quantizer(placement, table, INT8, scale_dtype), graph, rows, recipe, ignore)
