"""Whole graphs: many blocks in linear time, depth without recursion, damaged nodes without a crash, names that stay."""

from __future__ import annotations

import cProfile
import dataclasses
import json
import pstats
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from region_models import CONSTANTS, POST, PRE, changed, model_of
from region_reference import Prepare

from trtforge.fusion.match import match_regions
from trtforge.fusion.regions import region_to_dict


def stacked(num_blocks: int) -> onnx.ModelProto:
    """Post-norm blocks one after another."""
    one = model_of(POST)
    model = onnx.ModelProto.FromString(one.SerializeToString())
    del model.graph.node[:]
    for index in range(num_blocks):
        for node in one.graph.node:
            copy = model.graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{node.name}_{index}"
            kept = {*CONSTANTS, "mask"} | ({"x"} if index == 0 else set())
            renamed = [f"y_{index - 1}" if name == "x" and index else name for name in node.input]
            copy.input[:] = [name if name in kept or name.startswith("y_") else f"{name}_{index}" for name in renamed]
            copy.output[:] = [f"{name}_{index}" for name in node.output]
    model.graph.output[0].name = f"y_{num_blocks - 1}"
    return model


def count_calls(graph: gs.Graph) -> int:
    """Python and C functions called while matching; no other load changes that."""
    profile = cProfile.Profile()
    profile.runcall(match_regions, graph)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_work_grows_with_the_number_of_nodes(prepare: Prepare) -> None:
    graphs = [prepare(stacked(num_blocks)) for num_blocks in (10, 40)]
    assert [len(match_regions(graph).blocks()) for graph in graphs] == [10, 40]
    few, many = (count_calls(graph) for graph in graphs)
    assert many < 4.4 * few


def test_a_long_chain_ends_the_search_and_not_the_stack(prepare: Prepare) -> None:
    chain = " ".join(f"ch{i + 1} = Add(ch{i}, ch{i})" for i in range(3000))
    body = changed(POST, ("[res1] r1 = Add(o, x)", f"ch0 = Tanh(o) {chain} [res1] r1 = Add(ch3000, x)"))
    matches = match_regions(prepare(model_of(body)))
    assert matches.blocks() == ()
    assert [miss.pattern for miss in matches.near_misses] == ["attention_ffn_block"]


def test_a_diamond_of_masks_is_not_followed_without_end(prepare: Prepare) -> None:
    diamond = "z0 = Mul(s1, half) " + " ".join(f"z{i + 1} = Add(z{i}, z{i})" for i in range(60))
    body = changed(POST, ("Add(s1, bias)", "Add(z60, bias)"), ("[masked]", diamond + " [masked]"))
    graph = prepare(model_of(body))
    assert count_calls(graph) < 100_000
    (miss,) = match_regions(graph).near_misses
    assert miss.pattern == "attention"


DAMAGE: list[tuple[str, dict[str, Any]]] = [
    ("softmax", {"axis": "last"}),
    ("qt", {"perm": [0, 0, 1, 1]}),
    ("qt", {"perm": [3, 2]}),
    ("kt", {"perm": "0231"}),
    ("ct", {"perm": [9, 1, 2, 3]}),
    ("norm1", {"epsilon": "small"}),
    ("norm2", {"axis": [-1]}),
    ("act", {"approximate": 3}),
]


@pytest.mark.parametrize(("node", "attributes"), DAMAGE)
def test_odd_attributes_are_no_match_and_no_crash(node: str, attributes: dict[str, Any], prepare: Prepare) -> None:
    graph = prepare(model_of(POST))
    damaged = next(found for found in graph.nodes if found.name == node)
    damaged.attrs = {**damaged.attrs, **attributes}
    matches = match_regions(graph)
    assert (len(matches.blocks()) == 1) == (node == "act")


def test_missing_inputs_are_no_match_and_no_crash(prepare: Prepare) -> None:
    whole = prepare(model_of(POST))
    (block,) = match_regions(whole).blocks()
    for name in [node.name for node in whole.nodes]:
        graph = prepare(model_of(POST))
        node = next(found for found in graph.nodes if found.name == name)
        node.inputs = node.inputs[:-1]
        matches = match_regions(graph)
        # Inference had told what a Reshape gives, and a LayerNormalization may have no beta.
        if node.op in ("Reshape", "LayerNormalization"):
            assert [found.nodes for found in matches.blocks()] == [block.nodes]
            continue
        assert all(name not in region.all_nodes() for region in matches.regions), name
        assert matches.near_misses or name not in block.nodes, name
        # A mask of which a part is damaged is one that says nothing.
        assert all(found.nodes == block.nodes and not found.attention.mask.is_explained for found in matches.blocks())


def test_a_graph_without_nodes_has_no_regions() -> None:
    assert match_regions(gs.Graph()).regions == ()


def test_operators_of_other_domains_are_not_taken_for_onnx(prepare: Prepare) -> None:
    graph = prepare(model_of(POST))
    next(node for node in graph.nodes if node.op == "Softmax").domain = "other"
    matches = match_regions(graph)
    assert [region.pattern for region in matches.regions] == ["ffn"]


def test_matching_changes_nothing_and_gives_the_same_again(prepare: Prepare) -> None:
    graph = prepare(model_of(PRE))
    before = gs.export_onnx(graph).SerializeToString()
    assert match_regions(graph) == match_regions(graph)
    assert gs.export_onnx(graph).SerializeToString() == before


def test_regions_are_frozen_and_json(prepare: Prepare) -> None:
    (block,) = match_regions(prepare(model_of(PRE))).blocks()
    with pytest.raises(dataclasses.FrozenInstanceError):
        block.name = "other"  # type: ignore[misc]
    value = json.loads(json.dumps(region_to_dict(block)))
    assert (value["pattern"], value["order"], value["roles"]["down"]) == ("attention_ffn_block", "pre", "md")
    assert value["attention"]["query"]["projection"]["linear"]["weight"] == "wq"


def test_every_named_node_and_tensor_is_in_the_graph(prepare: Prepare) -> None:
    graph = prepare(model_of(PRE))
    (block,) = match_regions(graph).blocks()
    nodes, tensors = {node.name for node in graph.nodes}, graph.tensors()
    assert set(block.nodes) <= nodes
    assert {node for node in block.roles().values() if node is not None} <= nodes
    named = [block.x, block.output, block.norm1.gamma, block.norm2.beta, block.ffn.up.weight, block.ffn.down.bias]
    assert all(name in tensors for name in named)
    assert isinstance(tensors[block.ffn.up.weight], gs.Constant)
    assert np.array_equal(tensors[block.ffn.up.weight].values, CONSTANTS["wu"])
