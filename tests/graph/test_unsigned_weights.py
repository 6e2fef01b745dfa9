from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from support import save_onnx

from trtforge.graph.unsigned_weights import with_unsigned_weights

# Codes up to 32: nothing saturates on any CPU, so both forms give the same integers.
CODES = np.random.default_rng(0).integers(-32, 33, (64, 48)).astype(np.int8)
X = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
QUANTIZE = "q, s, z = DynamicQuantizeLinear(x)"
PRODUCT = f"g (float[b, 64] x) => (y) {{ {QUANTIZE} y = MatMulInteger(q, w, z, wz) }}"


def run(model: bytes, **feeds: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options).run(None, feeds)


def types_of(model: bytes) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in onnx.load_from_string(model).graph.initializer}


@pytest.mark.parametrize("zeros", [np.array(3, np.int8), np.arange(48, dtype=np.int8)])
def test_products_stay_the_same_integers(tmp_path: Path, zeros: np.ndarray) -> None:
    path = save_onnx(tmp_path / "m.onnx", PRODUCT, w=CODES, wz=zeros)
    unsigned = with_unsigned_weights(path)
    assert unsigned is not None
    assert types_of(unsigned)["w_unsigned"] == onnx.TensorProto.UINT8
    np.testing.assert_array_equal(run(unsigned, x=X)[0], run(path.read_bytes(), x=X)[0])


def test_small_and_shared_weights_and_a_zero_point_that_is_left_out(tmp_path: Path) -> None:
    text = f"""g (float[b, 4] x) => (a, c) {{ {QUANTIZE}
        a = MatMulInteger(q, w, z) c = MatMulInteger(q, w) }}"""
    path = save_onnx(tmp_path / "m.onnx", text, w=CODES[:4, :4])
    unsigned = with_unsigned_weights(path)
    assert unsigned is not None
    assert len(types_of(unsigned)) == 3
    for found, expected in zip(run(unsigned, x=X[:, :4]), run(path.read_bytes(), x=X[:, :4]), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_names_that_are_taken_are_left(tmp_path: Path) -> None:
    text = f"""g (float[b, 64] x) => (y) {{ {QUANTIZE} p = MatMulInteger(q, w, z, wz) w_unsigned = Identity(p)
        y = Identity(w_unsigned) }}"""
    path = save_onnx(tmp_path / "m.onnx", text, w=CODES, wz=np.array(0, np.int8))
    unsigned = with_unsigned_weights(path)
    assert unsigned is not None
    np.testing.assert_array_equal(run(unsigned, x=X)[0], run(path.read_bytes(), x=X)[0])


@pytest.mark.parametrize(
    "text",
    [
        "g (float[b, 64] x) => (y) { f = Cast<to=1>(w) y = MatMul(x, f) }",
        "g (int8[b, 64] x) => (y) { y = MatMulInteger(x, w) }",
        f"g (float[b, 64] x) => (y) {{ {QUANTIZE} v = Identity(w) y = MatMulInteger(q, v, z) }}",
    ],
)
def test_models_without_signed_weights_beside_unsigned_codes_stay(tmp_path: Path, text: str) -> None:
    assert with_unsigned_weights(save_onnx(tmp_path / "m.onnx", text, w=CODES)) is None


def test_files_that_are_no_model_and_weights_beside_the_file_stay(tmp_path: Path) -> None:
    for content in (b"", b"\xff\xff\xff"):
        (tmp_path / "bad.onnx").write_bytes(content)
        assert with_unsigned_weights(tmp_path / "bad.onnx") is None
    outside = save_onnx(tmp_path / "m.onnx", PRODUCT, external=True, w=CODES, wz=np.array(0, np.int8))
    assert with_unsigned_weights(outside) is None
