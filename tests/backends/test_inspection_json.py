"""The engine inspector's JSON, written by hand after TensorRT 11's documentation: no engine was inspected for it."""

from __future__ import annotations

import json

import pytest

from trtforge.backends.inspection_json import parse_inspection
from trtforge.backends.plan import node_precision

NODES = {"n0": "stem/conv", "n1": "enc/up", "n2": "enc/scores", "n3": "enc/out", "n4": "stem/act", "n5": "own"}
TENSORS = {"t0": "stem/y", "t1": "hidden"}


def operand(name, dtype, *dims):
    return {
        "Name": name,
        "Location": "Device",
        "Dimensions": list(dims),
        "Strides": [1],
        "Datatype": dtype,
        "Format": "Format not available due to dynamic shapes" if -1 in dims else "Row major linear FP32 format",
    }


def layer(name, kind, inputs=(), outputs=(), covers=(), **more):
    metadata = "\x1f".join(f"[ONNX Layer: {node}]" for node in covers)
    known = {"Name": name, "LayerType": kind, "Inputs": list(inputs), "Outputs": list(outputs), "Metadata": metadata}
    return {**known, "TacticName": "k", "StreamId": 0, **more}


CONV = layer(
    "n0 + n4",
    "CaskConvolution",
    [operand("x", "Int8", -1, 16, 8, 8), operand("t1", "Half", -1, 32, 8, 8)],
    [operand("t0", "Half", -1, 32, 8, 8)],
    ["n0", "n4"],
    ParameterType="Convolution",
    Kernel=[3, 3],
    OutMaps=32,
    Groups=1,
    Weights={"Type": "Int8", "Count": 4608},
    Bias={"Type": "Float", "Count": 32},
)
GEMM = layer(
    "n1_myl0_3",
    "gemm",
    [operand("t0_myl0", "Half", -1, 64)],
    [operand("t1.2_myl0", "Half", -1, 64)],
    ["n1"],
    Constants=[operand("w", "Half", 64, 64), operand("alpha", "Float", 1)],
)
ATTENTION = layer(
    "_gemm_mha_v2_myl0_4",
    "kgen",
    [operand("t1_myl0", "Half", -1, 4, 8, 16), operand("k_myl0", "Half", -1, 4, 8, 16)],
    [operand("t2", "Half", -1, 4, 8, 16)],
    ["n2", "n3"],
)
PLUGIN = layer("n5", "PluginV3", [operand("t2", "Half", -1, 64)], [operand("y", "Half", -1, 64)], ["n5"])
SIGNAL = layer("__mye_signal", "signal")
NOOP = layer("n6", "NoOp", [operand("y", "Half", 4)], [operand("y", "Half", 4)])
PORTS = [
    {
        "Name": "x",
        "IOMode": "Input",
        "DataType": "Float",
        "Dimensions": [-1, 16, 8, 8],
        "Location": "Device",
        "IsShapeInferenceIO": False,
        "ProfileInfo": [{"MinShape": [1, 16, 8, 8], "OptShape": [4, 16, 8, 8], "MaxShape": [8, 16, 8, 8]}],
    }
]


def read(*layers):
    return parse_inspection(json.dumps({"Layers": layers, "I/O Tensors": PORTS}), ["x", "y"], NODES, TENSORS)


def test_kernels_types_and_original_names_are_read():
    plan = read(CONV, GEMM, ATTENTION, PLUGIN, SIGNAL, NOOP)
    assert plan.unreadable is None
    assert (plan.kernels, plan.fused_attention) == (4, 1)
    assert plan.gemm == {"fp16": 1, "int8": 1}
    assert [entry.name for entry in plan.layers[:2]] == ["stem/conv+stem/act", "enc/up"]
    assert plan.layers[0].onnx_nodes == ("stem/conv", "stem/act")
    assert [tensor.name for tensor in plan.layers[0].inputs] == ["x", "hidden"]
    assert plan.layers[1].outputs[0].name == "hidden"
    assert plan.layers[1].tactic == "k"
    assert node_precision(plan, NODES.values())["stem/conv"] == "int8"
    assert node_precision(plan, ["enc/up", "enc/scores"]) == {"enc/up": "fp16", "enc/scores": "fp16"}


def test_a_convolution_takes_its_second_operand_from_its_weights():
    assert read({**CONV, "Weights": {"Type": "Half", "Count": 4608}}).gemm == {"mixed": 1}
    assert read({**CONV, "LayerType": "CaskDeconvolutionV2"}).gemm == {"int8": 1}
    assert read({**CONV, "LayerType": "Reformat"}).gemm == {}


def test_the_plan_fits_the_manifest():
    info = read(CONV, GEMM).to_info()
    assert info.kernels == 2
    assert [tensor.shape for tensor in info.layers[0].inputs][-1] == (32, 144)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "the text: Invalid JSON"),
        ("[" * 100_000, "the text: Invalid JSON"),
        ("[]", "the text: Input should be an object"),
        ("{}", "Layers: Field required"),
        ('{"Layers": ["names only"]}', "Layers.0: Input should be"),
        ('{"Layers": [{"Name": "n0"}]}', "Layers.0.LayerType: Field required"),
        ('{"Layers": [{"Name": "a", "LayerType": "b", "Inputs": [{"Name": "x"}]}]}', "Layers.0.Inputs.0.Datatype"),
    ],
)
def test_another_format_makes_the_plan_unreadable_and_breaks_nothing(text, where):
    plan = parse_inspection(text, [], {}, {})
    assert plan.layers == ()
    assert plan.unreadable.startswith(f"the engine inspector's JSON has an unknown format: {where}")


def test_no_layers_are_no_kernels():
    assert read().kernels == 0
