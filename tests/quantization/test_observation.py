from __future__ import annotations

import numpy as np
import pytest
from quant_cases import normal

from trtforge.quantization import observation as module
from trtforge.quantization.observation import Observation

MASK = np.array([[1, 1, 0], [1, 0, 0]])


def observe(*batches, axes, **options):
    """An observation of batches (feeds, taps)."""
    observation = Observation(axes, **options)
    for feeds, taps in batches:
        observation.update(feeds, taps)
    return observation


def test_batches_of_different_shapes_are_observed_together():
    batches = [(2, 5), (3, 9)]
    seen = observe(
        *(({"i": np.zeros(n)}, {"x": normal(n, m, seed=n), "y": normal(n)}) for n, m in batches),
        axes={"x": None, "y": None},
    )
    assert (seen.samples, seen.batches) == (5, 2)
    assert (seen.observers["x"].count, seen.observers["y"].count) == (37, 5)
    assert seen.rows == {}


def test_only_the_named_tensors_are_observed():
    seen = observe(({"i": np.zeros(2)}, {"x": normal(2), "other": np.arange(3)}), axes={"x": None})
    assert list(seen.observers) == ["x"]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, bool])
@pytest.mark.parametrize(
    ("shape", "axis"), [((2, 3, 4), -1), ((6, 4), -1), ((2, 3, 2, 5), -1), ((2, 3, 4), None), ((2, 3, 7, 4), -2)]
)
def test_masked_positions_are_not_observed(shape, axis, dtype):
    values = normal(*shape)
    positions = values.reshape(6, *shape[1:] if len(shape) == 2 else shape[2:])
    positions[~(MASK != 0).reshape(-1)] = 1000.0
    seen = observe(({"m": MASK.astype(dtype)}, {"x": values}), axes={"x": axis}, mask="m", keep_rows=True)
    assert seen.observers["x"].count == values.size // 2
    assert seen.observers["x"].amax < 10.0
    assert seen.masked_tensors == {"x"}
    if axis is not None:
        assert seen.observers["x"].channel_max.max() < 10.0
        assert len(seen.rows["x"].rows()) == values.size // shape[axis] // 2


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((2, 3), -1), ((6,), -1), ((2, 5, 4), -1), ((2, 3, 8), 1), ((2, 4, 3, 3), -1), ((2, 3, 5), -2), ((5, 4), -1)],
)
def test_tensors_of_other_shapes_are_observed_in_full(shape, axis):
    seen = observe(({"m": MASK}, {"x": normal(*shape)}), axes={"x": axis}, mask="m")
    assert seen.observers["x"].count == np.prod(shape)
    assert seen.masked_tensors == set()


def test_a_batch_whose_positions_are_all_masked_adds_nothing():
    seen = observe(({"m": MASK * 0}, {"x": normal(2, 3, 4)}), axes={"x": -1}, mask="m", keep_rows=True)
    assert (seen.observers["x"].count, seen.samples, len(seen.rows["x"].rows())) == (0, 2, 0)


def test_masked_scores_of_minus_infinity_are_only_counted():
    scores = np.where(MASK[:, None, None, :] != 0, normal(2, 4, 3, 3), -np.inf).astype(np.float32)
    seen = observe(({"m": MASK}, {"scores": scores}), axes={"scores": -1})
    assert seen.observers["scores"].num_non_finite == np.isinf(scores).sum() > 0


def test_rows_of_many_tensors_share_the_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_ROW_BYTES", 4000)
    axes = {f"t{index}": -1 for index in range(10)} | {"no channels": None}
    feeds = {"i": np.zeros(300)}
    seen = observe((feeds, {name: normal(300, 4) for name in axes}), axes=axes, keep_rows=True)
    assert "no channels" not in seen.rows
    assert 2000 <= sum(sampler.rows().nbytes for sampler in seen.rows.values()) <= 4000


def test_the_state_does_not_depend_on_the_batch_size():
    mask, x = (normal(24, 5) > 0).astype(np.int64), normal(24, 5, 6)

    def seen(batch):
        parts = [({"m": mask[i : i + batch]}, {"x": x[i : i + batch]}) for i in range(0, 24, batch)]
        return observe(*parts, axes={"x": -1}, mask="m", keep_rows=True)

    whole, parts = seen(24), seen(5)
    assert np.array_equal(whole.observers["x"].histogram, parts.observers["x"].histogram)
    assert np.array_equal(whole.rows["x"].rows(), parts.rows["x"].rows())


def restored(seen):
    copy = Observation(seen.channel_axes, mask=seen.mask, keep_rows=bool(seen.rows))
    copy.restore(seen.state())
    return copy


@pytest.mark.parametrize("keep_rows", [False, True])
def test_restored_observation_goes_on_as_if_nothing_had_happened(keep_rows):
    axes = {"x/with.dots": -1, "y": None}
    batches = [({"m": MASK}, {"x/with.dots": normal(2, 3, 4, seed=s), "y": normal(s + 1, seed=s)}) for s in range(4)]
    whole = observe(*batches, axes=axes, mask="m", keep_rows=keep_rows)
    resumed = restored(observe(*batches[:2], axes=axes, mask="m", keep_rows=keep_rows))
    for feeds, taps in batches[2:]:
        resumed.update(feeds, taps)
    assert (resumed.samples, resumed.batches, resumed.masked_tensors) == (8, 4, {"x/with.dots"})
    expected, actual = whole.state(), resumed.state()
    assert list(expected) == list(actual)
    assert all(np.array_equal(expected[name], actual[name]) for name in expected)


def test_the_state_does_not_grow_with_the_data():
    def size(batches):
        seen = observe(*[({"i": np.zeros(9)}, {"x": normal(9, 4)})] * batches, axes={"x": -1})
        return sum(array.nbytes for array in seen.state().values())

    assert size(1) == size(40)


@pytest.mark.parametrize(
    "other", [Observation({"x": -1, "y": -1}), Observation({}), Observation({"x": -1}, keep_rows=True)]
)
def test_the_state_of_other_tensors_is_refused(other):
    seen = observe(({"i": np.zeros(2)}, {"x": normal(2, 4)}), axes={"x": -1})
    with pytest.raises((KeyError, ValueError)):
        other.restore(seen.state())
