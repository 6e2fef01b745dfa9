from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_models import parse, write

from trtforge.errors import InputError
from trtforge.graph.load import load_model
from trtforge.limits import DEFAULT_LIMITS, Limits

WEIGHT = np.arange(4, dtype=np.float32).reshape(2, 2)


def write_external(folder: Path, **entries: str) -> Path:
    """A MatMul whose weight is in `w.bin` at byte 8, unless entries say otherwise; None removes an entry."""
    model = parse("g (float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {0, 0, 0, 0}> { y = MatMul(x, w) }")
    make_external(model.graph.initializer[0], **entries)
    (folder / "w.bin").write_bytes(b"\0" * 8 + WEIGHT.tobytes())
    return write(model, folder)


def make_external(tensor: onnx.TensorProto, **changes: str) -> None:
    tensor.ClearField("float_data")
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entries = {"location": "w.bin", "offset": "8", "length": "16", **changes}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def refusal(path: Path, limits: Limits = DEFAULT_LIMITS) -> str:
    with pytest.raises(InputError) as caught:
        load_model(path, limits)
    assert caught.value.what and caught.value.fix
    return str(caught.value)


def test_external_weight_is_mapped_from_its_range(tmp_path: Path) -> None:
    values = load_model(write_external(tmp_path)).graph.nodes[0].inputs[1].values
    np.testing.assert_array_equal(values, WEIGHT)
    assert isinstance(values.base, np.memmap) and not values.flags.writeable


def test_length_may_be_left_out(tmp_path: Path) -> None:
    values = load_model(write_external(tmp_path, length="")).graph.nodes[0].inputs[1].values
    np.testing.assert_array_equal(values, WEIGHT)


def test_packed_external_weight_is_unpacked(tmp_path: Path) -> None:
    model = parse(
        "g (float[N, 2] x) => (float[N, 2] y) <int4[3] w = {1, 2, 3}> { d = Cast<to = 1>(w) y = Identity(x) }"
    )
    packed = onnx.numpy_helper.from_array(np.array([1, -2, 3]).astype("int4"), "w")
    (tmp_path / "w.bin").write_bytes(packed.raw_data)
    model.graph.initializer[0].CopyFrom(onnx.TensorProto(name="w", data_type=packed.data_type, dims=[3]))
    make_external(model.graph.initializer[0], offset="0", length="2")
    values = load_model(write(model, tmp_path)).graph.nodes[0].inputs[0].values
    assert values.astype(int).tolist() == [1, -2, 3]


def test_digest_covers_the_data(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    before = load_model(path).sha256
    (tmp_path / "w.bin").write_bytes(b"\0" * 8 + (WEIGHT + 1).tobytes())
    assert load_model(path).sha256 != before


def test_missing_data_file_is_named(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    (tmp_path / "w.bin").unlink()
    message = refusal(path)
    assert "'w.bin'" in message and "is missing" in message and "'w'" in message


def test_data_file_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    (tmp_path / "w.bin").unlink()
    (tmp_path / "w.bin").mkdir()
    assert "not a regular file" in refusal(path)


@pytest.mark.parametrize("location", ["../secret", "sub/../../secret", "/etc/passwd"])
def test_path_that_leads_out_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    message = refusal(write_external(folder, location=location))
    assert "outside the model's folder" in message and location in message


def test_symlink_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    path = write_external(folder)
    (folder / "w.bin").unlink()
    (folder / "w.bin").symlink_to(tmp_path / "secret")
    message = refusal(path)
    assert "outside the model's folder" in message and "--dereference" in message


def test_symlink_inside_the_folder_is_followed(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    (tmp_path / "w.bin").rename(tmp_path / "real.bin")
    (tmp_path / "w.bin").symlink_to("real.bin")
    np.testing.assert_array_equal(load_model(path).graph.nodes[0].inputs[1].values, WEIGHT)


@pytest.mark.parametrize("location", ["", "a\0b"])
def test_empty_location_is_refused(tmp_path: Path, location: str) -> None:
    assert "names no file" in refusal(write_external(tmp_path, location=location))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"offset": "16"}, "ends at byte 32"),
        ({"offset": "99999999999999999999"}, "shorter than"),
        ({"offset": "-8"}, "offset -8"),
        ({"length": "12"}, "length 12"),
        ({"length": "-16"}, "length -16"),
        ({"offset": "eight"}, "'eight'"),
    ],
)
def test_impossible_range_is_refused(tmp_path: Path, entries: dict[str, str], named: str) -> None:
    message = refusal(write_external(tmp_path, **entries))
    assert named in message and "'w'" in message


def test_every_entry_is_checked_before_any_is_read(tmp_path: Path) -> None:
    """Attributes, subgraphs and function bodies hold tensors too."""
    model = parse(
        """g (float[2] x, bool c) => (float[2] y) {
            z = If (c) <then_branch = a () => (float[2] t) <float[2] k = {1, 2}> { t = Add(x, k) },
                        else_branch = b () => (float[2] e) { e = f.add(x) }>
            y = Relu(z) }
        <domain: "f", opset_import: ["": 23]> add (p) => (q) {
            c = Constant<value = float[2] {1, 2}>() q = Add(p, c) }""",
        domains=', "f": 1',
    )
    inner = onnx.ModelProto.FromString(model.SerializeToString())
    branch = next(a.g for a in inner.graph.node[0].attribute if a.name == "then_branch")
    make_external(branch.initializer[0], location="../k.bin", length="8")
    assert "'../k.bin'" in refusal(write(inner, tmp_path))
    make_external(model.functions[0].node[0].attribute[0].t, location="../c.bin", length="8")
    assert "'../c.bin'" in refusal(write(model, tmp_path))


def test_external_data_counts_against_the_size_limit(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    total = path.stat().st_size + (tmp_path / "w.bin").stat().st_size
    assert f"--limit model_bytes={total}" in refusal(path, Limits(model_bytes=total - 1))
    assert load_model(path, Limits(model_bytes=total)).opset == 23


def test_absolute_path_is_refused_even_into_the_folder(tmp_path: Path) -> None:
    message = refusal(write_external(tmp_path, location=str(tmp_path / "w.bin")))
    assert "outside the model's folder" in message


def test_symlink_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    path = write_external(tmp_path)
    (tmp_path / "w.bin").unlink()
    (tmp_path / "w.bin").symlink_to("w.bin")
    assert "'w.bin'" in refusal(path)


def test_digest_covers_every_data_file(tmp_path: Path) -> None:
    model = parse("""g (float[2] x) => (float[2] y) <float[2] a = {0, 0}, float[2] b = {0, 0}> {
        s = Add(x, a) y = Add(s, b) }""")
    digests = set()
    for tensor, name in zip(model.graph.initializer, ("a.bin", "b.bin"), strict=True):
        make_external(tensor, location=name, offset="0", length="8")
    path = write(model, tmp_path)
    for first, second in (b"12345678", b"12345678"), (b"12345678", b"87654321"), (b"87654321", b"12345678"):
        (tmp_path / "a.bin").write_bytes(first)
        (tmp_path / "b.bin").write_bytes(second)
        digests.add(load_model(path).sha256)
    assert len(digests) == 3
