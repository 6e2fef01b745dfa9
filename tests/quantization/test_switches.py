from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from quant_cases import graph_from_text, normal

from trtforge.graph.edit import copy_graph
from trtforge.graph.save import save_model
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.qdq import insert_qdq
from trtforge.quantization.regions import find_regions, find_sites
from trtforge.quantization.switches import MAX_SEGMENTS, plan_segments, switch_graph
from trtforge.recipe import QuantRecipe

WIDTH = 32
FLOPS_OF_LAYER = 1000


def blocks(count, middle="", outputs="", wide="", **more):
    """Residual blocks whose mask, made at the start, and whose first input every block reads."""
    body = []
    tensor = "x"
    for i in range(count):
        body.append(
            f"""[up{i}] u{i} = MatMul({tensor}, w_up{i})
            [gate{i}] g{i} = MatMul({tensor}, w_gate{i})
            [act{i}] a{i} = Sigmoid(g{i})
            [mul{i}] m{i} = Mul(u{i}, a{i})
            [masked{i}] k{i} = Mul(m{i}, mask)
            [down{i}] d{i} = MatMul(k{i}, w_down{i})
            [add{i}] h{i} = Add(d{i}, {tensor})"""
        )
        tensor = f"h{i}"
    weights = dict(more)
    for i in range(count):
        weights |= {f"w_up{i}": normal(32, 32, seed=3 * i, scale=0.2), f"w_gate{i}": normal(32, 32, seed=3 * i + 1)}
        weights[f"w_down{i}"] = normal(32, 32, seed=3 * i + 2, scale=0.2)
    text = f"""g (float[n, 4, 32] x, int64[n, 4, 1] keep) => (float[n, 4, 32] y{outputs}) {{
        [mask] mask = Cast<to = 1>(keep)
        {chr(10).join(body)}
        {middle}
        [last] y = Add({tensor}, {wide or "x"})
    }}"""
    return graph_from_text(text, **weights)


def prepare(graph):
    """The quantized form, sites, regions and segments of a graph."""
    placement = plan_placement(graph, {}, QuantRecipe())
    quantized = copy_graph(graph)
    insert_qdq(quantized, placement, dict.fromkeys(placement.tensors, 3.0))
    sites = find_sites(graph, quantized)
    flops = dict.fromkeys(placement.nodes, FLOPS_OF_LAYER)
    regions = find_regions(graph, sites, flops)
    return placement, quantized, sites, regions, plan_segments(graph, regions, flops)


def run(graph, path, feeds, outputs=None):
    """Outputs by name, as written."""
    save_model(graph, path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = outputs or [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def feeds_of(count=3):
    keep = (np.arange(4) < 3).astype(np.int64).reshape(1, 4, 1).repeat(count, 0)
    return {"x": normal(count, 4, 32, seed=9), "keep": keep}


def only(graph, placement, region):
    """The graph with one region quantized, made from scratch."""
    alone = copy_graph(graph)
    others = placement.without({node: "off" for node in placement.nodes if node not in region.nodes})
    insert_qdq(alone, others, dict.fromkeys(placement.tensors, 3.0))
    return alone


def walk(graph, tmp_path):
    """Every segment's graph with what it is fed, run in order: (segment, switched graph, feeds)."""
    placement, quantized, sites, _, segments = prepare(graph)
    feeds = feeds_of()
    for number, segment in enumerate(segments):
        dtypes = {name: feeds[name].dtype for name in segment.inputs}
        switched = switch_graph(graph, quantized, sites, segments, number, dtypes)
        yield placement, segment, switched, feeds
        off = {name: np.asarray(False) for name in switched.switches.values()}
        found = {**feeds, **run(switched.graph, tmp_path / "off.onnx", {**feeds, **off})}
        feeds = {name: found[name] for name in segments[number + 1].inputs} if number + 1 < len(segments) else {}


def test_segments_are_even_and_hold_every_region_once():
    *_, regions, segments = prepare(blocks(9))
    assert [r for s in segments for r in s.regions] == list(regions) and len(regions) == 18
    assert len(segments) == MAX_SEGMENTS
    assert [s.share for s in segments] == pytest.approx([1 - i / 6 for i in range(6)], abs=0.06)
    assert segments[0].inputs == ("x", "keep")
    # A cut lies between blocks: the mask, the block's input, and x, which the last node reads.
    assert set(segments[1].inputs) == {"x", "mask", "h0"}


def test_a_small_model_is_one_segment():
    *_, regions, segments = prepare(blocks(2))
    assert len(segments) == 1 and segments[0].share == 1.0 and len(regions) == 4


def test_with_every_switch_off_it_is_the_float_graph(tmp_path):
    graph = blocks(6)
    expected = run(graph, tmp_path / "float.onnx", feeds_of())["y"]
    seen = 0
    for _, _, switched, feeds in walk(graph, tmp_path):
        off = {name: np.asarray(False) for name in switched.switches.values()}
        actual = run(switched.graph, tmp_path / "suffix.onnx", {**feeds, **off})["y"]
        assert np.array_equal(actual, expected)
        seen += 1
    assert seen == 4


def test_a_switch_quantizes_its_region_and_nothing_else(tmp_path):
    graph = blocks(6)
    compared = 0
    for placement, segment, switched, feeds in walk(graph, tmp_path):
        for region in segment.regions:
            on = {name: np.asarray(key == region.name) for key, name in switched.switches.items()}
            actual = run(switched.graph, tmp_path / "suffix.onnx", {**feeds, **on})
            alone = only(graph, placement, region)
            alone.outputs.append(alone.tensors()[switched.node_outputs[region.nodes[0]]])
            expected = run(alone, tmp_path / "alone.onnx", feeds_of())
            for name, value in expected.items():
                assert np.array_equal(actual[name], value)
            compared += 1
    assert compared == 12


def test_only_the_weights_from_the_cut_on_are_in_the_graph(tmp_path):
    *_, (_, last, switched, _) = walk(blocks(6), tmp_path)
    names = {name for name in switched.graph.tensors() if name.startswith("w_")}
    assert {name.split("_quantized")[0] for name in names if "_quantized" in name} == {
        f"w_{part}{i}" for region in last.regions for i in region.name[-1] for part in ("up", "gate", "down")
    }
    assert not any("0" in name for name in names)


def test_an_output_made_before_the_cut_is_left_out(tmp_path):
    graph = blocks(6, outputs=", float[n, 4, 32] h0")
    outputs = [switched.outputs for _, _, switched, _ in walk(graph, tmp_path)]
    assert outputs[0] == ("y", "h0") and set(outputs[1:]) == {("y",)}


def test_tensors_that_only_a_body_reads_cross_the_cut(tmp_path):
    middle = """[flag] flag = Constant<value_ints = [1]>()
        [cast] yes = Cast<to = 9>(flag)
        [if] z = If(yes) <
            then_branch = then_graph () => (float[n, 4, 32] t) { [then] t = Mul(u0, mask) },
            else_branch = else_graph () => (float[n, 4, 32] e) { [else] e = Identity(a0) }
        >"""
    graph = blocks(6, middle, wide="z")
    expected = run(graph, tmp_path / "float.onnx", feeds_of())["y"]
    for _, segment, switched, feeds in walk(graph, tmp_path):
        off = {name: np.asarray(False) for name in switched.switches.values()}
        assert np.array_equal(run(switched.graph, tmp_path / "s.onnx", {**feeds, **off})["y"], expected)
        assert segment.share == 1.0 or {"u0", "a0"} <= set(segment.inputs)


def test_no_cut_goes_through_a_sequence():
    graph = blocks(6)
    # Open from the first block to the end.
    text = "[seq] s = SequenceConstruct(u0, a0)"
    plain = graph_from_text(
        "g (float[n, 4, 32] u0, float[n, 4, 32] a0) => (float[n, 4, 64] z) { "
        + text
        + " [join] z = ConcatFromSequence<axis = -1>(s) }"
    )
    opened, joined = plain.nodes
    opened.inputs = [graph.tensors()["u0"], graph.tensors()["a0"]]
    position = next(i for i, node in enumerate(graph.nodes) if node.name == "mul0")
    graph.nodes.insert(position, opened)
    graph.nodes.append(joined)
    graph.outputs.append(joined.outputs[0])
    assert len(prepare(graph)[-1]) == 1


def test_no_cut_splits_a_region():
    # A product of the first block's input at the very end belongs to that block's region.
    graph = blocks(6, "[late] z = MatMul(x, w_late)", wide="z", w_late=normal(32, 32))
    *_, regions, segments = prepare(graph)
    assert regions[0].nodes == ("up0", "gate0", "late") and len(segments) == 1
