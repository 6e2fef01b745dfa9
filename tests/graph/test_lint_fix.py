"""Every form that breaks a rule: found, mended, equal within its step, clean afterwards, built by TensorRT-RTX."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graph_models import graph_of, model_of, ops, parse, run
from lint_build import RtxBuild
from lint_cases import CASES, STEP, Case, pair

from trtforge.errors import TrtForgeError
from trtforge.graph.lint import RULES, fix, lint
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.signature import input_specs

Normalise = Callable[..., gs.Graph]


@pytest.fixture(scope="module")
def normal() -> Iterator[Normalise]:
    """Text -> normalised graph, in one child process for all."""
    with OnnxNative() as native:
        yield lambda body, opset=23: normalise(graph_of(body, opset=opset, domains=', "com.microsoft": 1'), 13, native)[
            0
        ]


def feeds_of(graph: gs.Graph) -> dict[str, np.ndarray]:
    """Inputs of a batch of 8; floats reach beyond the range of every activation's scale."""
    random = np.random.default_rng(0)
    feeds = {}
    for spec in input_specs(graph):
        shape = tuple(dim if isinstance(dim, int) else 8 for dim in spec.shape or ())
        if spec.dtype.startswith("float"):
            values = random.uniform(-20, 20, shape)
            values.ravel()[:4] = [0, 0.5, 1000, -1000]
        else:
            values = random.integers(0, {"int64": 4, "uint8": 256}.get(spec.dtype, 1000), shape)
        feeds[spec.name] = values.astype(spec.dtype)
    return feeds


def broken(graph: gs.Graph) -> set[str]:
    return {finding.rule for finding in lint(graph)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_form_is_found_mended_equal_clean_and_built(case: Case, normal: Normalise, rtx_build: RtxBuild) -> None:
    graph = normal(case.body)
    feeds = feeds_of(graph)
    before = run(graph, feeds)
    ports = [(tensor.name, tensor.dtype) for tensor in [*graph.inputs, *graph.outputs]]
    assert broken(graph) == case.found

    fixed = fix(graph)
    assert {entry.rule for entry in fixed} == (case.found if case.fixes is None else case.fixes)
    assert all(entry.nodes and entry.what for entry in fixed)
    assert broken(graph) == case.left
    assert not any(finding.severity == "error" for finding in lint(graph))
    assert [(tensor.name, tensor.dtype) for tensor in [*graph.inputs, *graph.outputs]] == ports
    for tensor, old, new in zip(graph.outputs, before, run(graph, feeds), strict=True):
        assert new.dtype == old.dtype
        difference = np.abs(new.astype(np.float64) - old.astype(np.float64)).max()
        assert difference <= case.tolerance.get(tensor.name, 0.0), tensor.name
    assert fix(graph) == []
    rtx_build(graph)


def test_a_clean_graph_is_left_alone(normal: Normalise) -> None:
    graph = normal(pair("float unused = {0}", "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"))
    before = run(graph, feeds_of(graph))
    nodes = ops(graph)
    assert lint(graph) == []
    assert fix(graph) == []
    assert ops(graph) == nodes
    assert all(map(np.array_equal, run(graph, feeds_of(graph)), before))


def test_every_rule_but_those_on_operators_has_a_case() -> None:
    on_operators = {"missing-op", "dynamic-quantization", "qlinear-op", "unsupported-port"}
    on_operators |= {"branch-ranks", "sequences", "loop-values", "loop-limit"}
    assert {rule for case in CASES.values() for rule in case.found} | on_operators == set(RULES)


def test_quantized_int32_tensor_is_cast_first(normal: Normalise, rtx_build: RtxBuild) -> None:
    """ONNX allows it, ONNX Runtime has no kernel for it: the reference has the Cast that ONNX means."""
    body = """g (int32[N, 4] a) => (uint8[N, 4] q, float[N, 4] d) <float s = {0.5}, uint8 m = {100}> {
        CAST q = QuantizeLinear(a, s, m) d = DequantizeLinear(q, s, m) }"""
    graph = normal(body.replace("CAST", ""))
    assert "scale-type" in broken(graph)
    fix(graph)
    assert broken(graph) == set()
    meant = normal(body.replace("CAST", "f = Cast<to = 1>(a)").replace("QuantizeLinear(a", "QuantizeLinear(f", 1))
    feeds = feeds_of(graph)
    codes, values = run(graph, feeds)
    wanted_codes, wanted_values = run(meant, feeds)
    assert np.array_equal(codes, wanted_codes)
    assert np.abs(values - wanted_values).max() <= 155 * 0.5 / 127
    rtx_build(graph)


def test_what_needs_data_is_left_and_explained(normal: Normalise) -> None:
    body = pair("float o = {0}", "q = QuantizeLinear(x, o, z) d = DequantizeLinear(q, o, z)")
    graph = normal(body)
    assert fix(graph) == []
    assert [finding.fix for finding in lint(graph)] == [
        "calibrate again with data that reaches this tensor, or leave it float"
    ] * 2


@pytest.mark.parametrize(
    ("front", "num_clamps"),
    [
        ("r = Relu(x)", 1),
        ("e = Exp(x) r = Transpose(e)", 0),
        ("k = Softmax(x) r = MaxPool<kernel_shape = [1]>(k)", 0),
        ("r = Clip(x, s)", 0),
        ("k = Clip(x, z) r = Neg(k)", 1),
        ("r = Neg(x)", 1),
    ],
)
def test_relu_is_written_only_where_the_range_needs_it(front: str, num_clamps: int) -> None:
    graph = graph_of(f"""g (float[4, 4, 4] x) => (float[4, 4, 4] y)
        <float s = {{0.5}}, float z = {{0}}, uint8 m = {{0}}> {{
        {front} q = QuantizeLinear(r, s, m) y = DequantizeLinear(q, s, m) }}""")
    fix(graph)
    assert ops(graph).count("Relu") == num_clamps


def test_two_fixes_of_one_graph_give_equal_bytes(normal: Normalise) -> None:
    for name in ("uint8 scales per channel of an activation", "Split and Concat between Q and DQ"):
        first, second = normal(CASES[name].body), normal(CASES[name].body)
        assert fix(first) == fix(second)
        assert model_of(first).SerializeToString() == model_of(second).SerializeToString()


def test_damaged_models_are_fixed_left_or_refused(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    calls = ("com.microsoft.QLinearConv(q, s, z, w, ws, wz, s, z)", "com.microsoft.QLinearConcat(s, z, q, s, z)")
    chain = "q = QuantizeLinear(x, s, z) r = {} d = DequantizeLinear(r, s, z)"
    bodies = [case.body for case in CASES.values()]
    bodies += [pair("float o = {0}", chain.format(call)) for call in calls]
    num_fixed = 0
    with OnnxNative() as native:
        for body in bodies:
            for _ in range(8):
                model = parse(body, domains=', "com.microsoft": 1')
                damage(model.graph, random)
                path = tmp_path / "model.onnx"
                path.write_bytes(model.SerializeToString())
                try:
                    graph, _ = normalise(load_model(path).graph, 13, native)
                except TrtForgeError:
                    continue
                lint(graph)
                num_fixed += bool(fix(graph))
                lint(graph)
                model_of(graph)
    assert num_fixed > 100


def damage(graph: onnx.GraphProto, random: np.random.Generator) -> None:
    """Change one thing: an input, an operator, an attribute, or a stored tensor's shape or type."""
    node = graph.node[random.integers(len(graph.node))]
    stored = graph.initializer[random.integers(len(graph.initializer))]
    kind = random.integers(5)
    if kind == 0:
        names = [*(port.name for port in graph.input), *(tensor.name for tensor in graph.initializer)]
        node.input[random.integers(len(node.input))] = names[random.integers(len(names))]
    elif kind == 1:
        node.op_type = str(
            random.choice(["QuantizeLinear", "DequantizeLinear", "Gather", "Transpose", "Gemm", "Concat"])
        )
    elif kind == 2:
        del node.attribute[:]
        value = [7, -7, 0.5, "text", [1, 0], [9, 9]][random.integers(6)]
        node.attribute.append(onnx.helper.make_attribute(str(random.choice(["axis", "perm", "transB"])), value))
    elif kind == 3:
        values = onnx.numpy_helper.to_array(stored).reshape(-1)
        shape = [(-1,), (1, -1), (-1, 1), (1, 1, -1)][random.integers(4)]
        stored.CopyFrom(onnx.numpy_helper.from_array(values.reshape(shape), stored.name))
    else:
        values = onnx.numpy_helper.to_array(stored)
        dtype = random.choice(["int8", "uint8", "int32", "float32", "float16", "int16", "bool"])
        with np.errstate(all="ignore"):
            stored.CopyFrom(onnx.numpy_helper.from_array(values.astype(dtype), stored.name))


def test_time_is_linear_in_nodes() -> None:
    """Counted, not timed: what one node costs does not depend on how many there are."""
    counts = []
    for size in (40, 80):
        graph = chain_of_pairs(size)
        counts.append(count_calls(lambda graph=graph: (lint(graph), fix(graph), lint(graph))))
    assert counts[1] < 2.1 * counts[0]


def chain_of_pairs(size: int) -> gs.Graph:
    """x, then Relu, Q, Reshape, DQ again and again; every pair is read twice, and one scale is shared by all."""
    steps, last = [], "x"
    for index in range(size):
        steps.append(
            f"""r{index} = Relu({last}) q{index} = QuantizeLinear(r{index}, s, z) m{index} = Reshape(q{index}, to)
            d{index} = DequantizeLinear(m{index}, s, z) e{index} = DequantizeLinear(m{index}, s, z)
            a{index} = Add(d{index}, e{index})"""
        )
        last = f"a{index}"
    inits = f"float s = {{{STEP}}}, uint8 z = {{0}}, int64[2] to = {{0, 4}}"
    return graph_of(f"g (float[N, 4] x) => (float[N, 4] y) <{inits}> {{ {' '.join(steps)} y = Neg({last}) }}")


def count_calls(function: Callable[[], object]) -> int:
    """Python calls that a function makes."""
    count = 0

    def tally(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tally)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
