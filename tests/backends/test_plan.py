from __future__ import annotations

import pytest

from trtforge.backends.layer_table import parse_plan
from trtforge.backends.plan import node_precision

LINEAR = "Format: (Linear) Row major linear format"


def operand(name, dtype, *dims):
    return f" {{ Name: {name}, Dimensions: [{','.join(map(str, dims))}], Strides: [1], Datatype: {dtype}, {LINEAR} }}"


def row(name, kind="gemm", inputs=(), constants=(), outputs=(), covers=(), tactic=""):
    metadata = "\x1f".join(f"[ONNX Layer: {node}]" for node in covers)
    return (
        f"Name: {name}, LayerType: {kind}, Inputs: [{','.join(inputs)}], Constants: [{','.join(constants)}], "
        f"Outputs: [{','.join(outputs)}], TacticName: {tactic}, StreamId: 0, Metadata: {metadata}"
    )


def table(*rows):
    return "\n".join(["Layers:", *rows, "", "I/O Tensors:", " Name: x, IOMode: Input", ""])


ALPHA, BETA = operand("n0_alpha_myl0", "Float", 1), operand("n0_beta_myl0", "Float", 1)
NODES = {"n0": "enc/q", "n1": "enc/k", "n2": "enc/out", "n3": ""}
TENSORS = {"t0": "hidden", "t1": ""}


def read(*rows, ports=("x", "y")):
    return parse_plan(table(*rows), ports, NODES, TENSORS)


def gemm_dtype(inputs, constants=(), kind="gemm", name="n0_myl0_1"):
    plan = read(row(name, kind, inputs, constants))
    assert plan.unreadable is None
    return plan.layers[0].gemm_dtype


def test_a_row_is_read_with_original_names():
    plan = read(
        row(
            "n1+n0_myl0_2",
            inputs=[operand("t0.1_myl0", "Int8", -1, 384), operand("x", "Half", -1, 4)],
            constants=[operand("__mye1_dconst_myl0", "Int8", 384, 768), ALPHA],
            outputs=[operand("t1", "BFloat16", 2)],
            covers=["n1", "n0", "n1"],
            tactic="__myelin_CASK_STUB",
        )
    )
    (layer,) = plan.layers
    assert layer.name == "enc/k+enc/q"
    assert layer.main_nodes == layer.onnx_nodes == ("enc/k", "enc/q")
    assert (layer.type, layer.tactic) == ("gemm", "__myelin_CASK_STUB")
    assert [(t.name, t.dtype, t.shape) for t in layer.inputs] == [
        ("hidden", "int8", (-1, 384)),
        ("x", "fp16", (-1, 4)),
    ]
    assert layer.constants[0].shape == (384, 768)
    assert layer.outputs[0].name == "t1"
    assert layer.outputs[0].dtype == "bf16"


def test_rows_without_work_are_no_kernels():
    idle = ("shape_call", "signal", "wait", "cjmp", "jmp", "reshape", "ShapeHostToDevice")
    plan = read(*(row(f"a{kind}", kind) for kind in (*idle, "kgen", "runtime_fusion")))
    assert len(plan.layers) == 9
    assert plan.kernels == 2


def test_a_row_outside_the_compiled_graph_is_read():
    copy = (
        "Name: [ShapeHostToDeviceCopy 0], LayerType: ShapeHostToDevice, Inputs: [], Outputs: [ { Name: shape, "
        "Location: Device, Dimensions: [], Datatype: Int32, Format: Format not available due to dynamic shapes }], "
        "ParameterType: ShapeH2D, shapeValues0: [-4], TacticValue: 0x0000000000000000, StreamId: 0, Metadata: "
    )
    plan = read(copy, row("n0_myl0_1", covers=["n0"]))
    assert plan.unreadable is None
    assert [layer.type for layer in plan.layers] == ["ShapeHostToDevice", "gemm"]
    assert plan.layers[0].outputs[0].name == "shape"
    assert plan.layers[0].tactic == ""


A_INT8, A_HALF = operand("a", "Int8", -1, 64), operand("a", "Half", -1, 64)
W_INT8, W_HALF = operand("w", "Int8", 64, 64), operand("w", "Half", 64, 64)
BIAS = operand("bias", "Float", 1, 64)


@pytest.mark.parametrize(
    ("inputs", "constants", "expected"),
    [
        ([A_INT8], [W_INT8, ALPHA, BETA], "int8"),
        ([A_INT8], [BIAS, BIAS, W_INT8], "int8"),
        ([A_INT8, A_HALF], [W_INT8, ALPHA], "int8"),
        ([A_INT8], [W_HALF, ALPHA], "mixed"),
        ([A_HALF], [W_INT8, ALPHA], "mixed"),
        ([A_INT8, W_HALF], [], "mixed"),
        ([A_HALF, W_HALF], [BIAS, ALPHA], "fp16"),
        ([operand("mask", "Bool", 4, 4), A_HALF], [W_HALF], "fp16"),
        ([A_HALF], [operand("w", "Half", 64, 1), ALPHA], "fp16"),
        ([operand("a", "Float", -1, 32, 8, 8)], [operand("w", "Float", 32, 1, 1, 1), ALPHA], "fp32"),
    ],
)
def test_a_gemm_has_the_type_of_its_activation_and_weight_not_of_scales_bias_or_residual(inputs, constants, expected):
    assert gemm_dtype(inputs, constants) == expected


@pytest.mark.parametrize(
    ("name", "kind", "is_gemm"),
    [
        ("n0_myl0_1", "correlation", True),
        ("n0_U0_myl0_1", "deconv", True),
        ("__myl_FcAddDivErfAddMulMul_myl0_1", "runtime_fusion", True),
        ("__myl_CorrMulAddSilu_myl0_1", "runtime_fusion", True),
        ("__myl_CastMulFc_myl0_1", "kgen", True),
        ("__myl_MulMinMaxRounCast_myl0_1", "kgen", False),
        ("_gemm_mha_v2_myl0_1", "kgen", False),
    ],
)
def test_gemms_are_told_by_type_and_by_the_words_of_a_fused_kernel(name, kind, is_gemm):
    plan = read(row(name, kind, [A_HALF], [W_HALF]))
    assert plan.layers[0].is_gemm == is_gemm
    assert plan.gemm == ({"fp16": 1} if is_gemm else {})
    assert plan.fused_attention == (name == "_gemm_mha_v2_myl0_1")


def test_a_node_has_the_type_of_the_gemm_named_after_it_not_of_a_kernel_that_rescales_its_result():
    plan = read(
        row("__myl_MulAdd_myl0_0", "kgen", [operand("h", "Float", -1, 64)], [], covers=["n0", "n2"]),
        row("n0_myl0_1", "gemm", [A_INT8], [W_INT8], covers=["n0"]),
        row("__myl_FcAdd_myl0_2", "runtime_fusion", [A_HALF], [W_HALF], covers=["n0", "n1"]),
    )
    assert node_precision(plan, ["enc/q", "enc/k", "enc/out", "absent"]) == {
        "enc/q": "int8",
        "enc/k": "fp16",
        "enc/out": "fp32",
    }


def test_a_mixed_gemm_gives_its_node_the_wider_type():
    plan = read(row("__myl_CastMulFc_myl0_1", "runtime_fusion", [A_INT8, W_HALF], covers=["n0"]))
    assert plan.gemm == {"mixed": 1}
    assert node_precision(plan, ["enc/q"]) == {"enc/q": "fp16"}


def test_two_gemms_of_one_node_give_it_the_widest_type():
    plan = read(
        row("n0_myl0_1", "gemm", [operand("a", "Float", 4, 4)], [operand("w", "Float", 4, 4)], covers=["n0"]),
        row("n0_myl0_2", "gemm", [A_INT8], [W_INT8], covers=["n0"]),
    )
    assert node_precision(plan, ["enc/q"]) == {"enc/q": "fp32"}


def test_a_node_without_a_name_keeps_its_short_one():
    plan = read(row("n3_myl0_0", covers=["n3"]))
    assert plan.layers[0].onnx_nodes == ("n3",)
    assert plan.layers[0].name == "n3"


def test_an_input_whose_name_looks_like_a_row_is_read_as_a_name():
    port = "x, Dimensions: [1], Datatype: Int8, Format: F }], Constants: [ { Name: w, Dimensions: [9,9], Datatype: Int8"
    plan = read(row("n0_myl0_1", inputs=[operand(port, "Float", 2, 2)], constants=[W_HALF]), ports=[port, "x"])
    assert plan.unreadable is None
    assert plan.layers[0].inputs[0].name == port
    assert plan.gemm == {"mixed": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the builder logged no layer table"),
        ("Layer list:\nName: a", "the builder logged no layer table"),
        (table("Kernel: a"), "unknown format: expected 'Name: ', found 'Kernel: a'"),
        (table("Name: a, LayerType: gemm"), "unknown format: ', Inputs: [' is missing"),
        (table(row("a", inputs=[" { Name: x }"])), "unknown format"),
        (table("\x00" * 50), "unknown format"),
    ],
)
def test_a_text_of_another_format_gives_an_unreadable_plan(text, reason):
    plan = parse_plan(text, [], {}, {})
    assert reason in plan.unreadable
    assert plan.layers == ()
    assert plan.to_info().unreadable == plan.unreadable
    assert node_precision(plan, ["a"]) == {}


def test_every_prefix_of_a_table_is_read_or_called_unreadable():
    text = table(row("n0_myl0_1", inputs=[A_INT8], constants=[W_INT8, ALPHA], covers=["n0", "n1"]))
    for length in range(len(text)):
        plan = parse_plan(text[:length], [], NODES, TENSORS)
        assert plan.unreadable or len(plan.layers) == text[:length].count("Metadata: ")


def test_the_manifest_has_constants_after_inputs():
    info = read(row("n0_myl0_1", inputs=[A_INT8], constants=[W_INT8], covers=["n0"])).to_info()
    assert [tensor.dtype for tensor in info.layers[0].inputs] == ["int8", "int8"]
    assert (info.kernels, info.gemm, info.layers[0].onnx_nodes) == (1, {"int8": 1}, ("enc/q",))
