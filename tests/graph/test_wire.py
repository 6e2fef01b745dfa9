from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from encoder import WIDTH, save_encoder

from trtforge.graph.wire import WireError, is_cut_off, split_model, write_model

MIN_BYTES = 1024


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return save_encoder(tmp_path / "encoder.onnx").read_bytes()


def test_weights_are_cut_out_and_their_spans_hold_their_bytes(data: bytes) -> None:
    split = split_model(data, MIN_BYTES)
    whole = {tensor.name: tensor.raw_data for tensor in onnx.load_from_string(data).graph.initializer}
    assert set(split.weights) == {"w_qkv", "w_out", "w_up", "w_down"}
    for name, span in split.weights.items():
        assert data[span.offset : span.offset + span.num_bytes] == whole[name]
    skeleton = onnx.load_from_string(split.skeleton)
    kept = {tensor.name: tensor for tensor in skeleton.graph.initializer}
    assert not kept["w_up"].raw_data
    assert list(kept["w_up"].dims) == [WIDTH, 4 * WIDTH]
    assert kept["gamma"].raw_data == whole["gamma"]
    assert len(split.skeleton) < 5000


def test_written_model_equals_the_one_that_was_cut(data: bytes) -> None:
    split = split_model(data, MIN_BYTES)
    weights = {
        name: np.frombuffer(data, np.float32, span.num_bytes // 4, span.offset) for name, span in split.weights.items()
    }
    buffer = io.BytesIO()
    write_model(onnx.load_from_string(split.skeleton), weights, buffer)
    written, original = onnx.load_from_string(buffer.getvalue()), onnx.load_from_string(data)
    assert list(written.graph.node) == list(original.graph.node)
    assert {t.name: t for t in written.graph.initializer} == {t.name: t for t in original.graph.initializer}
    assert written.opset_import == original.opset_import
    onnxruntime.InferenceSession(buffer.getvalue())


def test_every_cut_of_the_file_is_refused_or_parses_like_protobuf(data: bytes) -> None:
    for end in [*range(0, 400), *range(400, len(data), 997)]:
        try:
            split = split_model(data[:end], MIN_BYTES)
        except WireError:
            continue
        assert onnx.load_from_string(split.skeleton) is not None


def test_flipped_bytes_never_give_a_span_outside_the_file(data: bytes) -> None:
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        broken = bytearray(data)
        broken[random.integers(len(data))] ^= 1 << int(random.integers(8))
        try:
            split = split_model(bytes(broken), MIN_BYTES)
        except (WireError, UnicodeDecodeError):
            refused += 1
            continue
        assert all(span.offset > 0 and span.offset + span.num_bytes <= len(data) for span in split.weights.values())
    assert refused < 300


def test_repeated_names_are_refused() -> None:
    tensor = onnx.numpy_helper.from_array(np.zeros(512, np.float32), "w")
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor, tensor]))
    with pytest.raises(WireError, match="two initializers"):
        split_model(model.SerializeToString(), MIN_BYTES)


def test_a_small_tensor_stays_in_the_skeleton() -> None:
    tensor = onnx.numpy_helper.from_array(np.zeros(8, np.float32), "w")
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor]))
    split = split_model(model.SerializeToString(), MIN_BYTES)
    assert split.weights == {}
    assert onnx.load_from_string(split.skeleton) == model


def test_a_cut_inside_a_field_is_told_from_other_content(data: bytes) -> None:
    assert all(is_cut_off(data[:-cut]) for cut in (1, 10, 1000))
    assert not any(map(is_cut_off, (data, b"", b"\x08", b"this is a text file", b"PK\x03\x04\x14\0\0\0", data[7:])))


def test_a_large_tensor_whose_data_is_in_a_typed_field_stays_in_the_skeleton() -> None:
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [512], np.arange(512, dtype=np.float32))
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor]))
    split = split_model(model.SerializeToString(), MIN_BYTES)
    assert split.weights == {}
    assert onnx.load_from_string(split.skeleton) == model


def test_a_number_in_the_place_of_the_name_is_not_taken_for_it() -> None:
    tensor = onnx.numpy_helper.from_array(np.zeros(512, np.float32), "w").SerializeToString() + b"\x40\x41"
    graph = b"\x2a" + bytes([len(tensor) & 0x7F | 0x80, len(tensor) >> 7]) + tensor
    split = split_model(b"\x3a" + bytes([len(graph) & 0x7F | 0x80, len(graph) >> 7]) + graph, MIN_BYTES)
    assert list(split.weights) == ["w"]


def test_a_tensor_that_has_other_data_beside_its_raw_data_stays_in_the_skeleton() -> None:
    tensor = onnx.numpy_helper.from_array(np.zeros(512, np.float32), "w")
    tensor.float_data.append(1.0)
    model = onnx.ModelProto(graph=onnx.GraphProto(initializer=[tensor]))
    assert onnx.load_from_string(split_model(model.SerializeToString(), MIN_BYTES).skeleton) == model
