from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from shape_models import save_decoder, save_feeds, save_fixed, save_recurrent, save_u_net
from support import save_onnx

from trtforge.errors import InputError
from trtforge.graph.native import OnnxNative
from trtforge.profile import DimReport
from trtforge.profiling import describe_profile


def test_what_is_free_is_asked_for_and_the_rest_has_its_reason(tmp_path: Path) -> None:
    found = describe_profile(save_u_net(tmp_path / "m.onnx"))
    assert found.source == "open"
    assert found.open_dims == ("batch", "h", "w")
    lines = found.yaml.splitlines()
    assert lines[1] == "  batch: {min: 1, opt: ?, max: ?}"
    assert lines[2].startswith("  h: {min: 4, opt: ?, max: ?}  # a multiple of 4 from 4 on: node 'skip' (Concat): ")
    assert lines[-1] == "  x: [batch, 3, h, w]"


def test_values_that_decide_a_branch_are_asked_for(tmp_path: Path) -> None:
    found = describe_profile(save_recurrent(tmp_path / "m.onnx"))
    assert "values:\n  rate: {min: [?], opt: [?], max: [?]}  # read by node" in found.yaml
    assert found.open_dims[-1] == "rate"
    assert "state: [2, batch, 32]" in found.yaml


def test_a_file_without_the_values_that_decide_a_branch_is_noted(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(
        "dims: {batch: {min: 1, opt: 2, max: 4}}\ninputs: {x: [batch, 32], state: [2, batch, 32]}"
    )
    found = describe_profile(save_recurrent(tmp_path / "m.onnx"), profile=str(tmp_path / "p.yaml"))
    assert found.notes[0].startswith("profile 'default' gives no values for input 'rate', which decides shapes or")


def test_a_file_that_does_not_fit_is_told_from_one_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.yaml").write_text("dims: {batch: 1, h: 30, w: 32}")
    examined: list[bool] = []
    analyse = OnnxNative.analyse_dims

    def count(native: OnnxNative, model: onnx.ModelProto, find_limits: bool) -> DimReport:
        examined.append(find_limits)
        return analyse(native, model, find_limits)

    monkeypatch.setattr(OnnxNative, "analyse_dims", count)
    with pytest.raises(InputError, match="does not fit the model") as caught:
        describe_profile(save_u_net(tmp_path / "m.onnx"), profile=str(tmp_path / "p.yaml"))
    assert caught.value.fix.startswith("give h a multiple of 4 from 4 on")
    assert examined == [True]


def test_a_graph_that_leaves_no_choice_needs_no_profile(tmp_path: Path) -> None:
    found = describe_profile(save_fixed(tmp_path / "m.onnx"))
    assert (found.source, found.open_dims) == ("graph", ())
    assert found.yaml == "inputs:\n  x: [1, 40]\n"


def test_data_gives_shapes_and_values_of_feeds_without_a_sample_axis(tmp_path: Path) -> None:
    found = describe_profile(save_recurrent(tmp_path / "m.onnx"), str(save_feeds(tmp_path / "data", 3)))
    assert found.source == "data"
    assert found.yaml == (
        "inputs:\n  x: [3, 32]\n  state: [2, 3, 32]\n  rate: []\n"
        "values:\n  rate: {min: [16000], opt: [16000], max: [16000]}\n"
    )
    assert found.notes == ()


def test_data_that_is_given_wins_over_a_file_that_is_found(tmp_path: Path) -> None:
    model = save_u_net(tmp_path / "m.onnx")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "m.yaml").write_text("dims: {batch: 1, h: 8, w: 8}")
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 3, 16, 16), np.float32))
    assert "x: [1, 3, 8, 8]" in describe_profile(model).yaml
    assert "x: [batch, 3, 16, 16]" in describe_profile(model, str(tmp_path / "d.npz")).yaml


def save_lengths(folder: Path, lengths: list[int]) -> Path:
    folder.mkdir()
    for index, length in enumerate(lengths):
        x = np.ones((1, length, 32), np.float32)
        np.savez(folder / f"{index:03d}.npz", x=x, attention_mask=np.ones((1, length), np.int64))
    return folder


def encoder(path: Path) -> Path:
    """x [batch, seq, 32] -> y of the same shape, with work that grows with the square of seq."""
    return save_onnx(
        path,
        "g (float[batch, seq, 32] x, int64[batch, seq] attention_mask) => (float[batch, seq, 32] y) "
        "<int64[1] a = {1}> {"
        " t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) f = Cast<to = 1>(attention_mask) m = Unsqueeze(f, a)"
        " b = Add(s, m) p = Softmax(b) v = MatMul(p, x) y = MatMul(v, w) }",
        w=np.ones((32, 32), np.float32),
    )


def test_buckets_come_from_the_lengths_of_the_files(tmp_path: Path) -> None:
    data = save_lengths(tmp_path / "data", [4, 4, 4, 5, 30, 31, 32])
    found = describe_profile(encoder(tmp_path / "m.onnx"), str(data), buckets=2)
    assert found.buckets is not None
    assert found.buckets.caps == (5, 32)
    assert found.buckets.samples == (4, 3)
    assert 0 < found.buckets.padding < found.buckets.padding_of_one
    assert "- {name: up_to_5}" in found.yaml
    assert "- {name: up_to_32, dims: {seq: {min: 6, opt: 32, max: 32}}}" in found.yaml


def test_buckets_of_padded_samples_come_from_the_mask(tmp_path: Path) -> None:
    lengths = np.array([4, 4, 5, 5, 20, 20])[:, None]
    np.savez(
        tmp_path / "d.npz",
        x=np.ones((6, 24, 32), np.float32),
        attention_mask=(np.arange(24)[None] < lengths).astype(np.int64),
    )
    found = describe_profile(encoder(tmp_path / "m.onnx"), str(tmp_path / "d.npz"), buckets=3)
    assert found.buckets is not None
    assert (found.buckets.caps, found.buckets.samples) == ((5, 20, 24), (4, 2, 0))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"buckets": 2}, "--buckets needs data"),
        ({"buckets": 2, "prefill_decode": True}, "--buckets and --prefill-decode exclude each other"),
        ({"prefill_decode": True}, "--prefill-decode is for decoders with a cache"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, int], what: str) -> None:
    with pytest.raises(InputError, match=what):
        describe_profile(save_u_net(tmp_path / "m.onnx"), **options)


def test_a_decoder_gets_its_two_phases(tmp_path: Path) -> None:
    model = save_decoder(tmp_path / "m.onnx")
    template = describe_profile(model, prefill_decode=True).yaml
    assert "  total: {min: ?, opt: ?, max: ?}  # = seq + past: node" in template
    assert "- {name: prefill, dims: {past: 0, total: {min: ?, opt: ?, max: ?}}}" in template
    text = "dims: {batch: 1, seq: {min: 1, opt: 8, max: 16}, past: {min: 1, opt: 24, max: 32},"
    (tmp_path / "p.yaml").write_text(text + " total: {min: 2, opt: 32, max: 48}}")
    found = describe_profile(model, profile=str(tmp_path / "p.yaml"), prefill_decode=True)
    (tmp_path / "q.yaml").write_text(found.yaml)
    again = describe_profile(model, profile=str(tmp_path / "q.yaml"))
    assert again.yaml == found.yaml
    assert "past_key: [1, 2, past, 16]" in found.yaml
    assert "name: decode, dims: {seq: {min: 1, opt: 1, max: 1}, past: {min: 1, opt: 24, max: 32}" in found.yaml
