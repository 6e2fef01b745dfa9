from __future__ import annotations

import numpy as np
import pytest
from backend_cases import batch, model_from_text, quantized_mlp
from onnx import TensorProto, helper

from trtforge.backends.diagnose import Refusal, error_from_refusal
from trtforge.errors import BuildError
from trtforge.graph.names import NameMap


def refusal(build, model, profile, **options):
    with pytest.raises(BuildError) as caught:
        build(model, profile, **options)
    return caught.value


X = {"x": batch(8)}
XZ = {"x": batch(8), "z": batch(8)}
QDQ = "{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"
IN_OUT = "g (float[b,8] x) => (float[b,8] y)"


@pytest.mark.parametrize(
    ("text", "profile", "node", "what", "why"),
    [
        (f"{IN_OUT} {{ a = Relu(x) y = Foo(a) }}", X, "node1", "node 'node1' (Foo)", "has no operator Foo"),
        ("g (float[b,8] x) => (int64[2,n] y) { y = NonZero(x) }", X, "node0", "(NonZero)", "has no operator NonZero"),
        (f"{IN_OUT} <float s={{0.1}}, int8 z={{3}}> {QDQ}", X, "node0", "(QuantizeLinear)", "symmetric"),
        (f"{IN_OUT} <float s={{-1}}, int8 z={{0}}> {QDQ}", X, "node0", "(QuantizeLinear)", "scale is zero"),
        (
            f"{IN_OUT} <int32[8] w={{1,2,3,4,5,6,7,8}}, float s={{0.1}}, int32 z={{0}}> "
            "{ d = DequantizeLinear(w, s, z) y = Add(x, d) }",
            X, "node0", "(DequantizeLinear)", "it dequantizes INT32, usually a quantized bias",
        ),
        (
            "g (float[b,8] x) => (uint8[b,8] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }",
            X, "node0", "(DynamicQuantizeLinear)", "DynamicQuantizeLinear belongs to dynamic",
        ),
        (
            "g (int8[b,8] x) => (int32[b,1] y) <int8[8,1] w={1,2,3,4,5,6,7,8}> { y = MatMulInteger(x, w) }",
            X, "node0", "(MatMulInteger)", "MatMulInteger belongs to dynamic",
        ),
        (
            "g (float[b,8] x, float[c,8] z) => (float[b,8] y) { y = Add(x, z) }",
            {"x": batch(8), "z": ((2, 8), (3, 8), (8, 8))},
            "node0", "node 'node0'", "the opt shapes of optimisation profile 0 do not fit the model: node0: dimensions",
        ),
        (f"{IN_OUT} {{ y = Relu(x) }}", {"x": batch(9)}, None, "the model",
         "profile 0 gives axis 1 of input 'x' the range min=9, opt=9, max=9, but the model fixes it to 8"),
        ("g (uint16[b,8] x) => (uint16[b,8] y) { y = Add(x, x) }", X, None, "the model", "has an element type that"),
        (
            "g (float[b,8] x, int64[1] z) => (float[b,1] y) { y = ReduceSum(x, z) }",
            {"x": batch(8), "z": ((1,),) * 3}, "node0", "(ReduceSum)", "an input of ReduceSum is computed at run time",
        ),
        ("g (float[b,8] x, float16[b,8] z) => (float[b,8] y) { y = Add(x, z) }", XZ, "node0", "(Add)",
         "its inputs have different element types, Float and Half"),
        ("g (float[b,8] x) => (float[4,n] y) <int64[2] s={3,11}, int64[2] t={4,-1}> "
         "{ a = Reshape(x, s) y = Reshape(a, t) }", X, "node1", "(Reshape)", "shapes inside the model do not fit"),
        ("g (float[b,8] x, int64[b,8] z) => (float[b,8] y) { a = Relu(x) "
         'y = ScatterElements<axis=1, reduction="add">(a, z, x) }', XZ, "node1", "(ScatterElements)",
         "Unsupported reduction type"),
        (f"{IN_OUT} {{ y = Mod(x, x) }}", X, "node0", "(Mod)", "Inputs cannot be of floating point types"),
        (
            "g (float[b,8] x, bool c) => (float[b,8] y) { y = If(c) <then_branch = t () => (float[b,8] u) "
            "{ [inner] u = Foo(x) }, else_branch = e () => (float[b,8] v) { v = Relu(x) }> }",
            X, "inner", "node 'inner' (Foo)", "has no operator Foo",
        ),
    ],
)  # fmt: skip
def test_a_refusal_of_the_builder_names_node_and_reason(build, text, profile, node, what, why):
    error = refusal(build, model_from_text(text), profile)
    assert error.node == node
    assert error.what.startswith("TensorRT-RTX refuses ")
    assert what in error.what
    assert why in error.why
    assert error.fix


def test_turing_without_fp32_gemm_says_to_use_fp16(build):
    error = refusal(build, quantized_mlp(), {"x": batch(32)}, gpu="sm_75")
    assert "sm_75 cannot run it" in error.why
    assert "--int8 --fp16" in error.fix
    assert error.node in {"up", "down"}


def test_fp8_for_an_older_target_names_the_types_that_it_lacks(build):
    text = """g (float[b,32] x) => (float[b,32] y) {
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        y = MatMul(d, w)
    }"""
    model = model_from_text(text, s=np.float32(0.1), w=np.eye(32, dtype=np.float32))
    model.graph.initializer.append(helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0]))
    error = refusal(build, model, {"x": batch(32)})
    assert error.why == "the model holds fp8_e4m3, which not every target has"


def test_bf16_for_turing_names_the_type_that_it_lacks(build):
    text = "g (bfloat16[b,32] x) => (bfloat16[b,32] y) { y = Relu(x) }"
    with pytest.raises(BuildError) as caught:
        build(model_from_text(text), {"x": batch(32)}, gpu="sm_75")
    assert caught.value.why == "the model holds bf16, which sm_75 does not have"
    assert caught.value.fix == "build with --fp16 in the place of --bf16, or for sm_80 or newer"


def test_an_input_without_a_range_is_refused_instead_of_taken_as_one(build):
    model = model_from_text("g (float[b,8] x, float[c,8] z) => (float[b,8] y) { y = Add(x, z) }")
    error = refusal(build, model, X)
    assert error.what == "optimisation profile 0 has no range for input 'z'"
    assert error.why == "its shape is [-1, 8], -1 being open"


def test_a_shape_tensor_without_values_prints_what_to_add(build):
    model = model_from_text("g (float[b,8] x, int64[2] sizes) => (float[p,q] y) { y = Reshape(x, sizes) }")
    error = refusal(build, model, {"x": batch(8), "sizes": ((2,),) * 3})
    assert error.what == "input 'sizes' decides shapes, but the profile does not give its values"
    assert "values: {sizes: {min: [1, 1], opt: [1, 1], max: [1, 1]}}" in error.fix


def test_a_hostile_node_name_is_printable_in_the_text_and_whole_in_the_error(build):
    name = "a]\nName: fake\x1b[31m" + "x" * 500
    model = model_from_text(f"{IN_OUT} {{ y = Foo(x) }}")
    model.graph.node[0].name = name
    error = refusal(build, model, X)
    assert error.node == name
    assert error.what.isprintable()
    assert "a]\\x0aName: fake\\x1b[31mxxx" in error.what
    assert len(error.what) < 250


def test_a_node_without_a_name_is_called_that(build):
    model = model_from_text(f"{IN_OUT} {{ y = Foo(x) }}")
    model.graph.node[0].name = ""
    error = refusal(build, model, X)
    assert error.what == "TensorRT-RTX refuses a node without a name (Foo)"
    assert error.node is None


NAMES = NameMap({"n4": "enc/ffn"}, {"t2": "hidden"})


@pytest.mark.parametrize(
    ("message", "node", "why", "fix"),
    [
        ("Error Code 10: Could not find any implementation for node {ForeignNode[n4]}.", "enc/ffn", "it has no kernel",
         "keep the node in a wider type"),
        ("[virtualMemoryBuffer.cpp] Error Code 2: OutOfMemory (Requested size was 9 bytes.)", None, "memory ran out",
         "close other programs"),
        ("Assertion failed: false", None, "Assertion failed: false", "export the part of the model"),
        ("false", None, "it does not support this use of one of its operators and gives no reason", "replace"),
        ("n4: bad t2, t99 In check at /_src/a/b.cpp:3)", "enc/ffn", "enc/ffn: bad hidden, t99", "export the part"),
        ("", None, "it gave no reason", "export the part"),
        ("[x] Error Code 1: Cuda Runtime (cudaError 35: CUDA driver)", None, "it gave no reason", "export the part"),
    ],
)  # fmt: skip
def test_a_message_without_a_node_from_the_parser_is_searched_for_one(message, node, why, fix):
    error = error_from_refusal(Refusal([message]), NAMES)
    assert error.node == node
    assert error.why.startswith(why)
    assert error.fix.startswith(fix)


def test_a_long_message_is_cut():
    assert len(error_from_refusal(Refusal(["x" * 10_000]), NAMES).why) == 600
