"""Requests made from a traffic file and a model's signature, and what counts as a right answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtforge.errors import InputError
from trtforge.loadtest import payloads
from trtforge.loadtest.payloads import DraftCell, RequestMaker
from trtforge.loadtest.request import RequestCell, pack_cells, tensor_from_array, unpack_cells
from trtforge.loadtest.senders import Endpoint, HttpSender
from trtforge.loadtest.sequence import Prepared, RequestSequence
from trtforge.loadtest.signature import Signature, signature_from_metadata
from trtforge.loadtest.traffic import Traffic


def signature_of(max_batch: int = 8, **inputs: tuple[str, list[int]]) -> Signature:
    """A model with inputs given as (datatype, dims without the server's batch axis), and outputs y and z."""
    axis = [-1] if max_batch else []
    metadata = {
        "name": "m",
        "platform": "python",
        "inputs": [{"name": name, "datatype": kind, "shape": axis + dims} for name, (kind, dims) in inputs.items()],
        "outputs": [{"name": name, "datatype": "FP32", "shape": [-1]} for name in ("y", "z")],
    }
    return signature_from_metadata(metadata, {"max_batch_size": max_batch})


def cells_of(
    signature: Signature, batch: int | dict[int, float] = 1, folder: Path = Path(), **traffic: Any
) -> list[DraftCell]:
    model = Traffic.model_validate({"model": "m", "batch": batch, **traffic})
    return list(RequestMaker(model, signature, folder).cells(model.batch_steps[0]))


BERT = signature_of(input_ids=("INT64", [-1]), attention_mask=("INT64", [-1]))


def test_all_inputs_of_a_request_share_its_length() -> None:
    inputs = {"input_ids": {"min": 5, "max": 9}, "attention_mask": {"min": 1, "max": 1}}
    (cell,) = cells_of(BERT, 2, inputs=inputs, lengths=[{"min": 3, "max": 6}], distinct=64)
    lengths = {draft.feeds["input_ids"].shape[1] for draft in cell.drafts}
    assert lengths == {3, 4, 5, 6}
    for draft in cell.drafts:
        assert (
            draft.feeds["input_ids"].shape
            == draft.feeds["attention_mask"].shape
            == (2, draft.feeds["input_ids"].shape[1])
        )
        assert draft.feeds["input_ids"].dtype == np.int64
        assert draft.feeds["attention_mask"].min() == 1
    assert {int(value) for draft in cell.drafts for value in draft.feeds["input_ids"].ravel()} == {5, 6, 7, 8, 9}


def test_weights_share_the_distinct_requests_and_no_cell_is_empty() -> None:
    cells = cells_of(
        BERT,
        {1: 3, 4: 1},
        lengths=[{"min": 1, "max": 1, "weight": 98}, {"min": 2, "max": 2, "weight": 2}],
        distinct=40,
    )
    assert [(cell.bucket, cell.batch, len(cell.drafts)) for cell in cells] == [
        ("1", 1, 29),
        ("1", 4, 10),
        ("2", 1, 1),
        ("2", 4, 1),
    ]
    assert sum(cell.weight for cell in cells) == pytest.approx(1)
    assert cells[0].weight == pytest.approx(0.98 * 0.75)


def test_equal_seeds_make_equal_requests() -> None:
    signature = signature_of(x=("FP32", [4]))

    def values(seed: int) -> np.ndarray:
        (cell,) = cells_of(signature, seed=seed, distinct=3)
        return np.concatenate([draft.feeds["x"] for draft in cell.drafts])

    assert np.array_equal(values(1), values(1))
    assert not np.array_equal(values(1), values(2))


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT32", "FP16", "FP64", "BF16"])
def test_values_of_every_kind_stay_in_their_range(datatype: str) -> None:
    ranged = {} if datatype == "BOOL" else {"min": 2, "max": 5}
    (cell,) = cells_of(signature_of(x=(datatype, [64])), inputs={"x": ranged}, distinct=4)
    values = np.concatenate([draft.feeds["x"].astype(np.float64) for draft in cell.drafts])
    low, high = (0, 1) if datatype == "BOOL" else (2, 5)
    assert low <= values.min() <= values.max() <= high
    assert values.min() != values.max()


def test_fixed_sizes_need_no_lengths() -> None:
    (cell,) = cells_of(signature_of(image=("FP32", [3, 8, 8])), 2)
    assert cell.bucket is None
    assert cell.drafts[0].feeds["image"].shape == (2, 3, 8, 8)


def test_shape_names_what_fills_open_dimensions() -> None:
    signature = signature_of(x=("FP32", [-1, 3, -1]))
    (cell,) = cells_of(signature, 2, inputs={"x": {"shape": ["length", 3, 16]}}, lengths=[{"min": 7, "max": 7}])
    assert cell.drafts[0].feeds["x"].shape == (2, 7, 3, 16)


def test_batch_may_be_an_axis_of_the_model() -> None:
    signature = signature_of(0, x=("FP32", [-1, 4]))
    (cell,) = cells_of(signature, 5, inputs={"x": {"shape": ["batch", 4]}})
    assert cell.drafts[0].feeds["x"].shape == (5, 4)


def test_optional_inputs_are_sent_where_the_traffic_names_them() -> None:
    metadata = {
        "name": "m",
        "inputs": [{"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in ("x", "extra")],
        "outputs": [],
    }
    signature = signature_from_metadata(metadata, {"max_batch_size": 1, "input": [{"name": "extra", "optional": True}]})
    assert set(cells_of(signature)[0].drafts[0].feeds) == {"x"}
    assert set(cells_of(signature, inputs={"extra": {}})[0].drafts[0].feeds) == {"x", "extra"}


def test_texts_have_as_many_words_as_their_length() -> None:
    (cell,) = cells_of(signature_of(text=("BYTES", [1])), 3, lengths=[{"min": 2, "max": 4}], distinct=32)
    texts = [text for draft in cell.drafts for text in draft.feeds["text"].ravel()]
    assert cell.drafts[0].feeds["text"].shape == (3, 1)
    assert {len(text.split()) for text in texts} == {2, 3, 4}


def test_texts_of_a_model_without_batches_are_counted_along_its_open_dimension() -> None:
    (cell,) = cells_of(signature_of(0, text=("BYTES", [-1])), 3)
    assert cell.drafts[0].feeds["text"].shape == (3,)


def test_integers_without_a_range_are_named() -> None:
    maker = RequestMaker(
        Traffic.model_validate({"model": "m", "inputs": {"input_ids": {"max": 9}}, "lengths": [{"min": 1, "max": 1}]}),
        BERT,
        Path(),
    )
    assert maker.unranged_inputs() == ["attention_mask"]


@pytest.mark.parametrize(
    ("signature", "traffic", "words"),
    [
        (BERT, {}, "add `lengths` to it"),
        (BERT, {"batch": 9, "lengths": [{"min": 1, "max": 1}]}, "its max_batch_size is 8"),
        (signature_of(0, x=("FP32", [4])), {"batch": 2}, "no axis is known to be the batch"),
        (signature_of(0, x=("FP32", [4])), {"batch": 2, "samples": [{"file": "s.npz"}]}, "a sample is a request"),
        (signature_of(x=("FP32", [-1, -1])), {"lengths": [{"min": 1, "max": 1}]}, "inputs.x.shape: [length, length]"),
        (signature_of(x=("FP32", [4])), {"inputs": {"x": {"shape": [5]}}}, "shape [5] of input 'x' does not fit"),
        (signature_of(x=("FP32", [4])), {"inputs": {"x": {"shape": [4, 1]}}}, "does not fit"),
        (signature_of(x=("UINT8", [4])), {"inputs": {"x": {"max": 300}}}, "UINT8 holds 0 to 255"),
        (signature_of(x=("INT8", [4])), {"inputs": {"x": {"min": 0.2, "max": 0.8}}}, "values from 0.2 to 0.8"),
        (signature_of(x=("FP8", [4])), {}, "has the type FP8"),
    ],
)
def test_traffic_that_does_not_fit_is_refused(signature: Signature, traffic: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        cells_of(signature, **traffic)
    assert words in str(caught.value)


def test_requests_beyond_the_memory_that_they_may_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "_MAX_BYTES", 1000)
    signature = signature_of(x=("FP64", [10]))
    assert len(cells_of(signature, distinct=12)[0].drafts) == 12
    with pytest.raises(InputError, match="lower `distinct`"):
        cells_of(signature, distinct=13)


@pytest.mark.parametrize(
    ("signature", "traffic"),
    [
        (signature_of(x=("FP32", [-1])), {"lengths": [{"min": 10**12, "max": 10**12}]}),
        (signature_of(0, x=("FP32", [-1])), {"inputs": {"x": {"shape": ["batch"]}}, "batch": 10**12}),
        (signature_of(text=("BYTES", [1])), {"lengths": [{"min": 10**12, "max": 10**12}]}),
    ],
)
def test_sizes_are_looked_at_before_anything_is_made(signature: Signature, traffic: dict[str, Any]) -> None:
    batch = traffic.get("batch", 1)
    with pytest.raises(InputError, match="need too much memory"):
        cells_of(signature, **{"batch": batch, **traffic})


def test_samples_are_rows_of_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", x=np.arange(12, dtype=np.float32).reshape(6, 2), labels=np.arange(6))
    (cell,) = cells_of(signature_of(x=("FP32", [2])), 3, tmp_path, samples=[{"file": "s.npz"}], distinct=4)
    assert cell.bucket == "s"
    for draft in cell.drafts:
        assert len(set(draft.rows)) == 3
        assert draft.feeds["x"][:, 0].tolist() == [2 * row for row in draft.rows]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((3, 2))}, "a sample has float64 [2]; the model takes x FP32 [2]"),
        ({"x": np.zeros((3, 4), np.float32)}, "a sample has float32 [4]"),
        ({"y": np.zeros((3, 2), np.float32)}, "it lacks x; the model has no input y"),
        ({"x": np.zeros((3, 2), np.float32), "labels": np.zeros(2)}, "rows: x 3, labels 2"),
    ],
)
def test_samples_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(InputError) as caught:
        cells_of(signature_of(x=("FP32", [2])), 1, tmp_path, samples=[{"file": "s.npz"}])
    assert words in str(caught.value)


def test_lengths_that_no_line_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one two\n\n")
    with pytest.raises(InputError, match=r"no line of .* has 3 to 4 words"):
        cells_of(
            signature_of(text=("BYTES", [1])),
            1,
            tmp_path,
            inputs={"text": {"file": "t.txt"}},
            lengths=[{"min": 3, "max": 4}],
        )


def test_requests_cross_to_the_other_process_unchanged() -> None:
    signature = signature_of(text=("BYTES", [1]), x=("BF16", [3]))
    maker = RequestMaker(Traffic.model_validate({"model": "m", "distinct": 2}), signature, Path())
    (cell,) = maker.cells(2)
    packed = maker.pack(cell, [{"y": np.arange(4.0)}, {}])
    meta, arrays = pack_cells([packed])
    (again,) = unpack_cells(meta, arrays)
    assert again.requests[0].inputs == packed.requests[0].inputs
    assert again.requests[0].expected["y"].tolist() == [0, 1, 2, 3]
    assert again.requests[1].expected == {}


def test_texts_are_sent_with_their_length_before_them() -> None:
    tensor = tensor_from_array("t", "BYTES", np.array([["é"], [b"ab"]], dtype=object))
    assert tensor.data == b"\x02\x00\x00\x00\xc3\xa9\x02\x00\x00\x00ab"
    assert tensor.shape == (2, 1)


def test_without_a_configuration_the_first_open_axis_is_the_batch() -> None:
    def read(*shapes: list[int]) -> Signature:
        inputs = [{"name": f"i{place}", "datatype": "FP32", "shape": shape} for place, shape in enumerate(shapes)]
        return signature_from_metadata({"name": "m", "inputs": inputs}, None)

    batched = read([-1, 4], [-1, 8])
    assert batched.max_batch is None and batched.has_batch_axis
    assert [port.dims for port in batched.inputs] == [(4,), (8,)]
    fixed = read([2, 4], [-1, 8])
    assert fixed.max_batch == 0 and not fixed.has_batch_axis


def packed_cells(weights: list[float]) -> list[RequestCell]:
    signature = signature_of(x=("FP32", [4]))
    maker = RequestMaker(Traffic.model_validate({"model": "m", "distinct": 3}), signature, Path())
    (cell,) = maker.cells(1)
    packed = maker.pack(cell, [{}] * 3)
    return [dataclasses.replace(packed, weight=weight) for weight in weights]


SENDER = HttpSender(Endpoint("127.0.0.1:1", "a/b", "", ("y",), timeout_s=1.0, is_streamed=False))


def test_cells_are_sent_by_weight_and_their_requests_in_turn() -> None:
    def take(seed: int, count: int) -> list[Prepared]:
        return list(itertools.islice(RequestSequence(packed_cells([3, 1]), SENDER, seed), count))

    assert take(1, 50) == take(1, 50) != take(2, 50)
    places = [prepared.cell for prepared in take(1, 8000)]
    # Five standard deviations of a binomial count.
    assert abs(places.count(0) - 6000) < 5 * (8000 * 0.75 * 0.25) ** 0.5
    first = [prepared.wire for prepared in take(1, 50) if prepared.cell == 0]
    assert first[0] != first[1]
    assert first[:3] == first[3:6]


def test_http_message_is_a_head_and_the_data_of_each_input() -> None:
    (cell,) = packed_cells([1])
    body, headers = SENDER.prepare(cell.requests[0])
    length = int(headers["Inference-Header-Content-Length"])
    head = json.loads(body[:length])
    assert head["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    ]
    assert head["outputs"] == [{"name": "y", "parameters": {"binary_data": True}}]
    assert body[length:] == cell.requests[0].inputs[0].data
