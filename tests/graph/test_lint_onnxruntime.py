"""Models that ONNX Runtime's own quantizer made: mended, as accurate as before, built by TensorRT-RTX in INT8."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_models import parse, run
from lint_build import RtxBuild
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from trtforge.graph.edit import all_nodes
from trtforge.graph.lint import fix, lint
from trtforge.graph.load import load_model
from trtforge.graph.normalise import normalise

SHAPE = (3, 16, 16)
WEIGHTS = {
    "w1": (16, 3, 3, 3), "b1": (16,), "w2": (16, 16, 3, 3), "b2": (16,), "w3": (32, 32, 1, 1),
    "w4": (24, 32), "b4": (24,), "w5": (24, 10),
}  # fmt: skip
BODY = """net (float[N, 3, 16, 16] x) => (float[N, 10] y)
    <float zero = {0}, int64[8] pads = {0, 0, 0, 0, 0, 0, 1, 1}> {
    a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
    ar = Relu(a)
    c = Conv<pads = [1, 1, 1, 1]>(ar, w2, b2)
    cl = LeakyRelu<alpha = 0.1>(c)
    s = Add(cl, ar)
    p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(s)
    sg = Sigmoid(p)
    m = Mul(p, sg)
    pd = Pad(m, pads, zero)
    ap = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(pd)
    t = Transpose<perm = [0, 1, 3, 2]>(ap)
    cc = Concat<axis = 1>(t, ap)
    d = Conv(cc, w3)
    gp = GlobalAveragePool(d)
    fl = Flatten(gp)
    h = Gemm<transB = 1>(fl, w4, b4)
    hr = Relu(h)
    mm = MatMul(hr, w5)
    y = Softmax(mm)
    }"""


def batch(seed: int, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(size, *SHAPE)).astype(np.float32)


class Reader(CalibrationDataReader):
    """Sixteen samples, one at a time."""

    def __init__(self) -> None:
        self._feeds: Iterator[dict[str, np.ndarray]] = iter([{"x": batch(seed, 1)} for seed in range(16)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float network with every operator that the quantizer has a quantized form of."""
    random = np.random.default_rng(1)
    model = parse(BODY, opset=20)
    for name, shape in WEIGHTS.items():
        fan_in = np.prod(shape[1:]) if len(shape) == 4 else shape[-1 if name == "w4" else 0]
        values = random.normal(size=shape) * (0.1 if name[0] == "b" else (2 / fan_in) ** 0.5)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    path = tmp_path_factory.mktemp("source") / "net.onnx"
    onnx.save(model, path)
    return path


def quantized(source: Path, folder: Path, variant: tuple[Any, ...]) -> Path:
    quant_format, activations, weights, per_channel, extra = variant
    logging.getLogger().setLevel(logging.ERROR)
    path = folder / "quantized.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_static(
            source,
            path,
            Reader(),
            quant_format=quant_format,
            activation_type=activations,
            weight_type=weights,
            per_channel=per_channel,
            extra_options=extra,
        )
    return path


SIGNED, UNSIGNED, WIDE = QuantType.QInt8, QuantType.QUInt8, QuantType.QUInt16
QDQ, QOPERATOR = QuantFormat.QDQ, QuantFormat.QOperator
VARIANTS = {
    "qdq-uint8": (QDQ, UNSIGNED, UNSIGNED, False, {}),
    "qdq-mixed-per-channel": (QDQ, UNSIGNED, SIGNED, True, {}),
    "qdq-int8-per-channel": (QDQ, SIGNED, SIGNED, True, {}),
    "qdq-own-domain": (QDQ, UNSIGNED, SIGNED, False, {"UseQDQContribOps": True}),
    "qdq-dedicated-pairs": (QDQ, SIGNED, SIGNED, False, {"DedicatedQDQPair": True}),
    "qdq-float-weights": (QDQ, SIGNED, SIGNED, True, {"AddQDQPairToWeight": True}),
    "qdq-16-bit-activations": (QDQ, WIDE, SIGNED, False, {}),
    "qoperator-uint8": (QOPERATOR, UNSIGNED, UNSIGNED, False, {}),
    "qoperator-int8": (QOPERATOR, SIGNED, SIGNED, False, {}),
    "qoperator-per-channel": (QOPERATOR, SIGNED, SIGNED, True, {}),
}
"""Format, type of activations, type of weights, per channel, other options."""


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_quantized_model_is_mended(variant: tuple[Any, ...], source: Path, tmp_path: Path, rtx_build: RtxBuild) -> None:
    path = quantized(source, tmp_path, variant)
    x = batch(99)
    (exact,) = run(onnx.load(source), {"x": x})
    (before,) = run(onnx.load(path), {"x": x})
    graph, _ = normalise(load_model(path).graph, 13)
    assert any(finding.severity == "error" for finding in lint(graph))
    fix(graph)
    assert lint(graph) == []
    assert fix(graph) == []
    (after,) = run(graph, {"x": x})
    noise = np.abs(before - exact).max()
    assert np.abs(after - exact).max() <= 2 * noise + 1 / 127
    plan = rtx_build(graph)
    assert plan.gemm.get("int8", 0) == (0 if WIDE in variant else 5)
    assert {node.op for node in all_nodes(graph)}.isdisjoint({"QLinearConv", "QLinearMatMul", "QGemm"})
