"""trtforge::AttentionFFN_*: op types, bodies in ONNX Runtime against float64, and the table in C++."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from block_reference import Operands, Sizes, block_in_float64, input_scales, make_operands

from trtforge.errors import InputError
from trtforge.ops import attention_ffn as op

ROOT = Path(__file__).parents[2]
ELEMENT_TYPES = {
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
    np.dtype(np.float16): onnx.TensorProto.FLOAT16,
    np.dtype(np.int8): onnx.TensorProto.INT8,
    np.dtype(np.int32): onnx.TensorProto.INT32,
}


def run_body(variant: op.Variant, sizes: Sizes, operands: Operands, scales: dict[str, float]) -> np.ndarray:
    """The op as a node of a model that carries its body, in ONNX Runtime as written."""
    node = onnx.helper.make_node(
        variant.op_type,
        list(operands),
        ["y"],
        domain=op.DOMAIN,
        num_heads=sizes.num_heads,
        softmax_scale=sizes.softmax_scale,
        epsilon=sizes.epsilon,
        **scales,
    )
    inputs = [
        onnx.helper.make_tensor_value_info(name, ELEMENT_TYPES[value.dtype], value.shape)
        for name, value in operands.items()
    ]
    output = onnx.helper.make_tensor_value_info("y", ELEMENT_TYPES[operands["x"].dtype], None)
    imports = [onnx.helper.make_opsetid("", op.OPSET), onnx.helper.make_opsetid(op.DOMAIN, op.VERSION)]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "block", inputs, [output]),
        functions=[op.function_from_variant(variant)],
        opset_imports=imports,
        ir_version=10,
    )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], operands)[0])


def error_of(variant: op.Variant, sizes: Sizes, dtype: type[np.floating]) -> float:
    """The largest difference of the body from float64."""
    operands = make_operands(variant, sizes, dtype)
    scales = input_scales(variant, sizes, operands)
    y = run_body(variant, sizes, operands, scales)
    assert y.dtype == dtype
    return float(np.abs(y - block_in_float64(variant, sizes, operands, scales)).max())


@pytest.mark.parametrize("variant", [v for v in op.all_variants() if not v.is_int8], ids=lambda v: v.op_type)
def test_body_equals_float64(variant: op.Variant) -> None:
    # float32 rounds each of about 30 steps, of values near one, by 2^-24; products of K = 96 add sqrt(96) of them.
    assert error_of(variant, Sizes(), np.float32) < 300 * 2.0**-24


@pytest.mark.parametrize("variant", [v for v in op.all_variants() if v.is_int8], ids=lambda v: v.op_type)
def test_int8_body_equals_float64_with_the_same_rounding(variant: op.Variant) -> None:
    # Where float32 and float64 round to different codes, one code of the product's input moves: 1/127 of its range
    # times a weight of about K^-0.5. All else is exact to float32.
    assert error_of(variant, Sizes(), np.float32) < 4 / 127 * 64**-0.5


@pytest.mark.parametrize("is_int8", [False, True])
def test_float16_body_keeps_scores_and_statistics_in_float32(is_int8: bool) -> None:
    variant = op.Variant("post", "gelu", is_causal=True, is_int8=is_int8, has_lengths=True)
    assert error_of(variant, Sizes(), np.float16) < (0.05 if is_int8 else 0.01)


def test_float16_mask_of_a_whole_row_stays_finite() -> None:
    variant, sizes = op.Variant("pre", "relu"), Sizes(bias_dims=(2, 1, 1, 7))
    operands = make_operands(variant, sizes, np.float16)
    operands["attention_bias"] = np.full(sizes.bias_dims, np.finfo(np.float16).min, np.float16)
    y = run_body(variant, sizes, operands, {})
    np.testing.assert_allclose(y, block_in_float64(variant, sizes, operands, {}), atol=0.02)


@pytest.mark.parametrize("bias_dims", [(1, 1, 1, 7), (2, 1, 1, 7), (1, 2, 7, 7), (2, 2, 7, 7), (2, 1, 7, 1)])
def test_bias_is_broadcast(bias_dims: tuple[int, int, int, int]) -> None:
    assert error_of(op.Variant("post", "relu"), Sizes(bias_dims=bias_dims), np.float32) < 300 * 2.0**-24


def test_sequence_without_rows_is_zero() -> None:
    variant, sizes = op.Variant("post", "silu", has_lengths=True), Sizes()
    operands = make_operands(variant, sizes, np.float32) | {"lengths": np.array([0, 7], np.int32)}
    y = run_body(variant, sizes, operands, {})
    assert not y[0].any()
    assert y[1].all()


def test_op_types_are_as_documented_and_each_names_one_variant() -> None:
    names = [variant.op_type for variant in op.all_variants()]
    assert len(set(names)) == len(names) == 64
    assert {"AttentionFFN_post_gelu", "AttentionFFN_pre_gelu_tanh_causal_int8_lengths"} <= set(names)
    assert all(op.variant_from_op_type(variant.op_type) == variant for variant in op.all_variants())


def test_unknown_op_type_is_refused() -> None:
    with pytest.raises(InputError, match="AttentionFFN_post_swish is not an operator") as caught:
        op.variant_from_op_type("AttentionFFN_post_swish")
    assert "AttentionFFN_{pre|post}" in caught.value.why


def test_table_in_c_plus_plus_is_the_same(tmp_path: Path) -> None:
    """plugins/csrc/fields.h drives the adapter; this prints it and compares it with the operator."""
    program = tmp_path / "fields"
    source = ROOT / "tests/csrc/fields/print_fields.cpp"
    subprocess.run(["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", source, "-o", program], check=True)
    printed = json.loads(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
    expected = [
        {
            "op_type": variant.op_type,
            "inputs": [
                {"name": given.name, "kind": given.kind, "rank": len(given.dims)} for given in op.inputs_of(variant)
            ],
            "attributes": [{"name": given.name, "kind": given.kind} for given in op.attributes_of(variant)],
        }
        for variant in op.all_variants()
    ]
    by_name = {entry["op_type"]: entry for entry in printed["variants"]}
    assert len(by_name) == len(printed["variants"])
    assert by_name == {entry["op_type"]: entry for entry in expected}
    assert printed["domain"] == op.DOMAIN
    assert printed["version"] == str(op.VERSION)
    assert printed["int8_k_multiple"] == op.INT8_K_MULTIPLE
