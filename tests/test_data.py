from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from data_cases import TOKENS, Specs, refusal, samples, save
from support import dataset_of, npy_bytes, zip_of

from trtforge.batch import Batch, check_batch
from trtforge.data import Dataset, open_dataset
from trtforge.errors import InputError
from trtforge.tensor import TensorSpec


def rows_of(dataset: Dataset, batch_size: int) -> list[list[int]]:
    """For every batch, the index of each of its samples (of `samples`)."""
    return [[int(row[0]) // 4 for row in batch.feeds["x"]] for batch in dataset.batches(batch_size)]


# Reading


@pytest.mark.parametrize("writer", [np.savez, np.savez_compressed])
def test_npz_is_read_in_batches_with_a_smaller_last_one(tmp_path: Path, x_spec: Specs, writer: object) -> None:
    writer(tmp_path / "d.npz", x=samples(10))  # type: ignore[operator]
    dataset = open_dataset(tmp_path / "d.npz", x_spec)
    assert len(dataset) == 10
    assert not dataset.has_labels
    assert rows_of(dataset, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert rows_of(dataset, 4) == rows_of(dataset, 4)


def test_values_arrive_unchanged(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    ids, mask = random.integers(0, 9, (5, 7)), random.integers(0, 2, (5, 7))
    dataset = open_dataset(save(tmp_path / "d.npz", ids=ids, mask=np.asfortranarray(mask)), TOKENS)
    batches = list(dataset.batches(2))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([batch.feeds["ids"] for batch in batches]), ids)
    np.testing.assert_array_equal(np.concatenate([batch.feeds["mask"] for batch in batches]), mask)


def test_big_endian_arrays_are_read(tmp_path: Path, x_spec: Specs) -> None:
    dataset = open_dataset(save(tmp_path / "d.npz", x=samples(3).astype(">f4")), x_spec)
    np.testing.assert_array_equal(next(dataset.batches(3)).feeds["x"], samples(3))


def test_header_format_2_is_read(tmp_path: Path, x_spec: Specs) -> None:
    path = zip_of(tmp_path / "d.npz", {"x.npy": npy_bytes(samples(3), version=(2, 0))})
    assert rows_of(open_dataset(path, x_spec), 8) == [[0, 1, 2]]


def test_an_axis_may_be_empty_where_the_model_leaves_it_open(tmp_path: Path) -> None:
    path = save(tmp_path / "d.npz", ids=np.zeros((3, 0), np.int64), mask=np.zeros((3, 0), np.int64))
    assert next(open_dataset(path, TOKENS).batches(3)).feeds["ids"].shape == (3, 0)


def test_infinity_is_allowed(tmp_path: Path, x_spec: Specs) -> None:
    path = save(tmp_path / "d.npz", x=np.full((2, 4), -np.inf, np.float32))
    assert len(open_dataset(path, x_spec)) == 2


def test_an_input_of_unknown_rank_takes_any(tmp_path: Path) -> None:
    path = save(tmp_path / "d.npz", x=np.zeros((2, 3, 4), np.float32))
    assert len(open_dataset(path, (TensorSpec("x", "float32", None),))) == 2


def test_folder_holds_one_batch_per_file_in_name_order_and_shapes_may_differ(tmp_path: Path) -> None:
    for index, seq in enumerate((3, 5, 5)):
        ids = np.full((2, seq), index)
        save(tmp_path / f"{index}.npz", ids=ids, mask=np.ones_like(ids))
    (tmp_path / "notes.txt").write_text("not data")
    dataset = open_dataset(tmp_path, TOKENS)
    assert len(dataset) == 6
    assert [batch.feeds["ids"].tolist() for batch in dataset.batches(8)] == [
        [[0] * 3] * 2,
        [[1] * 5] * 2 + [[2] * 5] * 2,
    ]
    assert dataset.batch_shapes(2)[0]["ids"] == [(2, 3), (2, 5), (2, 5)]


def test_fingerprint_depends_on_content_only(tmp_path: Path, x_spec: Specs) -> None:
    first = open_dataset(save(tmp_path / "a.npz", x=samples(3)), x_spec)
    same = open_dataset(save(tmp_path / "b.npz", x=samples(3)), x_spec)
    other = open_dataset(save(tmp_path / "c.npz", x=samples(3) + 1), x_spec)
    assert first.sha256 == same.sha256 != other.sha256
    assert len({first.sha256, first.view(0, 2).sha256, first.view(0, 3).sha256, first.view(1, 3).sha256}) == 4


# Labels


def test_labels_go_with_their_samples(tmp_path: Path, x_spec: Specs) -> None:
    dataset = open_dataset(save(tmp_path / "d.npz", x=samples(10), labels=np.arange(10, dtype=np.uint8)), x_spec)
    assert dataset.has_labels
    for batch in (*dataset.batches(3), *dataset.view(4, 9).batches(4)):
        assert batch.labels is not None
        assert batch.labels.tolist() == [int(row[0]) // 4 for row in batch.feeds["x"]]


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (np.zeros(10, np.float32), "'labels' is float32 [10]"),
        (np.zeros(9, np.int64), "'labels' is int64 [9]"),
        (np.zeros((10, 1), np.int64), "'labels' is int64 [10, 1]"),
        (np.int64(3), "'labels' is int64 []"),
        (np.zeros(10, "<U0"), "'labels' is str"),
        (np.array([None] * 10), "array 'labels' is pickled"),
    ],
)
def test_labels_are_one_integer_class_per_sample(tmp_path: Path, x_spec: Specs, labels: object, why: str) -> None:
    assert why in refusal(save(tmp_path / "d.npz", x=samples(10), labels=labels), x_spec).why


def test_labels_that_are_an_input_are_no_classes(tmp_path: Path) -> None:
    specs = (TensorSpec("labels", "float32", ("batch", 2)),)
    dataset = open_dataset(save(tmp_path / "d.npz", labels=np.zeros((3, 2), np.float32)), specs)
    assert not dataset.has_labels
    assert next(dataset.batches(3)).feeds["labels"].shape == (3, 2)


def test_a_folder_has_labels_only_where_every_file_has(tmp_path: Path, x_spec: Specs) -> None:
    save(tmp_path / "0.npz", x=samples(2), labels=np.array([1, 2]))
    assert open_dataset(tmp_path, x_spec).has_labels
    save(tmp_path / "1.npz", x=samples(2))
    dataset = open_dataset(tmp_path, x_spec)
    assert not dataset.has_labels
    assert [batch.labels is None for batch in dataset.batches(8)] == [False, True]


# What does not fit the model


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"y": samples(2)}, "no array for input x; unknown array y"),
        ({}, "no array for input x"),
        ({"x": samples(2), "z": samples(2)}, "unknown array z"),
        ({"x": samples(2).astype(np.float64)}, "input 'x' is float64; the model takes float32"),
        ({"x": samples(2).astype(np.int32)}, "input 'x' is int32; the model takes float32"),
        ({"x": samples(2)[0]}, "input 'x' has 1 axes [4]; the model takes x float32 [batch, 4]"),
        ({"x": samples(2)[None]}, "input 'x' has 3 axes [1, 2, 4]"),
        ({"x": np.float32(1)}, "input 'x' has no axis of samples"),
        ({"x": np.zeros((2, 5), np.float32)}, "axis 1 of input 'x' has size 5; the model takes x float32 [batch, 4]"),
        ({"x": samples(0)}, "it holds no samples"),
        ({"x": np.array(["a", "b"])}, "input 'x' is str"),
    ],
)
def test_arrays_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, x_spec: Specs, arrays: dict[str, object], why: str
) -> None:
    assert why in refusal(save(tmp_path / "d.npz", **arrays), x_spec).why


def test_a_wrong_name_is_answered_with_the_models_names(tmp_path: Path) -> None:
    error = refusal(save(tmp_path / "d.npz", tokens=np.zeros((1, 1), np.int64)), TOKENS)
    assert error.why == "no array for input ids, mask; unknown array tokens"
    assert error.fix == "name the arrays after the model's inputs: ids, mask (and 'labels' for classes)"


def test_a_wrong_dtype_is_answered_with_the_right_one(tmp_path: Path, x_spec: Specs) -> None:
    assert refusal(save(tmp_path / "d.npz", x=np.zeros((1, 4))), x_spec).fix == "save it as float32"


def test_inputs_of_different_length_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "d.npz", ids=np.zeros((3, 2), np.int64), mask=np.zeros((4, 2), np.int64))
    assert "different numbers of samples: ids 3, mask 4" in refusal(path, TOKENS).why


@pytest.mark.parametrize("order", ["C", "F"])
def test_nan_is_refused_with_its_sample(tmp_path: Path, x_spec: Specs, order: str) -> None:
    array = samples(100)
    array[71, 2] = np.nan
    error = refusal(save(tmp_path / "d.npz", x=np.asarray(array, order=order)), x_spec)  # type: ignore[call-overload]
    assert error.why == "input 'x' holds NaN, first in sample 71"


def test_fp16_nan_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "d.npz", x=np.full((1, 2), np.nan, np.float16))
    assert "holds NaN" in refusal(path, (TensorSpec("x", "float16", (1, 2)),)).why


# Sources


def test_a_source_that_is_not_there_says_what_can_be_given(tmp_path: Path, x_spec: Specs) -> None:
    for source in (tmp_path / "nothing.npz", tmp_path / "a:b.npz", "nothing"):
        assert refusal(source, x_spec).fix == "give an .npz file, a folder of them or module:function"


def test_an_empty_folder_is_refused(tmp_path: Path, x_spec: Specs) -> None:
    assert "the folder holds no .npz file" in refusal(tmp_path, x_spec).why


def test_a_bad_file_of_a_folder_is_named(tmp_path: Path, x_spec: Specs) -> None:
    save(tmp_path / "0.npz", x=samples(2))
    save(tmp_path / "1.npz", x=samples(2).astype(np.float64))
    with pytest.raises(InputError, match=r"1\.npz cannot be used"):
        open_dataset(tmp_path, x_spec)


def test_one_batch_may_be_checked_by_itself(x_spec: Specs) -> None:
    batch = check_batch({"x": samples(2), "labels": np.array([0, 1])}, x_spec, "feeds")
    assert len(batch) == 2
    with pytest.raises(InputError, match="it holds no samples"):
        check_batch({"x": samples(0)}, x_spec, "feeds")


# Views and batches


@pytest.mark.parametrize("stored", [1, 3, 4, 7, 20])
@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_views_cross_the_borders_of_stored_batches(stored: int, batch_size: int) -> None:
    pieces = [Batch({"x": samples(20)[i : i + stored]}, None) for i in range(0, 20, stored)]
    dataset = dataset_of(*pieces)
    for start, stop in ((0, 20), (0, 13), (13, 20), (5, 6), (4, 12), (7, 7)):
        view = dataset.view(start, stop)
        batches = rows_of(view, batch_size)
        assert [row for rows in batches for row in rows] == list(range(start, stop))
        assert all(len(rows) == batch_size for rows in batches[:-1])
        assert len(view) == stop - start


def test_a_view_reads_no_further_than_it_needs() -> None:
    def read(_: int) -> Iterator[Batch]:
        yield Batch({"x": samples(4)}, None)
        raise AssertionError("read on")

    dataset = Dataset("memory", (), 8, "0" * 64, False, read)
    assert rows_of(dataset.view(0, 4), 4) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("count", "smallest", "batch_size", "sizes"),
    [
        (10, 1, 4, [4, 4, 2]),
        (10, 2, 4, [4, 4, 2]),
        (10, 3, 4, [4, 4]),
        (10, 4, 4, [4, 4]),
        (3, 4, 4, []),
        (8, 8, 4, []),
    ],
)
def test_a_remainder_below_the_smallest_batch_is_left_out(
    count: int, smallest: int, batch_size: int, sizes: list[int]
) -> None:
    dataset = dataset_of(Batch({"x": samples(count)}, None), smallest_batch=smallest)
    assert [len(batch) for batch in dataset.batches(batch_size)] == sizes


def test_a_view_that_starts_inside_a_batch_still_fills_whole_batches(tmp_path: Path, x_spec: Specs) -> None:
    """45 samples at a static batch of 8: the last 9 lie across the border of the slices that start at 32 and 40."""
    dataset = open_dataset(save(tmp_path / "d.npz", x=samples(45)), x_spec)
    dataset = dataclasses.replace(dataset, smallest_batch=8).view(36, 45)
    assert rows_of(dataset, 8) == [list(range(36, 44))]


def test_sample_hashes_find_equal_samples_whatever_the_batches() -> None:
    first = dataset_of(Batch({"x": samples(10)}, None))
    second = dataset_of(Batch({"x": samples(12)[8:11]}, None), Batch({"x": samples(12)[11:]}, None))
    assert len(first.sample_hashes()) == 10
    assert len(first.sample_hashes() & second.sample_hashes()) == 2


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    specs = (TensorSpec("x", "float32", ("batch", 8192)),)

    def peak_of(count: int, compressed: bool, order: Literal["C", "F"]) -> int:
        array = np.random.default_rng(0).normal(size=(count, 8192)).astype(np.float32, order=order)
        (np.savez_compressed if compressed else np.savez)(tmp_path / "d.npz", x=array)
        del array
        tracemalloc.start()
        for _ in open_dataset(tmp_path / "d.npz", specs).batches(8):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_of(16, compressed=False, order="C")
    for compressed in (False, True):
        assert peak_of(200, compressed, "C") < 1.1 * peak_of(20, compressed, "C")
    assert peak_of(800, False, "F") < 1.1 * peak_of(200, False, "F")


STATEFUL = (
    TensorSpec("x", "float32", ("batch", "n")),
    TensorSpec("state", "float32", (2, "batch", 3)),
    TensorSpec("rate", "int64", ()),
)


def feed(value: int = 0) -> dict[str, np.ndarray]:
    return {
        "x": np.full((1, 4), value, np.float32),
        "state": np.zeros((2, 1, 3), np.float32),
        "rate": np.array(16000, np.int64),
    }


def test_arrays_without_a_common_first_axis_are_one_feed(tmp_path: Path) -> None:
    dataset = open_dataset(save(tmp_path / "d.npz", **feed(7)), STATEFUL)
    (batch,) = dataset.batches(8)
    assert (len(dataset), len(batch), batch.is_whole, dataset.has_whole_feeds) == (1, 1, True, True)
    assert {name: array.shape for name, array in batch.feeds.items()} == {"x": (1, 4), "state": (2, 1, 3), "rate": ()}
    assert (batch.feeds["x"] == 7).all()
    assert batch.feeds["rate"] == 16000
    assert dataset.batch_shapes(8, ["rate"])[1] == {"rate": [(16000,)]}


def test_a_folder_of_feeds_has_one_sample_per_file(tmp_path: Path) -> None:
    for index in range(5):
        save(tmp_path / f"{index}.npz", **feed(index))
    dataset = open_dataset(tmp_path, STATEFUL)
    assert [int(batch.feeds["x"][0, 0]) for batch in dataset.batches(8)] == [0, 1, 2, 3, 4]
    assert [int(batch.feeds["x"][0, 0]) for batch in dataset.view(3, 5).batches(8)] == [3, 4]
    assert dataset.batch_shapes(8)[0]["state"] == [(2, 1, 3)] * 5
    assert len(dataset.sample_hashes()) == 5
    small = dataclasses.replace(dataset, smallest_batch=2)
    assert len(list(small.batches(8))) == 5


def test_whole_feeds_are_not_joined_with_samples(tmp_path: Path) -> None:
    specs = (TensorSpec("a", "float32", (None, 2)), TensorSpec("b", "float32", (None,)))
    save(tmp_path / "0.npz", a=np.zeros((3, 2), np.float32), b=np.zeros(3, np.float32))
    save(tmp_path / "1.npz", a=np.ones((3, 2), np.float32), b=np.ones(5, np.float32))
    save(tmp_path / "2.npz", a=np.zeros((1, 2), np.float32), b=np.zeros(1, np.float32))
    dataset = open_dataset(tmp_path, specs)
    assert [(len(batch), batch.is_whole) for batch in dataset.batches(8)] == [(3, False), (1, True), (1, False)]
    assert len(dataset) == 5


@pytest.mark.parametrize(
    ("specs", "shapes", "is_split"),
    [
        (((("b", "n")), ("b", "n")), ((4, 2), (4, 2)), True),
        ((((1, 3)), (1, 5)), ((4, 3), (4, 5)), True),
        ((((2, "b", 3)), (2, "b")), ((2, 1, 3), (2, 1)), True),
        (((("b", 3)), (2, "b")), ((2, 3), (2, 2)), False),
        (((("b", 3)), ("layers", "b")), ((2, 3), (2, 2)), False),
        (((("b", 3)), ("batch_size", 3)), ((2, 3), (2, 3)), True),
        ((((1, 3)), (2, 3)), ((1, 3), (2, 3)), False),
        ((((None, 3)), (None,)), ((2, 3), (4,)), False),
    ],
)
def test_when_the_first_axis_counts_samples(
    specs: tuple[tuple[object, ...], ...], shapes: tuple[tuple[int, ...], ...], is_split: bool
) -> None:
    ports = tuple(TensorSpec(str(i), "float32", shape) for i, shape in enumerate(specs))  # type: ignore[arg-type]
    batch = check_batch({str(i): np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}, ports, "data")
    assert batch.is_whole is not is_split


def test_a_whole_feed_has_to_fit_the_model_on_every_axis(tmp_path: Path) -> None:
    path = save(tmp_path / "d.npz", **(feed() | {"state": np.zeros((3, 1, 3), np.float32)}))
    assert "axis 0 of input 'state' has size 3" in refusal(path, STATEFUL).why
    path = save(tmp_path / "e.npz", **(feed() | {"state": np.full((2, 1, 3), np.nan, np.float32)}))
    assert refusal(path, STATEFUL).why == "input 'state' holds NaN"


def test_labels_of_a_whole_feed_are_one(tmp_path: Path) -> None:
    assert open_dataset(save(tmp_path / "d.npz", **feed(), labels=np.array([3])), STATEFUL).has_labels
    path = save(tmp_path / "e.npz", **feed(), labels=np.array([3, 4]))
    assert "save one integer class per sample: shape [1]" in refusal(path, STATEFUL).fix


def test_a_function_may_yield_whole_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("feeds_of_states.py").write_text(
        "import numpy as np\n"
        "def feeds():\n"
        "    for i in range(3):\n"
        "        yield {'x': np.full((1, 4), i, np.float32), 'state': np.zeros((2, 1, 3), np.float32),"
        " 'rate': np.array(8000)}\n"
    )
    dataset = open_dataset("feeds_of_states:feeds", STATEFUL)
    assert (len(dataset), dataset.has_whole_feeds) == (3, True)
    assert [int(batch.feeds["x"][0, 0]) for batch in dataset.batches(8)] == [0, 1, 2]
