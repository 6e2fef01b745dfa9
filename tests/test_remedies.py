"""What is tried when the builder refuses a node; builds are real wherever TensorRT-RTX refuses something."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from support import DILATED_TWICE, save_onnx

import trtforge
from trtforge.errors import BuildError, Diagnosis
from trtforge.graph.load import load_model
from trtforge.graph.normalise import normalise
from trtforge.graph.save import save_model
from trtforge.graph.shapes import infer_shapes_at
from trtforge.manifest import RemedyEntry, load_manifest
from trtforge.quantization.formats import INT8
from trtforge.quantization.placement import plan_placement
from trtforge.quantization.quantizer import Quantizer
from trtforge.quantization.table import CalibrationTable, TensorRange
from trtforge.recipe import QuantRecipe
from trtforge.remedies import MAX_REMEDIES, Remedies
from trtforge.spec import Precision
from trtforge.stages import lower

RNG = np.random.default_rng(11)
FILES = {"model.engine", "model.onnx", "manifest.json", "report.html", "build.log"}
DECODER = """decoder (float[1,4,16,16] x) => (float[1,4,a,b] y) {
    [act] h = Relu(x)
    [up] u = ConvTranspose<dilations = [2,2], strides = [2,2], pads = [1,1,1,1]>(h, w)
    [pool] p = AveragePool<kernel_shape = [3,3], dilations = [2,2], strides = [2,1]>(u)
    [end] y = Mul(p, half)
}"""


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def build(source, **options):
    events = []
    result = trtforge.build(source, gpu="sm_86", report=events.append, **options)
    return result, [event.detail for event in events if event.level == "notice"]


def test_a_refused_attribute_is_spelled_out_and_the_result_is_verified(tmp_path):
    source = save_onnx(tmp_path / "decoder.onnx", DECODER, w=normal(4, 4, 3, 3), half=np.float32(0.5))
    np.savez(tmp_path / "eval.npz", x=normal(8, 4, 16, 16))
    result, told = build(source, precision="fp16", eval=str(tmp_path / "eval.npz"), output=tmp_path / "out")
    assert result.manifest.parity.verified
    assert result.passed
    assert [(entry.node, entry.op, entry.remedy) for entry in result.manifest.remedies] == [
        ("pool", "AveragePool", "it was written out as one Slice per element of its window"),
        ("up", "ConvTranspose", "its dilation was written into its kernel, as zeros"),
    ]
    assert result.manifest.remedies[0].reason == "TensorRT-RTX has no AveragePool with a dilation"
    assert [text.partition(":")[0] for text in told] == ["node 'pool' (AveragePool)", "node 'up' (ConvTranspose)"]
    assert load_manifest(tmp_path / "out").remedies == result.manifest.remedies


def test_a_node_without_a_kernel_in_bf16_stays_fp32(tmp_path):
    source = save_onnx(
        tmp_path / "rnn.onnx",
        "rnn (float[5,2,8] x) => (float[5,1,2,4] y) { [pre] a = Relu(x) [rec] y = GRU<hidden_size = 4>(a,w,r) }",
        w=normal(1, 12, 8),
        r=normal(1, 12, 4),
    )
    result, _ = build(source, precision="bf16", output=tmp_path / "out")
    applied = result.manifest.remedies
    # The GRU is known to need float32; the builder then refuses what feeds it in bf16.
    assert [(entry.node, entry.remedy) for entry in applied] == [("pre", "it stays in fp32")]
    assert applied[0].reason.startswith("TensorRT-RTX fails inside on this combination of nodes")
    kept = {entry.node: entry.reason for entry in result.manifest.precision.kept_float}
    assert kept["pre"].startswith("the builder refused it in bf16: TensorRT-RTX fails inside")
    assert kept["rec"] == "TensorRT-RTX has no bfloat16 GRU"


def test_an_attention_without_a_fused_kernel_is_told(tmp_path):
    text = """attend (float[1,2,16,32] q, float[1,2,16,32] k, float[1,2,16,32] v) => (float[1,2,16,32] y) {
        [attention] a = Attention(q, k, v) [end] y = Relu(a)
    }"""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 23]>\n{text}')
    onnx.save(model, tmp_path / "attend.onnx")
    full, _ = build(tmp_path / "attend.onnx", precision="fp32", output=tmp_path / "fp32")
    half, _ = build(tmp_path / "attend.onnx", precision="fp16", output=tmp_path / "fp16")
    assert [(entry.node, entry.remedy) for entry in full.manifest.remedies] == [
        ("attention", "it was taken apart into products and Softmax")
    ]
    assert full.manifest.plan.fused_attention == 0
    assert half.manifest.remedies == ()
    assert half.manifest.plan.fused_attention == 1


def test_when_no_remedy_is_left_the_error_tells_what_was_tried(tmp_path):
    source = save_onnx(
        tmp_path / "detector.onnx",
        """g (float[1,1,12,6] x, float[1,1,8] scores) => (int64[n,3] y) {
            [pool] p = AveragePool<kernel_shape = [3,2], dilations = [2,2]>(x) b = Squeeze(p, first)
            [nms] y = NonMaxSuppression(b, scores, most, half, half)
        }""",
        first=np.array([0]),
        most=np.array(3),
        half=np.float32(0.5),
    )
    with pytest.raises(BuildError) as caught:
        build(source, precision="fp32", output=tmp_path / "out")
    assert caught.value.node == "nms"
    assert "(tried before: node 'pool': it was written out as one Slice per element of its window)" in caught.value.why
    assert not (tmp_path / "out").exists()


def test_when_no_remedy_fits_the_error_tells_why(tmp_path):
    source = save_onnx(
        tmp_path / "pool.onnx",
        """g (float[1,1,30,30] x) => (float[1,1,a,b] y)
        { [pool] y = AveragePool<kernel_shape = [9,9], dilations = [2,2]>(x) }""",
    )
    with pytest.raises(BuildError) as caught:
        build(source, precision="fp32", output=tmp_path / "out")
    assert caught.value.why == (
        "TensorRT-RTX has no AveragePool with a dilation "
        "(its dilation cannot be written out: its window has 81 taps, and 64 is the most)"
    )


def arrived(tmp_path):
    """A ConvTranspose that came quantized, its weight with one scale per channel."""
    path = save_onnx(
        tmp_path / "q.onnx",
        """g (float[1,4,8,8] x) => (float[1,6,a,b] y) {
            [q] xq = QuantizeLinear(x, s, z) [dq] xd = DequantizeLinear(xq, s, z)
            [wdq] wd = DequantizeLinear<axis = 1>(w, ws, wz)
            [up] y = ConvTranspose(xd, wd)
        }""",
        s=np.float32(0.03),
        z=np.int8(0),
        w=RNG.integers(-127, 128, (4, 6, 3, 3), np.int8),
        ws=RNG.uniform(0.001, 0.01, 6).astype(np.float32),
        wz=np.zeros(6, np.int8),
    )
    return normalise(load_model(path).graph)[0]


def refusal(node, cause="no-kernel"):
    return BuildError("refused", "no kernel", "", node=node, diagnosis=Diagnosis(cause, "no kernel", "", node))


def run(graph, path, x):
    save_model(graph, path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]


def test_a_deconvolution_gets_one_scale_and_then_runs_in_float(tmp_path):
    """TensorRT-RTX takes it as it comes; TensorRT does not always."""
    graph = arrived(tmp_path)
    x = normal(1, 4, 8, 8)
    before = run(graph, tmp_path / "0.onnx", x)
    scale = float(np.abs(np.asarray(graph.nodes[-1].inputs[1].inputs[0].inputs[1].values)).max())
    remedies = Remedies(graph, Precision("int8", "fp32"))
    lowered = lower(graph, Precision(None, "fp32"), None)
    assert (
        remedies.take(refusal("up"), lowered).remedy == "its weight was quantized again with one scale for all channels"
    )
    once = run(graph, tmp_path / "1.onnx", x)
    assert 0 < np.abs(once - before).max() <= np.abs(x).max() * 4 * 9 * scale / 2
    assert {node.op for node in graph.nodes} == {"QuantizeLinear", "DequantizeLinear", "ConvTranspose"}
    assert (
        remedies.take(refusal("up"), lowered).remedy == "the Q/DQ that it came with was taken off, and it runs in fp32"
    )
    assert [node.op for node in graph.nodes] == ["ConvTranspose"]
    assert np.abs(run(graph, tmp_path / "2.onnx", x) - once).max() < 0.1 * np.abs(once).max()
    assert remedies.take(refusal("up"), lowered) is None
    assert [entry.node for entry in remedies.applied] == ["up", "up"]


@pytest.mark.parametrize("weight", [np.zeros((4, 6, 3, 3), np.int8), np.ones((4, 6, 3, 3), np.int8)])
def test_a_weight_of_next_to_nothing_gets_a_scale_that_float16_holds(tmp_path, weight):
    graph = arrived(tmp_path)
    dequantize = graph.nodes[-1].inputs[1].inputs[0]
    dequantize.inputs[0].values = weight
    dequantize.inputs[1].values = np.full(6, 1e-7, np.float16)
    remedies = Remedies(graph, Precision("int8", "fp16"))
    remedies.take(refusal("up"), lower(graph, Precision(None, "fp32"), None))
    codes, scale = (np.asarray(tensor.values) for tensor in graph.nodes[-1].inputs[1].inputs[0].inputs[:2])
    assert scale.dtype == np.float16
    assert scale.size == 1
    assert scale >= 2.0**-14
    assert not codes.any()


def test_a_weight_whose_scales_do_not_fit_it_is_left(tmp_path):
    graph = arrived(tmp_path)
    dequantize = graph.nodes[-1].inputs[1].inputs[0]
    dequantize.attrs["axis"] = 0
    remedies = Remedies(graph, Precision("int8", "fp32"))
    done = remedies.take(refusal("up"), lower(graph, Precision(None, "fp32"), None))
    assert done.remedy == "the Q/DQ that it came with was taken off, and it runs in fp32"
    assert graph.nodes[-1].inputs[1].inputs == [dequantize]


@pytest.mark.parametrize("blamed", ["up", "wdq", "dq", "q"])
def test_the_node_behind_its_qdq_is_found(tmp_path, blamed):
    graph = arrived(tmp_path)
    lowered = lower(graph, Precision(None, "fp32"), None)
    assert Remedies(graph, Precision("int8", "fp32")).take(refusal(blamed), lowered).node == "up"


@pytest.mark.parametrize("cause", ["missing-operator", "profile-shapes", "crash"])
def test_a_failure_that_no_type_can_mend_has_no_remedy(tmp_path, cause):
    graph = arrived(tmp_path)
    lowered = lower(graph, Precision(None, "fp32"), None)
    assert Remedies(graph, Precision("int8", "fp16")).take(refusal("up", cause), lowered) is None


def test_a_quantized_node_falls_to_fp16_and_then_to_fp32(tmp_path):
    source = save_onnx(
        tmp_path / "mlp.onnx",
        "g (float[4,32] x) => (float[4,32] y) { [up] h = MatMul(x, w) [act] a = Relu(h) [down] y = MatMul(a, v) }",
        w=normal(32, 32),
        v=normal(32, 32),
    )
    graph = normalise(load_model(source).graph)[0]
    precision = Precision("int8", "fp16")
    placement = plan_placement(graph, infer_shapes_at(graph, {"x": (4, 32)}), QuantRecipe())
    ranges = {site.tensor: TensorRange(amax=4.0, min=-4.0, max=4.0, rms=1.0) for site in placement.activations}
    sha = dict.fromkeys(("model_sha256", "data_sha256", "recipe_sha256"), "a" * 64)
    table = CalibrationTable(method="minmax", samples=1, tensors=ranges, **sha)
    quantizer = Quantizer(placement, table, INT8, "float16")
    remedies = Remedies(graph, precision)
    lowered = lower(graph, precision, quantizer)
    assert lowered.qdq.nodes == ("up", "down")
    quantize = next(node.name for node in lowered.graph.nodes if node.op == "QuantizeLinear")
    assert remedies.take(refusal(quantize), lowered).remedy == "it stays in fp16"
    lowered = lower(graph, precision, quantizer, kept=remedies.kept)
    assert lowered.qdq.nodes == ("down",)
    assert remedies.take(refusal("up"), lowered).remedy == "it stays in fp32"
    lowered = lower(graph, precision, quantizer, kept=remedies.kept, wide=remedies.wide)
    assert "up" not in lowered.cast.cast_nodes
    assert "down" in lowered.cast.cast_nodes
    reasons = {entry.node: entry.reason for entry in (*lowered.qdq.kept_float, *lowered.cast.kept_float32)}
    assert reasons["up"] == "the builder refused it in fp16: no kernel"
    assert remedies.take(refusal("up"), lowered) is None


def test_a_build_takes_so_many_remedies_and_no_more(tmp_path):
    graph = arrived(tmp_path)
    remedies = Remedies(graph, Precision("int8", "fp16"))
    remedies.applied.extend([RemedyEntry(node="n", op="", reason="", remedy="")] * MAX_REMEDIES)
    assert remedies.take(refusal("up"), lower(graph, Precision(None, "fp32"), None)) is None


def test_the_node_behind_a_failure_that_names_none_is_found_by_trials(tmp_path):
    source = save_onnx(tmp_path / "up.onnx", DILATED_TWICE, w=normal(4, 4, 3, 3))
    np.savez(tmp_path / "eval.npz", x=normal(8, 4, 8, 8))
    result, _ = build(source, precision="fp32", eval=str(tmp_path / "eval.npz"), output=tmp_path / "out")
    assert result.passed
    assert sorted(entry.node for entry in result.manifest.remedies) == ["first", "second"]
    assert "diagnose" in result.manifest.timings_s
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
