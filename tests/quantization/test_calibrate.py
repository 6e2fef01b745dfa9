from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from quant_cases import graph_from_text, normal
from support import dataset_of, save_onnx

from trtforge.data import Batch
from trtforge.errors import ChildDiedError, InputError
from trtforge.quantization import calibrate, checkpoint
from trtforge.quantization.calibrate import Pass, channel_axes, check_mask, observe_model, table_from_observers
from trtforge.quantization.checkpoint import Checkpoint
from trtforge.quantization.observers import StreamingObserver
from trtforge.quantization.placement import ActivationSite
from trtforge.recipe import QuantRecipe
from trtforge.tensor import TensorSpec

SHA = {"model_sha256": "a" * 64, "data_sha256": "b" * 64}
MASKED = TensorSpec("ids", "float32", (None, None, 4)), TensorSpec("mask", "int64", (None, None))


class Notes(list):
    """What a calibration says of itself."""

    def __call__(self, detail, done=0, total=0, level="progress"):
        self.append((level, detail, done, total))


@pytest.fixture
def encoder(tmp_path):
    """ids [B, S, 4] -> h = ids * 2 -> y = h + mask; the mask has to reach the outputs."""
    return save_onnx(
        tmp_path / "m.onnx",
        """g (float[b, s, 4] ids, int64[b, s] mask) => (float[b, s, 4] y) {
            h = Mul(ids, two)
            m = Cast <to = 1> (mask)
            u = Unsqueeze(m, axis)
            y = Add(h, u)
        }""",
        two=np.float32(2),
        axis=np.array([2]),
    )


def data(lengths=((5, 3), (4, 6)), mask_value=None):
    """Batches [B, S] of the encoder's inputs; the last position of every sample is masked and large."""
    batches = []
    for seed, (count, length) in enumerate(lengths):
        ids = normal(count, length, 4, seed=seed)
        ids[:, -1] = 100.0
        mask = np.ones((count, length), np.int64)
        mask[:, -1] = 0
        batches.append(Batch({"ids": ids, "mask": mask if mask_value is None else mask * 0 + mask_value}, None))
    return dataset_of(*batches, specs=MASKED)


def observe(encoder, dataset=None, notes=None, saved=None, **options):
    work = Pass(encoder, "a" * 64, {"h": -1}, dataset or data(), 2, **options)
    warnings = []
    return observe_model(work, Notes() if notes is None else notes, warnings.append, saved), warnings


def test_a_model_is_observed_on_all_samples(encoder):
    notes = Notes()
    seen, warnings = observe(encoder, notes=notes, keep_rows=True)
    values = np.concatenate([2 * batch.feeds["ids"].reshape(-1, 4) for batch in data().batches(100)])
    assert (seen.samples, warnings) == (9, [])
    assert seen.observers["h"].count == values.size
    assert seen.observers["h"].minimum == values.min()
    np.testing.assert_allclose(seen.observers["h"].channel_mean, values.mean(axis=0), rtol=1e-6)
    assert np.array_equal(seen.rows["h"].rows(), values)
    assert [note[1:] for note in notes][-1] == ("9 of 9 samples", 9, 9)
    assert {note[0] for note in notes} == {"progress"}


def test_the_result_does_not_depend_on_the_batch_size(encoder):
    histograms = []
    for size in (1, 2, 5):
        work = Pass(encoder, "a" * 64, {"h": -1}, data(), size)
        histograms.append(observe_model(work, Notes(), pytest.fail).observers["h"].histogram)
    assert np.array_equal(histograms[0], histograms[1])
    assert np.array_equal(histograms[0], histograms[2])


def test_masked_positions_are_left_out(encoder):
    seen, warnings = observe(encoder, mask="mask")
    assert seen.observers["h"].amax < 20.0
    assert seen.observers["h"].count == (5 * 2 + 4 * 5) * 4
    assert warnings == []


def test_a_mask_that_hides_everything_is_refused(encoder):
    with pytest.raises(InputError, match="hides every position") as caught:
        observe(encoder, data(mask_value=0), mask="mask")
    assert "real tokens" in caught.value.fix


def test_a_mask_that_fits_no_tensor_is_warned_of(tmp_path):
    path = save_onnx(
        tmp_path / "m.onnx",
        "g (float[b, s, 4] ids, int64[b, s] mask) => (float[b, 4] h) { h = ReduceSum <keepdims = 0> (ids, axis) }",
        axis=np.array([1]),
    )
    _, warnings = observe(path, mask="mask")
    assert warnings == [
        "the recipe's mask 'mask' hid nothing: no tensor to quantize has its batch and sequence axes",
    ]


@pytest.mark.parametrize(
    ("mask", "why", "fix"),
    [
        ("attention_msk", "no such input; its inputs are ids, attention_mask, x", "did you mean attention_mask?"),
        ("zzz", "no such input", "name one of them"),
        ("x", r"it is x float32 \[b, s\]", "name such an input"),
        ("ids", r"it is ids int64 \[b\]", "name such an input"),
    ],
)
def test_a_mask_that_is_no_integer_input_with_two_axes_is_refused(mask, why, fix):
    specs = [
        TensorSpec("ids", "int64", ("b",)),
        TensorSpec("attention_mask", "int32", ("b", "s")),
        TensorSpec("x", "float32", ("b", "s")),
    ]
    check_mask("attention_mask", specs)
    with pytest.raises(InputError, match=f"the recipe's mask '{mask}' cannot be used") as caught:
        check_mask(mask, specs)
    assert pytest.RaisesExc(Exception, match=why).matches(Exception(caught.value.why))
    assert fix in caught.value.fix


def test_zero_size_and_infinite_activations_are_observed(tmp_path):
    path = save_onnx(
        tmp_path / "m.onnx",
        """g (float[b, s, 4] ids, int64[b, s] mask) => (float[p, q, r] h, float[b, s, 4] log) {
            h = Slice(ids, zero, zero, zero)
            log = Log(ids)
        }""",
        zero=np.array([0]),
    )
    work = Pass(path, "a" * 64, {"h": -1, "log": -1}, data(), 3)
    seen = observe_model(work, Notes(), pytest.fail).observers
    assert (seen["h"].count, seen["h"].amax) == (0, 0.0)
    assert seen["log"].num_non_finite > 0
    assert np.isfinite(seen["log"].channel_mean).all()


class Interrupted(Notes):
    """Ends a calibration after some samples, as a signal does."""

    def __call__(self, detail, done=0, total=0, level="progress"):
        super().__call__(detail, done, total, level)
        if done >= 4:
            raise KeyboardInterrupt


@pytest.fixture
def interrupted(encoder, tmp_path, monkeypatch):
    """The checkpoint of a calibration that was interrupted."""
    monkeypatch.setattr(checkpoint, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(checkpoint, "_PAUSE_PER_SAVE", 0.0)
    path = tmp_path / "t.json.partial"
    with pytest.raises(KeyboardInterrupt):
        observe(encoder, notes=Interrupted(), saved=Checkpoint(path), keep_rows=True, mask="mask")
    return path


def test_an_interrupted_calibration_goes_on_and_ends_the_same(encoder, interrupted):
    notes = Notes()
    resumed, warnings = observe(encoder, notes=notes, saved=Checkpoint(interrupted), keep_rows=True, mask="mask")
    whole, _ = observe(encoder, keep_rows=True, mask="mask")
    assert notes[:2] == [
        ("notice", "continuing at sample 2 of 9", 2, 9),
        ("progress", "4 of 9 samples", 4, 9),
    ]
    assert warnings == []
    expected, actual = whole.state(), resumed.state()
    assert expected.keys() == actual.keys()
    assert all(expected[name].tobytes() == actual[name].tobytes() for name in expected)


@pytest.mark.parametrize(
    "change", [{"mask": None}, {"keep_rows": False}, {"dataset": dataclasses.replace(data(), sha256="1" * 64)}]
)
def test_a_calibration_of_something_else_begins_anew(encoder, interrupted, change):
    options = {"keep_rows": True, "mask": "mask"} | change
    seen, warnings = observe(encoder, saved=Checkpoint(interrupted), **options)
    assert seen.samples == 9
    assert "it belongs to another calibration" in warnings[0]


def test_numbers_that_no_observation_gives_are_not_accepted_from_the_child(encoder, monkeypatch):
    monkeypatch.setattr(calibrate, "_SERVICE", f"{__name__}:HOSTILE")
    with pytest.raises(ChildDiedError, match="does not accept"):
        observe(encoder)


def _hostile_state(*_):
    return {}, {"progress": np.zeros(2, np.int64), "masked": np.zeros(1, bool), "0.histogram": np.zeros(3)}


HOSTILE = {
    "load": lambda *_: ({"outputs": [], "provider": "CPUExecutionProvider", "version": "", "gpu_failure": ""}, {}),
    "start": lambda *_: ({}, {}),
    "observe": lambda *_: ({}, {}),
    "state": _hostile_state,
}
FALLEN_BACK = HOSTILE | {
    "load": lambda *_: ({"outputs": [], "provider": "CPUExecutionProvider", "version": "", "gpu_failure": "no GPU"}, {})
}
ON_GPU = HOSTILE | {
    "load": lambda *_: ({"outputs": [], "provider": "CUDAExecutionProvider", "version": "", "gpu_failure": ""}, {})
}


def test_a_gpu_that_cannot_be_used_is_warned_of(encoder, monkeypatch):
    monkeypatch.setattr(calibrate, "_SERVICE", f"{__name__}:FALLEN_BACK")
    warnings = []
    with pytest.raises(ChildDiedError):
        observe_model(Pass(encoder, "a" * 64, {"h": -1}, data(), 2), Notes(), warnings.append)
    assert warnings == ["calibration runs on the CPU: ONNX Runtime cannot use its CUDA provider (no GPU)"]


def test_a_gpu_that_is_used_is_reported(encoder, monkeypatch):
    monkeypatch.setattr(calibrate, "_SERVICE", f"{__name__}:ON_GPU")
    notes = Notes()
    with pytest.raises(ChildDiedError):
        observe(encoder, notes=notes)
    assert notes[0] == ("notice", "running on CUDAExecutionProvider", 0, 0)


def test_channel_axis_is_what_the_consumer_sums_over():
    graph = graph_from_text(
        """g (float[2, 8] a, float[8, 2] t, float[2, 8, 5, 5] i, float[2, 3, 8] s, float[8, 4] r) => (float[2, 4] y) {
            [gemm] y = Gemm(a, w)
            [turned] y1 = Gemm <transA = 1> (t, w)
            [right] y5 = Gemm <transB = 1> (r, a)
            [conv] y2 = Conv(i, k)
            [matmul] y3 = MatMul(s, w)
            [add] y4 = Add(a, a)
        }""",
        w=np.zeros((8, 4), np.float32),
        k=np.zeros((4, 8, 3, 3), np.float32),
    )
    sites = [
        ActivationSite(node, index, tensor)
        for node, index, tensor in [
            ("add", 0, "a"),
            ("gemm", 0, "a"),
            ("turned", 0, "t"),
            ("conv", 0, "i"),
            ("matmul", 0, "s"),
            ("matmul", 1, "r"),
            ("right", 1, "n"),
            ("add", 1, "z"),
        ]
    ]
    assert channel_axes(graph, sites) == {"a": -1, "t": -2, "i": 1, "s": -1, "r": -2, "n": -1, "z": None}


def observer_of(values):
    observer = StreamingObserver()
    observer.update(values)
    return {"x": observer}


def test_table_holds_the_chosen_amax_and_what_was_seen():
    values = np.append(np.clip(normal(9_999), -4, 4), np.float32(-100.0))
    recipe = QuantRecipe(method="percentile", percentile=99.9)
    table = table_from_observers(observer_of(values), recipe, samples=9, **SHA)
    assert table.tensors["x"].amax < 5.0
    assert (table.tensors["x"].min, table.tensors["x"].max) == (-100.0, values.max())
    assert (table.method, table.percentile, table.samples) == ("percentile", 99.9, 9)
    assert table.recipe_sha256 == recipe.fingerprint()


@pytest.mark.parametrize("method", ["minmax", "entropy", "mse"])
def test_table_of_another_method_names_no_percentile(method):
    recipe = QuantRecipe(method=method)
    table = table_from_observers(observer_of(normal(3)), recipe, samples=1, **SHA)
    assert (table.method, table.percentile) == (method, None)


def test_non_finite_values_are_recorded():
    observers = observer_of(np.array([1.0, -np.inf], np.float32))
    assert table_from_observers(observers, QuantRecipe(), samples=1, **SHA).tensors["x"].non_finite == 1
