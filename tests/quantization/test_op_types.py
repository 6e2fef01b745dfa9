from __future__ import annotations

import numpy as np
import pytest
from quant_cases import graph_from_text

from trtforge.quantization.op_types import BFLOAT16, fill_element_types, op_types


def test_variadic_input_repeats_its_variable():
    types = op_types("Concat", "", 23)
    assert types.input_variable(5) == "T"


def test_variadic_output_repeats_its_variable():
    assert op_types("Split", "", 23).output_variable(5) == "T"


def test_index_beyond_the_formal_inputs_and_outputs_has_no_variable():
    types = op_types("Relu", "", 23)
    assert types.input_variable(1) is None
    assert types.output_variable(1) is None


def test_fixed_type_allows_only_itself():
    types = op_types("Resize", "", 23)
    assert not types.allows(types.input_variable(2), "float16")
    assert types.allows(types.input_variable(0), "float16")


def test_bfloat16_conv_is_known_from_opset_22_on():
    assert not op_types("Conv", "", 21).allows("T", "bfloat16")
    assert op_types("Conv", "", 22).allows("T", "bfloat16")


@pytest.mark.parametrize(("op", "domain"), [("NoSuchOp", ""), ("If", ""), ("Gelu", "com.microsoft")])
def test_unknown_operator_or_mixed_variadic_has_no_types(op, domain):
    assert op_types(op, domain, 23) is None


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("y = Relu(x)", np.float32),
        ("y = Shape(x)", np.int64),
        ("y = IsNaN(x)", np.bool_),
        ("y = Cast<to=10>(x)", np.float16),
        ("y = Cast<to=16>(x)", BFLOAT16),
        ("s = Shape(x) y = ConstantOfShape(s)", np.float32),
        ("y = DequantizeLinear(q, c)", np.float32),
    ],
)
def test_missing_element_types_follow_from_the_schemas(text, dtype):
    graph = graph_from_text(f"g (float[4] x) => (y) {{ {text} }}", q=np.zeros(4, np.int8), c=np.float32(1.0))
    for node in graph.nodes:
        node.outputs[0].dtype = None
    fill_element_types(graph)
    assert graph.nodes[-1].outputs[0].dtype == dtype


def test_tensor_of_an_unknown_operator_keeps_an_unknown_type():
    graph = graph_from_text("g (float[4] x) => (y) { y = Relu(x) }")
    graph.nodes[0].domain, graph.nodes[0].outputs[0].dtype = "custom", None
    fill_element_types(graph)
    assert graph.nodes[0].outputs[0].dtype is None
