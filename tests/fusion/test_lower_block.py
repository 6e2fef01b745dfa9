"""Blocks as the plugin's operator: its body computes what the block computed, and what is refused stays."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from region_models import MASK, POST, PRE, changed, model_of
from region_reference import Prepare, feeds_of, run

from trtforge import stages
from trtforge.fusion.lower_block import BlockReport, brings_blocks, lower_blocks
from trtforge.graph.edit import copy_graph
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import NormaliseReport
from trtforge.graph.save import save_model
from trtforge.lowering import find_candidates
from trtforge.quantization.emulation import as_computed
from trtforge.quantization.formats import FORMATS
from trtforge.quantization.quantizer import Quantizer
from trtforge.quantization.table import CalibrationTable, TensorRange
from trtforge.recipe import QuantRecipe
from trtforge.spec import Precision, precision_from_name

WIDTH, INNER = 64, 128
SIZES = {"batch": 3, "seq": 9}
INPUTS = f"float[batch, seq, {WIDTH}] x, int64[batch, seq] mask"


def weight(name: str, *shape: int) -> np.ndarray:
    """A weight of its own for each name."""
    random = np.random.default_rng([ord(char) for char in name])
    return (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


CONSTANTS = {
    **{f"w{name}": weight(f"w{name}", WIDTH, WIDTH) for name in "qkvo"},
    **{name: weight(name, WIDTH) for name in ("bq", "bk", "bv", "bo", "bd", "e1", "e2")},
    **{name: weight(name, WIDTH) + 1 for name in ("g1", "g2")},
    "wu": weight("wu", WIDTH, INNER),
    "bu": weight("bu", INNER),
    "wd": weight("wd", INNER, WIDTH),
    "heads": np.array([0, 0, 2, 32]),
    "flat": np.array([0, 0, WIDTH]),
    "rows": np.array([-1, WIDTH]),
    "scale": np.array(32**-0.5, np.float32),
    "a0": np.array([0]),
    "a1": np.array([1]),
    "i0": np.array(0),
    "i1": np.array(1),
}
CAUSAL = """size = Shape<start=1, end=2>(mask) count = Squeeze(size, a0) positions = Range(i0, count, i1)
    r1_ = Unsqueeze(positions, a1) k1_ = Unsqueeze(positions, a0) seen = LessOrEqual(k1_, r1_)
    bias = Where(seen, zero, low) """
# Body, its op type in half precision.
BLOCKS = {
    "post-norm with padding": (POST, "AttentionFFN_post_gelu_lengths"),
    "pre-norm with padding": (PRE, "AttentionFFN_pre_gelu_lengths"),
    "causal": (changed(PRE, (MASK, CAUSAL)), "AttentionFFN_pre_gelu_causal"),
    "no mask, relu": (
        changed(POST, (MASK, ""), ("[masked] s2 = Add(s1, bias)", ""), ("Softmax<axis=-1>(s2)", "Softmax<axis=-1>(s1)"),
                ("Gelu(u)", "Relu(u)")),
        "AttentionFFN_post_relu",
    ),
    "without biases and beta": (
        changed(POST, ("[bk_] k1 = Add(k0, bk)", "k1 = Identity(k0)"), ("[bo_] o = Add(o0, bo)", "o = Identity(o0)"),
                ("(r1, g1, e1)", "(r1, g1)")),
        "AttentionFFN_post_gelu_lengths",
    ),
    "a bool mask": (
        changed(POST, (MASK, "m1 = Unsqueeze(mask, axes12) pad = Cast<to=9>(m1) "),
                ("s2 = Add(s1, bias)", "s2 = Where(pad, s1, low)")),
        "AttentionFFN_post_gelu_lengths",
    ),
    "biases behind the residuals": (
        changed(POST, ("[bo_] o = Add(o0, bo)", ""), ("r1 = Add(o, x)", "r0 = Add(o0, x) r1 = Add(r0, bo)"),
                ("[bd_] d = Add(d0, bd)", ""), ("r2 = Add(d, h)", "r9 = Add(d0, h) r2 = Add(r9, bd)")),
        "AttentionFFN_post_gelu_lengths",
    ),
    "an activation that is spelled out": (
        changed(POST, ("[act] a = Gelu(u) ",
                       "t1 = Mul(u, u) t2 = Mul(t1, u) t3 = Mul(t2, cubic) t4 = Add(u, t3) t5 = Mul(t4, sqrt2pi) "
                       "t6 = Tanh(t5) t7 = Add(t6, one) t8 = Mul(u, half) [act] a = Mul(t8, t7) ")),
        "AttentionFFN_post_gelu_tanh_lengths",
    ),
    "a result in rows": (
        POST + "[torows] z = Reshape(y, rows)",
        "AttentionFFN_post_gelu_lengths",
    ),
}  # fmt: skip


def in_precision(graph: gs.Graph, name: str, exclude: tuple[str, ...] = ()) -> gs.Graph:
    """A prepared graph as a build makes it, with ranges of one run."""
    precision = precision_from_name(name)
    quantizer = _quantizer(graph, precision, exclude) if precision.is_calibrated else None
    return stages.lower(graph, precision, quantizer).graph


def _quantizer(graph: gs.Graph, precision: Precision, exclude: tuple[str, ...]) -> Quantizer:
    feeds = feeds_of(graph, **SIZES)
    shapes = {name: value.shape for name, value in feeds.items()}
    report = NormaliseReport(**{field.name: 0 for field in dataclasses.fields(NormaliseReport)})  # type: ignore[arg-type]
    prepared = stages.Prepared(graph, report, stages.PackedQkvReport((), ()), shapes, shapes)
    with OnnxNative() as native:
        placement = stages.plan_quantization(prepared, QuantRecipe(exclude=exclude), native)
    values = run(graph, feeds, placement.tensors)
    ranges = {key: float(np.abs(value).max()) for key, value in values.items()}
    table = CalibrationTable(
        method="minmax",
        samples=1,
        model_sha256="0" * 64,
        data_sha256="0" * 64,
        recipe_sha256="0" * 64,
        tensors={key: TensorRange(amax=amax, min=-amax, max=amax, rms=amax / 3) for key, amax in ranges.items()},
    )
    return Quantizer(placement, table, FORMATS["int8"], np.float16)


def outputs_of(
    graph: gs.Graph, feeds: dict[str, np.ndarray], folder: Path, valid: np.ndarray | None = None
) -> np.ndarray:
    """The output, computed as written; rows of padding are left out."""
    path = folder / "m.onnx"
    save_model(as_computed(graph), path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {port.name: feeds[port.name] for port in session.get_inputs()})
    return np.asarray(result).reshape(-1, WIDTH)[(feeds["mask"] if valid is None else valid).ravel() != 0]


def prepared_block(prepare: Prepare, body: str) -> gs.Graph:
    """The graph of a body, with two heads of 32."""
    output = "z" if "z = Reshape" in body else "y"
    inputs = INPUTS if "mask" in body.replace("masked", "") else f"{INPUTS.partition(', int64')[0]}"
    return prepare(model_of(body, inputs=inputs, outputs=output, **CONSTANTS))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, precision: str, prepare: Prepare, tmp_path: Path) -> None:
    body, op_type = BLOCKS[name]
    graph = prepared_block(prepare, body)
    plain = in_precision(graph, precision)
    plugin = copy_graph(plain)
    report = lower_blocks(plugin)
    start, lengths, _ = op_type.partition("_lengths")
    wanted = f"{start}_int8{lengths}" if precision == "int8" else op_type
    assert [(block.region, block.op_type, block.node) for block in report.lowered] == [("softmax", wanted, "softmax")]
    assert report.unfit == {}
    ops = [node.op for node in plugin.nodes]
    assert not {"MatMul", "Softmax", "LayerNormalization", "QuantizeLinear", "DequantizeLinear"} & set(ops)
    assert [function.name for function in plugin.functions] == [wanted]
    feeds = {"mask": np.ones((SIZES["batch"], SIZES["seq"]), np.int64)} | feeds_of(graph, **SIZES)
    exact, rounded, fused = (outputs_of(g, feeds, tmp_path) for g in (graph, plain, plugin))
    # Both paths round the same tensors, or the body fewer; a code may fall to the other side.
    assert np.abs(fused - exact).max() <= 2 * np.abs(rounded - exact).max()
    assert np.abs(rounded - exact).max() < (0.3 if precision == "int8" else 0.05) * np.abs(exact).max()


def test_padding_in_the_middle_hides_those_keys_too(prepare: Prepare, tmp_path: Path) -> None:
    graph = prepared_block(prepare, POST)
    plain = in_precision(graph, "fp16")
    plugin = copy_graph(plain)
    lower_blocks(plugin)
    feeds = feeds_of(graph, **SIZES)
    feeds["mask"] = np.array([[1, 0, 1, 1, 0, 0, 1, 0, 0], [0] * 8 + [1], [1] * 9], np.int64)
    exact, rounded, fused = (outputs_of(g, feeds, tmp_path) for g in (graph, plain, plugin))
    assert np.abs(fused - exact).max() <= 2 * np.abs(rounded - exact).max()


def test_a_mask_that_flags_padding(prepare: Prepare, tmp_path: Path) -> None:
    mask = "m1 = Unsqueeze(mask, axes12) pad = Cast<to=9>(m1) "
    body = changed(POST, (MASK, mask), ("s2 = Add(s1, bias)", "s2 = Where(pad, low, s1)"))
    graph = prepared_block(prepare, body)
    plain = in_precision(graph, "fp16")
    plugin = copy_graph(plain)
    assert [block.op_type for block in lower_blocks(plugin).lowered] == ["AttentionFFN_post_gelu_lengths"]
    feeds = feeds_of(graph, **SIZES)
    valid = feeds["mask"]
    feeds["mask"] = 1 - valid
    exact, rounded, fused = (outputs_of(g, feeds, tmp_path, valid) for g in (graph, plain, plugin))
    assert np.abs(fused - exact).max() <= 2 * np.abs(rounded - exact).max()


@pytest.mark.parametrize("sizes", ["1, seq", "batch, 1", "1, 1"])
def test_a_mask_that_is_broadcast(sizes: str, prepare: Prepare, tmp_path: Path) -> None:
    inputs = f"float[batch, seq, {WIDTH}] x, int64[{sizes}] mask"
    graph = prepare(model_of(POST, inputs=inputs, **CONSTANTS))
    plain = in_precision(graph, "fp16")
    plugin = copy_graph(plain)
    assert [block.op_type for block in lower_blocks(plugin).lowered] == ["AttentionFFN_post_gelu_lengths"]
    feeds = feeds_of(graph, **SIZES)
    feeds["mask"][:, -1:] = [[1]] if sizes.startswith("1") else [[1], [0], [1]]
    valid = np.broadcast_to(feeds["mask"], (SIZES["batch"], SIZES["seq"]))
    exact, rounded, fused = (outputs_of(g, feeds, tmp_path, valid) for g in (graph, plain, plugin))
    assert np.abs(fused - exact).max() <= 2 * np.abs(rounded - exact).max()
    (block,) = (node for node in plugin.nodes if node.domain == "trtforge")
    lengths = run(plugin, feeds, [block.inputs[-1].name])[block.inputs[-1].name]
    assert lengths.tolist() == [SIZES["seq"] if row.any() else 0 for row in valid]


def test_a_mask_of_unknown_sizes_is_taken_for_one_that_is_broadcast(prepare: Prepare) -> None:
    body = changed(POST, ("Unsqueeze(mask", "Unsqueeze(flags"), ("m1 =", "flags = Cast<to=9>(mask) m1 ="))
    graph = prepare(model_of(body, **CONSTANTS))
    for is_known in (True, False):
        plugin = in_precision(graph, "fp16")
        if not is_known:
            next(tensor for tensor in plugin.inputs if tensor.name == "mask").shape = None
        assert [block.op_type for block in lower_blocks(plugin).lowered] == ["AttentionFFN_post_gelu_lengths"]
        assert ("Expand" in {node.op for node in plugin.nodes}) is not is_known


def test_scores_that_stay_float32(prepare: Prepare, tmp_path: Path) -> None:
    graph = prepared_block(prepare, POST)
    wide = dict.fromkeys(("scale_", "masked", "softmax"), "too large for float16")
    plain = stages.lower(graph, precision_from_name("fp16"), None, wide=wide).graph
    plugin = copy_graph(plain)
    assert len(lower_blocks(plugin).lowered) == 1
    (block,) = (node for node in plugin.nodes if node.domain == "trtforge")
    assert block.inputs[1].dtype == np.float16
    feeds = feeds_of(graph, **SIZES)
    exact, rounded, fused = (outputs_of(g, feeds, tmp_path) for g in (graph, plain, plugin))
    assert np.abs(fused - exact).max() <= 2 * np.abs(rounded - exact).max()


def refusal(graph: gs.Graph) -> str:
    """Why the only block stays, and proof that it does."""
    before = [(node.name, node.op) for node in graph.nodes]
    report = lower_blocks(graph)
    assert report.lowered == ()
    assert [(node.name, node.op) for node in graph.nodes] == before
    (reason,) = report.unfit.values()
    return reason


def test_float32_is_refused(prepare: Prepare) -> None:
    reason = refusal(prepared_block(prepare, POST))
    assert reason == "it computes in float32; the plugin takes float16 and bfloat16"


def test_a_block_of_no_rows_is_refused(prepare: Prepare) -> None:
    inputs = f"float[batch, 0, {WIDTH}] x, int64[batch, 0] mask"
    assert refusal(prepare(model_of(POST, inputs=inputs, **CONSTANTS))) == "what it reads is empty"


def test_a_head_size_without_kernels_is_refused(prepare: Prepare) -> None:
    graph = in_precision(prepare(model_of(POST)), "fp16")
    assert refusal(graph) == "its heads are 8 wide; the plugin takes 32, 64, 80, 96, 128"


def test_a_block_of_which_a_part_is_quantized_is_refused(prepare: Prepare) -> None:
    graph = in_precision(prepared_block(prepare, POST), "int8", ("md",))
    assert refusal(graph) == "some of its products are quantized, but not down"


def test_an_inner_width_that_is_no_multiple_of_8_is_refused(prepare: Prepare) -> None:
    odd = {"wu": weight("wu", WIDTH, 36), "bu": weight("bu", 36), "wd": weight("wd", 36, WIDTH)}
    graph = in_precision(prepare(model_of(POST, inputs=INPUTS, **(CONSTANTS | odd))), "fp16")
    assert refusal(graph) == "its F is 36; the plugin takes multiples of 8"


def test_an_inner_width_that_int8_does_not_take_is_refused(prepare: Prepare) -> None:
    odd = {"wu": weight("wu", WIDTH, 72), "bu": weight("bu", 72), "wd": weight("wd", 72, WIDTH)}
    graph = in_precision(prepare(model_of(POST, inputs=INPUTS, **(CONSTANTS | odd))), "int8")
    assert refusal(graph) == "down has K = 72; int8 takes multiples of 16"


def test_a_block_that_does_not_match_is_a_near_miss(prepare: Prepare) -> None:
    body = changed(POST, ("[act] a = Gelu(u) ", "[act] a = Tanh(u) "))
    report: BlockReport = lower_blocks(in_precision(prepared_block(prepare, body), "fp16"))
    assert report.lowered == ()
    assert [miss.pattern for miss in report.near_misses] == ["attention_ffn_block"]


def test_only_a_library_with_the_operator_brings_blocks(tmp_path: Path) -> None:
    (tmp_path / "own.so").write_bytes(b"\x7fELF\0trtforge\0AttentionFFN\0_int8\0")
    (tmp_path / "other.so").write_bytes(b"\x7fELF\0BertPlugin\0")
    assert brings_blocks([tmp_path / "other.so", tmp_path / "own.so"])
    assert not brings_blocks([tmp_path / "other.so"])
    assert not brings_blocks([])


def test_a_build_without_a_plugin_does_not_wait_for_the_matcher() -> None:
    code = "import sys, trtforge.build_job; print([m for m in sys.modules if m.startswith('trtforge.fusion.')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "trtforge.fusion.lower_block" in result.stdout
    assert "trtforge.fusion.match'" not in result.stdout


def test_attention_in_blocks_is_left_to_the_plugin(prepare: Prepare) -> None:
    graph = prepare(model_of(POST))
    precision = precision_from_name("fp16")
    assert [region.name for region in find_candidates(graph, precision, QuantRecipe()).regions] == ["softmax"]
    left = find_candidates(graph, precision, QuantRecipe(), leaves_blocks=True)
    assert (left.regions, left.unfit) == ((), {})
