from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from backend_cases import batch, model_from_text, quantized_mlp
from diagnose_cases import CASES, IN_OUT, TEXTS, X
from onnx import TensorProto, helper

from trtforge.backends.diagnose import Refusal, error_from_refusal
from trtforge.backends.messages import RULES, UNKNOWN
from trtforge.errors import BuildError
from trtforge.graph.names import NameMap


def refusal(build, model, profile, **options):
    with pytest.raises(BuildError) as caught:
        build(model, profile, **options)
    return caught.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cause}-{case.op}")
def test_a_refusal_of_the_builder_names_cause_node_and_reason(build, case):
    error = refusal(build, model_from_text(case.text, case.opset, **case.constants), case.profile)
    found = error.diagnosis
    assert (found.cause, found.node, found.op) == (case.cause, case.node, case.op)
    assert error.node == case.node
    place = f"node '{case.node}' ({case.op})" if case.node else "the model"
    assert error.what == f"TensorRT-RTX refuses {place}"
    assert case.why in error.why
    assert (found.reason, found.remedy) == (error.why, error.fix)
    assert found.remedy
    assert found.message
    if case.shapes is not None:
        assert found.shapes == case.shapes


@pytest.mark.parametrize(("cause", "message", "node"), TEXTS)
def test_a_message_that_is_only_known_as_text_is_told_all_the_same(cause, message, node):
    error = error_from_refusal(Refusal([message]), NameMap({"n4": "enc/ffn"}, {}), builder="TensorRT")
    assert error.diagnosis.cause == cause
    assert error.node == ("enc/ffn" if node else None)
    assert error.why
    assert error.fix
    assert "{" not in error.why + error.fix
    assert "n4" not in error.why
    assert "TensorRT-RTX" not in str(error)


@pytest.mark.parametrize("rule", [*RULES, UNKNOWN], ids=lambda rule: rule.cause)
def test_every_text_can_be_filled_in(rule):
    groups = ["G"] * re.compile(rule.pattern).groups
    for text in (rule.why, rule.fix):
        filled = text.format(*groups, op="O", builder="B", message="M")
        assert "{" not in filled
        assert not filled.endswith(".")


def test_every_cause_that_is_known_has_a_case():
    covered = {case.cause for case in CASES} | {cause for cause, _, _ in TEXTS}
    assert {rule.cause for rule in RULES} | {"unknown"} == covered


def test_every_message_that_is_known_has_a_case(build):
    """Rules of one cause are told apart by what the builder says."""
    rules_of = Counter(rule.cause for rule in RULES)
    said = [("", message) for _, message, _ in TEXTS]
    for case in CASES:
        if rules_of[case.cause] > 1:
            found = refusal(build, model_from_text(case.text, case.opset, **case.constants), case.profile).diagnosis
            said.append((found.op, found.message))
    lines = [f"op={op}\n{message}" for op, message in said]
    used = {next((r.pattern for r in RULES if re.search(r.pattern, text, re.MULTILINE)), "") for text in lines}
    assert [rule.pattern for rule in RULES if rules_of[rule.cause] > 1 and rule.pattern not in used] == []


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
        ("Error Code 10: Could not find any implementation for node {ForeignNode[n4]}.", "enc/ffn",
         "TensorRT-RTX has no kernel", "keep the node in a wider type"),
        ("[virtualMemoryBuffer.cpp] Error Code 2: OutOfMemory (Requested size was 9 bytes.)", None, "memory ran out",
         "close other programs"),
        ("Assertion failed: false", None, "Assertion failed: false", "find the smallest"),
        ("false", None, "TensorRT-RTX does not support this use of one of its operators", "replace"),
        ("n4: bad t2, t99 In check at /_src/a/b.cpp:3)", "enc/ffn", "enc/ffn: bad hidden, t99", "find the smallest"),
        ("", None, "it gave no reason", "find the smallest"),
        ("[x] Error Code 1: Cuda Runtime (cudaError 35: CUDA driver)",
         None, "it gave no reason", "find the smallest"),
    ],
)  # fmt: skip
def test_a_message_without_a_node_from_the_parser_is_searched_for_one(message, node, why, fix):
    error = error_from_refusal(Refusal([message]), NAMES)
    assert error.node == node
    assert error.why.startswith(why)
    assert error.fix.startswith(fix)


def test_a_long_message_is_cut():
    assert len(error_from_refusal(Refusal(["x" * 10_000]), NAMES).why) == 600
