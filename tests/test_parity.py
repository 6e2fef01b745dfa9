from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from trtforge.parity import OutputParity, ParityAccumulator, left_out_note, meets_budget, sqnr_db, top1

Feeds = dict[str, np.ndarray]


def compare(reference: np.ndarray, candidate: np.ndarray, feeds: Feeds | None = None) -> OutputParity:
    """Figures of one output over one batch; by default every input has as many samples as the output."""
    accumulator = ParityAccumulator()
    accumulator.add({"y": reference}, {"y": candidate}, {"x": np.zeros(len(reference))} if feeds is None else feeds)
    return accumulator.result()["y"]


def figures(**changes: float) -> OutputParity:
    values = {"cosine": 1.0, "cosine_min": 1.0, "sqnr_db": None, "max_abs_error": 0.0, "nan": False}
    return OutputParity(**(values | changes))  # type: ignore[arg-type]


def test_equal_outputs() -> None:
    y = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    result = compare(y, y.copy())
    assert (result.cosine, result.sqnr_db, result.max_abs_error, result.nan) == (1.0, None, 0.0, False)


def test_equal_outputs_meet_a_budget_of_one() -> None:
    y = np.random.default_rng(0).normal(size=(100, 7)).astype(np.float32)
    assert meets_budget({"y": compare(y, y.copy())}, 1.0)


def test_figures_follow_their_definitions() -> None:
    random = np.random.default_rng(1)
    r = random.normal(size=(6, 3, 4))
    c = r + 0.1 * random.normal(size=r.shape)
    result = compare(r, c)
    flat_r, flat_c = r.reshape(6, -1), c.reshape(6, -1)
    cosines = (flat_r * flat_c).sum(1) / np.linalg.norm(flat_r, axis=1) / np.linalg.norm(flat_c, axis=1)
    assert result.cosine == pytest.approx(cosines.mean())
    assert result.cosine_min == pytest.approx(cosines.min())
    assert result.sqnr_db == pytest.approx(10 * math.log10((r**2).sum() / ((r - c) ** 2).sum()))
    assert result.sqnr_db == pytest.approx(sqnr_db(r, c))
    assert result.max_abs_error == pytest.approx(np.abs(r - c).max())


def test_figures_do_not_depend_on_how_samples_are_batched() -> None:
    random = np.random.default_rng(2)
    r, c = random.normal(size=(7, 3)), random.normal(size=(7, 3))
    split = ParityAccumulator()
    for rows in (slice(0, 3), slice(3, 4), slice(4, 7)):
        split.add({"y": r[rows]}, {"y": c[rows]}, {"x": r[rows]})
    assert split.result()["y"] == compare(r, c)


def test_the_mean_is_over_samples_not_over_elements() -> None:
    result = compare(np.array([[1000.0, 0.0], [1.0, 0.0]]), np.array([[1000.0, 0.0], [0.0, 1.0]]))
    assert (result.cosine, result.cosine_min) == (0.5, 0.0)


def test_masked_positions_are_left_out() -> None:
    r = np.ones((2, 3, 4))
    c = r.copy()
    c[0, 2], c[1, 1:] = -100.0, np.nan
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    assert compare(r, c, {"attention_mask": mask}) == compare(r, r)
    assert compare(r, c, {"attention_mask": mask.astype(bool)}).cosine == pytest.approx(1.0)
    assert compare(r, c, {"mask": mask}).nan


def test_positions_that_the_mask_keeps_count() -> None:
    r, c = np.ones((1, 2, 4)), np.ones((1, 2, 4))
    c[0, 1] = -1.0
    assert compare(r, c, {"attention_mask": np.array([[1, 1]])}).cosine == pytest.approx(0.0)
    assert compare(r, c, {"attention_mask": np.array([[0, 1]])}).cosine == pytest.approx(-1.0)


def test_a_mask_of_another_shape_masks_nothing() -> None:
    r, c = np.ones((2, 5)), -np.ones((2, 5))
    assert compare(r, c, {"attention_mask": np.zeros((2, 3))}).cosine == pytest.approx(-1.0)
    assert compare(r, c, {"attention_mask": np.zeros((2, 5, 1))}).cosine == pytest.approx(-1.0)
    assert compare(r, c, {"attention_mask": np.zeros((2, 1, 1, 5))}).cosine == pytest.approx(-1.0)
    assert compare(r[:, 0], c[:, 0], {"attention_mask": np.zeros(2)}).cosine == pytest.approx(-1.0)


def test_a_fully_masked_sample_proves_nothing() -> None:
    result = compare(np.ones((1, 2, 3)), np.zeros((1, 2, 3)), {"attention_mask": np.zeros((1, 2))})
    assert (result.cosine, result.max_abs_error) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint8, np.bool_])
def test_integers_and_bools_use_the_share_of_equal_elements(dtype: type) -> None:
    r, c = np.array([[1, 0, 1, 0], [1, 1, 1, 1]], dtype), np.array([[1, 0, 0, 1], [1, 1, 1, 1]], dtype)
    result = compare(r, c)
    assert (result.cosine, result.cosine_min, result.max_abs_error, result.sqnr_db) == (0.75, 0.5, 1.0, None)


def test_unsigned_differences_do_not_wrap() -> None:
    assert compare(np.array([[0]], np.uint8), np.array([[255]], np.uint8)).max_abs_error == 255.0
    assert compare(np.array([[-128]], np.int8), np.array([[127]], np.int8)).max_abs_error == 255.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_the_candidate_only_is_flagged(bad: float) -> None:
    r, c = np.ones((2, 2)), np.ones((2, 2))
    c[1, 0] = bad
    result = compare(r, c)
    assert result.nan
    assert result.cosine < 1.0
    assert not meets_budget({"y": result}, 0.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_the_reference_is_left_out(bad: float) -> None:
    r, c = np.ones((2, 3)), np.ones((2, 3))
    r[:, 0], c[:, 0] = bad, [np.nan, -65504.0]
    result = compare(r, c)
    assert not result.nan
    assert (result.cosine, result.max_abs_error) == (pytest.approx(1.0), 0.0)


def test_a_reference_that_is_nowhere_finite_proves_nothing() -> None:
    r = np.full((2, 3), np.nan)
    result = compare(r, np.ones((2, 3)))
    assert (result.cosine, result.cosine_min, result.nan) == (0.0, 0.0, False)
    assert not meets_budget({"y": result}, 0.5)


def test_a_sample_without_a_finite_reference_does_not_count() -> None:
    r, c = np.array([[np.nan, np.nan], [1.0, 0.0]]), np.array([[1.0, 1.0], [0.0, 1.0]])
    result = compare(r, c)
    assert (result.cosine, result.left_out, result.nan_reference) == (0.0, 1, 1)


@pytest.mark.parametrize(
    ("rows", "left_out", "nan_reference"),
    [
        ([[np.nan, 1.0], [1.0, 1.0]], 0, 1),
        ([[-np.inf, 1.0], [1.0, 1.0]], 0, 0),
        ([[-np.inf, np.inf], [1.0, 1.0]], 1, 0),
        ([[np.nan, -np.inf], [np.nan, 1.0]], 1, 2),
    ],
)
def test_samples_that_the_reference_gives_no_numbers_for_are_counted(
    rows: list[list[float]], left_out: int, nan_reference: int
) -> None:
    r = np.array(rows)
    result = compare(r, np.where(np.isfinite(r), r, 7.0))
    assert (result.cosine, result.left_out, result.nan_reference) == (pytest.approx(1.0), left_out, nan_reference)


def test_nan_at_masked_positions_is_nobodys_concern() -> None:
    r, mask = np.ones((1, 2, 3)), np.array([[1, 0]])
    r[0, 1] = np.nan
    result = compare(r, r, {"attention_mask": mask})
    assert (result.cosine, result.left_out, result.nan_reference) == (1.0, 0, 0)


def test_outputs_without_any_value_are_named() -> None:
    accumulator = ParityAccumulator()
    for second in (np.nan, 1.0):
        outputs = {"a": np.array([[np.nan]]), "b": np.array([[second]]), "c": np.array([[2]])}
        accumulator.add(outputs, outputs, {"x": np.zeros((1, 1))})
    assert accumulator.unproven() == ("a",)


def test_the_note_says_what_is_left_out_of_which_output() -> None:
    assert left_out_note({"y": figures()}) is None
    outputs = {"y": figures(left_out=1, nan_reference=3), "z": figures(left_out=1), "ok": figures()}
    assert left_out_note(outputs) == (
        "The source model itself gives NaN in 3 samples of output 'y'; nothing but Inf in 1 sample of output 'z'; its "
        "NaN and Inf are left out of the comparison."
    )


def test_zero_vectors() -> None:
    zero, one = np.zeros((1, 3)), np.ones((1, 3))
    assert compare(zero, zero).cosine == 1.0
    assert compare(zero, one).cosine == 0.0
    assert compare(one, zero).cosine == 0.0
    assert compare(zero, one).sqnr_db is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_compared_in_double(dtype: type) -> None:
    r = np.full((1, 4096), 200.0).astype(dtype)
    c = r.copy()
    c[0, 0] = 100.0
    result = compare(r, c)
    assert result.sqnr_db == pytest.approx(10 * math.log10(4096 * 200.0**2 / 100.0**2))
    assert 0.9999 < result.cosine < 1.0
    assert not result.nan
    assert compare(r.astype(np.float32), r).max_abs_error == 0.0


@pytest.mark.parametrize("scale", [1e-200, 1e200, 3.4e38, 1e308])
def test_extreme_values_neither_vanish_nor_overflow(scale: float) -> None:
    r, c = np.array([[1.0, 0.0, 1.0]]) * scale, np.array([[1.0, 0.0, -1.0]]) * scale
    with np.errstate(over="ignore"):
        result = compare(r, c)
    assert result.cosine == pytest.approx(0.0, abs=1e-12)
    assert math.isfinite(result.max_abs_error)


def test_scalar_outputs_and_outputs_without_a_batch_axis_are_one_sample() -> None:
    feeds = {"x": np.zeros((4, 2))}
    assert compare(np.float32(2.0).reshape(()), np.float32(3.0).reshape(()), feeds).max_abs_error == 1.0
    r, c = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 0.0], [0.0, -1.0]])
    result = compare(r, c, feeds)
    assert result.cosine == result.cosine_min == pytest.approx(0.0)


def single(*values: float) -> np.ndarray:
    return np.array(values, np.float32).reshape(-1, 1)


def test_single_values_of_one_sign_can_fail() -> None:
    r = single(0.1, 0.9, 0.2, 0.8)
    assert compare(r, single(0.5, 0.5, 0.5, 0.5)).cosine == pytest.approx(0.5)
    assert compare(r, single(0.9, 0.1, 0.8, 0.2)).cosine == pytest.approx(-1.0)
    assert compare(r[:, 0], single(0.5, 0.5, 0.5, 0.5)[:, 0]).cosine == pytest.approx(0.5)
    assert compare(r, r.copy()).cosine == compare(r, r.copy()).cosine_min == 1.0


def test_single_values_score_as_their_definition_says() -> None:
    random = np.random.default_rng(3)
    r = random.normal(5.0, 2.0, (50, 1))
    c = r + 0.1 * random.normal(size=r.shape)
    result = compare(r, c)
    assert result.cosine == pytest.approx(1 - ((r - c) ** 2).mean() / (2 * r.var()))
    assert result.cosine_min == pytest.approx(1 - ((r - c) ** 2).max() / (2 * r.var()))
    centred_r, centred_c = (x[:, 0] - r.mean() for x in (r, c))
    pearson = centred_r @ centred_c / np.linalg.norm(centred_r) / np.linalg.norm(centred_c)
    assert result.cosine == pytest.approx(pearson, abs=1e-4)


def test_single_values_that_hardly_vary_are_judged_by_a_tenth_of_their_mean() -> None:
    one_percent = compare(single(0.99, 0.99), single(0.98, 0.98))
    assert one_percent.cosine == pytest.approx(1 - (0.01 / 0.099) ** 2 / 2, abs=1e-5)
    assert compare(single(290.0, 290.5), single(310.0, 310.5)).cosine < 0.97
    assert compare(single(-2.0), single(-2.1)).cosine == pytest.approx(1 - 0.5**2 / 2, abs=1e-5)
    assert compare(single(-2.0), single(2.0)).cosine == -1.0


def test_single_values_without_any_spread_prove_nothing_unless_they_are_equal() -> None:
    assert compare(single(0.0, 0.0), single(0.0, 0.0)).cosine == 1.0
    assert compare(single(0.0, 0.0), single(0.0, 1e-3)).cosine == 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        assert compare(np.array([[1e200], [-1e200]]), np.array([[0.0], [1.0]])).cosine <= 0.0


def test_single_values_do_not_depend_on_how_samples_are_batched() -> None:
    r, c = single(0.1, 0.5, 0.9), single(0.2, 0.5, 0.7)
    split = ParityAccumulator()
    for rows in (slice(0, 1), slice(1, 3)):
        split.add({"y": r[rows]}, {"y": c[rows]}, {"x": r[rows]})
    assert split.result()["y"] == compare(r, c)


def test_single_values_that_are_not_finite() -> None:
    r, c = single(0.1, 0.9, np.nan), single(0.1, np.inf, 0.5)
    assert compare(r, c).nan
    assert compare(r, c).cosine < 0.0
    assert compare(single(np.nan), single(1.0)).cosine == 0.0


def test_an_output_that_sometimes_has_one_element_keeps_the_cosine() -> None:
    accumulator = ParityAccumulator()
    for size in (1, 2):
        accumulator.add({"y": np.ones((1, size))}, {"y": np.full((1, size), 2.0)}, {"x": np.zeros((1, size))})
    assert accumulator.result()["y"].cosine == pytest.approx(1.0)


def test_scalar_inputs_do_not_count_as_the_batch() -> None:
    r, c = np.array([[1.0], [1.0]]), np.array([[1.0], [-1.0]])
    assert compare(r, c, {"scale": np.array(3.0), "x": np.zeros((2, 1))}).cosine_min == -1.0
    assert compare(r, r, {}).cosine == pytest.approx(1.0)


def test_empty_outputs_are_equal() -> None:
    for dtype in (np.float32, np.int64):
        assert compare(np.zeros((2, 0), dtype), np.zeros((2, 0), dtype)).cosine == 1.0


def test_outputs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"output 'y' has shape \(2, 4\); the reference has \(2, 3\)"):
        compare(np.zeros((2, 3)), np.zeros((2, 4)))


def test_outputs_are_kept_apart() -> None:
    accumulator = ParityAccumulator()
    accumulator.add({"a": np.ones((1, 2)), "b": np.ones((1, 2))}, {"b": -np.ones((1, 2)), "a": np.ones((1, 2))}, {})
    assert {name: round(result.cosine) for name, result in accumulator.result().items()} == {"a": 1, "b": -1}


def test_every_output_has_to_meet_the_budget() -> None:
    assert meets_budget({"a": figures(cosine=0.97), "b": figures()}, 0.97)
    assert not meets_budget({"a": figures(cosine=0.9699), "b": figures()}, 0.97)
    assert not meets_budget({"a": figures(nan=True), "b": figures()}, 0.97)


def test_the_worst_sample_does_not_decide() -> None:
    assert meets_budget({"a": figures(cosine=0.98, cosine_min=0.1)}, 0.97)


def test_no_outputs_meet_no_budget() -> None:
    assert not meets_budget({}, 0.0)


def test_top1_counts_labels_with_the_highest_score() -> None:
    scores = np.array([[0.1, 0.9], [0.8, 0.2], [0.4, 0.6], [0.7, 0.3]], np.float16)
    assert top1(scores, np.array([1, 0, 0, 0], np.uint8)) == 0.75


def test_sqnr_of_equal_zero_and_broken_signals() -> None:
    one = np.ones(4, np.float32)
    assert sqnr_db(one, one) == math.inf
    assert sqnr_db(np.zeros(4), one) == -math.inf
    assert sqnr_db(one, np.array([1, 1, np.nan, 1])) == -math.inf
    assert sqnr_db(np.array([np.inf, 1.0]), np.array([np.nan, 1.0])) == math.inf
    assert sqnr_db(one, one * 1.1) == pytest.approx(20.0, abs=1e-5)


def test_samples_that_are_all_padding_prove_nothing() -> None:
    accumulator = ParityAccumulator()
    exact, wrong = np.ones((2, 3, 4), np.float32), np.full((2, 3, 4), -1.0, np.float32)
    accumulator.add({"y": exact}, {"y": wrong}, {"attention_mask": np.zeros((2, 3), np.int64)})
    assert accumulator.result()["y"].cosine == 0.0
    half = np.array([[1, 1, 0], [0, 0, 0]])
    accumulator.add({"y": exact}, {"y": wrong}, {"attention_mask": half})
    found = accumulator.result()["y"]
    assert found.cosine == found.cosine_min == pytest.approx(-1.0)
