from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

onnx_ir = pytest.importorskip("onnx_ir", reason="the export extra is not installed")

from trtforge.export.repair import repair_rotary_embeddings  # noqa: E402

ROTARY = """<ir_version: 10, opset_import: ["" : 23]>
net (float[batch, 2, seq, 16] q, float[batch, 2, seq, 16] k, float[ROWS, seq, 8] angle)
    => (float[batch, 2, seq, 16] q_turned, float[batch, 2, seq, 16] k_turned) {
    cos = Cos(angle)
    sin = Sin(angle)
    q_turned = RotaryEmbedding <num_heads = 2> (q, cos, sin)
    k_turned = RotaryEmbedding <num_heads = 2> (k, cos, sin)
}"""


def repaired(rows: str, shape: list[int | str] | None) -> onnx.ModelProto:
    """The repaired graph, with the caches' shape stated or not."""
    model = onnx_ir.from_proto(onnx.parser.parse_model(ROTARY.replace("ROWS", rows)))
    for node in model.graph:
        if node.op_type in {"Cos", "Sin"} and shape is not None:
            node.outputs[0].shape = onnx_ir.Shape(shape)
    repair_rotary_embeddings(model.graph)
    return onnx_ir.to_proto(model)


@pytest.mark.parametrize("shape", [None, [1, "seq", 8]])
def test_a_cache_of_one_row_serves_every_batch(tmp_path: Path, shape: list[int | str] | None) -> None:
    onnx.save(repaired("1", shape), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    random = np.random.default_rng(3)
    q, k = (random.normal(size=(3, 2, 5, 16)).astype(np.float32) for _ in range(2))
    angle = random.normal(size=(1, 5, 8)).astype(np.float32)
    outputs = session.run(None, {"q": q, "k": k, "angle": angle})
    alone = [session.run(None, {"q": q[i : i + 1], "k": k[i : i + 1], "angle": angle}) for i in range(3)]
    for index, output in enumerate(outputs):
        np.testing.assert_array_equal(output, np.concatenate([row[index] for row in alone]))


def test_what_is_right_stays_as_it_is() -> None:
    assert [node.op_type for node in repaired("batch", ["batch", "seq", 8]).graph.node].count("Expand") == 0
    assert [node.op_type for node in repaired("1", [1, "seq", 8]).graph.node].count("Expand") == 2
