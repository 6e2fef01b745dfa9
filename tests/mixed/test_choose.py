from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from mixed_cases import conv_net, dataset, images, normal, prepare

from trtforge.data import Batch
from trtforge.errors import InputError
from trtforge.graph.edit import copy_graph
from trtforge.inputs import BatchRange
from trtforge.mixed import choose
from trtforge.mixed.choose import Choice, choose_float_nodes, spearman
from trtforge.sensitivity import SensitivityInfo


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A convolutional network whose third layer INT8 spoils."""
    return prepare(conv_net(bad=2), images(8), tmp_path_factory.mktemp("model"))


@pytest.fixture
def metric(monkeypatch):
    """Registers a metric under the name that it returns."""

    def register(function):
        module = types.ModuleType("a_metric")
        module.measure = function
        monkeypatch.setitem(sys.modules, "a_metric", module)
        return "a_metric:measure"

    return register


def choose_nodes(model, work: Path, calibration, budget: float, **changes) -> Choice:
    return choose_float_nodes(model.task(work, calibration, budget, **changes), lambda _: None)


def row(info: SensitivityInfo, node: str):
    return next(entry for entry in info.nodes if entry.node == node)


def test_exactly_the_bad_layer_stays_float(model, tmp_path: Path) -> None:
    choice = choose_nodes(model, tmp_path, images(24), 0.995)
    info = choice.info
    assert set(choice.reasons) == {"conv2"} and info.met
    assert [entry.node for entry in info.nodes if entry.kept] == ["conv2"]
    assert [entry.node for entry in info.nodes] == list(model.nodes)
    first, *_, last = info.tried
    assert (first.kept, first.met) == ((), False) and (last.kept, last.met) == (("conv2",), True)
    assert last.measured >= 0.995 > first.measured
    assert last.lowered_flops_share == pytest.approx(first.lowered_flops_share - row(info, "conv2").flops_share)
    assert row(info, "conv2").output_sqnr_db < min(e.output_sqnr_db for e in info.nodes if e.node != "conv2")
    assert row(info, "conv2").node_sqnr_db < 15.0
    assert info.criterion == "mean cosine of every output"
    assert (info.chosen_on, info.confirmed_on) == ("24 calibration samples", "")
    assert info.measured_on.endswith(" calibration samples") and info.rank_correlation >= 0.9


def test_it_says_why_and_what_came_of_it(model, tmp_path: Path) -> None:
    choice = choose_nodes(model, tmp_path, images(24), 0.995)
    why = choice.reasons["conv2"]
    assert why.startswith("kept float to meet the budget: INT8 here alone takes 0.0")
    assert why.endswith("off the mean cosine; the budget allows 0.005 in all")
    assert row(choice.info, "conv1").why.startswith("INT8 here alone takes ")
    assert choice.info.note.startswith("budget 0.995 met with 1 of ")
    assert "of the FLOPs): mean cosine of every output 0.99" in choice.info.note
    assert choice.info.note.endswith(" on 24 calibration samples")


def test_a_budget_that_int8_meets_costs_one_evaluation(model, tmp_path: Path) -> None:
    info = choose_nodes(model, tmp_path, images(12), 0.5).info
    assert info.met and len(info.tried) == 1 and not info.nodes and not info.measured_on
    assert info.note.startswith("budget 0.5 met by INT8 alone: mean cosine of every output 0.9")


def test_a_budget_beyond_the_float_type_is_not_met(model, tmp_path: Path) -> None:
    choice = choose_nodes(model, tmp_path, images(12), 1.0)
    assert not choice.info.met
    assert choice.info.note.startswith("budget 1 not met; the best set tried has ")
    assert choice.info.note.endswith("; the float type alone does not reach it either")
    best = max(entry.measured for entry in choice.info.tried)
    assert best == max(e.measured for e in choice.info.tried if len(choice.reasons) >= len(e.kept))
    assert choice.reasons


def test_equal_inputs_give_equal_results(model, tmp_path: Path) -> None:
    first = choose_nodes(model, tmp_path / "a", images(24), 0.9999)
    second = choose_nodes(model, tmp_path / "b", images(24), 0.9999)
    assert first == second and len(first.info.tried) > 2


def test_held_out_samples_confirm_the_choice(model, tmp_path: Path) -> None:
    # Twice as wide as what the ranges were taken from: INT8 clips, and the held-out samples lose more.
    wide = dataset(Batch({"x": 2.0 * normal(12, 3, 8, 8, seed=7)}, None))
    alone = choose_nodes(model, tmp_path / "a", images(24), 0.9999)
    choice = choose_nodes(model, tmp_path / "b", images(24), 0.9999, held_out=wide)
    confirmed = [entry for entry in choice.info.tried if entry.data == "confirmed"]
    assert choice.info.met and confirmed[-1].met and not confirmed[0].met
    assert choice.info.confirmed_on == "12 held-out samples"
    assert set(choice.reasons) > set(alone.reasons)
    assert choice.info.note.endswith(" on 12 held-out samples")


def test_a_known_miss_on_held_out_samples_is_not_measured_again(model, tmp_path: Path) -> None:
    choice = choose_nodes(model, tmp_path, images(8), 0.5, held_out=images(8, seed=3), held_out_loss=0.9)
    known = choice.info.tried[1]
    assert (known.kept, known.data, known.measured) == ((), "confirmed", pytest.approx(0.1))
    assert choice.info.met and choice.reasons


def test_more_samples_than_the_choice_takes_confirm_it(model, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(choose, "CHOICE_SAMPLES", 8)
    info = choose_nodes(model, tmp_path, images(20), 0.995).info
    assert (info.chosen_on, info.confirmed_on) == ("8 calibration samples", "20 calibration samples")
    assert info.met and info.tried[-1].data == "confirmed"


def test_with_a_table_the_held_out_samples_serve_for_all(model, tmp_path: Path) -> None:
    info = choose_nodes(model, tmp_path, None, 0.995, held_out=images(8)).info
    assert info.met and (info.chosen_on, info.confirmed_on) == ("8 held-out samples", "")


def test_without_samples_it_says_what_to_give(model, tmp_path: Path) -> None:
    task = model.task(tmp_path, images(4), 0.9)
    bare = type(task)(**{name: getattr(task, name) for name in task.__slots__} | {"calibration": None})
    with pytest.raises(InputError, match="needs samples to judge by") as error:
        choose_float_nodes(bare, lambda _: None)
    assert "--calib" in error.value.fix


def test_the_metric_is_the_criterion_and_ranks(model, tmp_path: Path, metric) -> None:
    def closeness(outputs, reference, feeds):
        error = np.abs(outputs["y"] - reference["y"]).mean() / np.abs(reference["y"]).mean()
        return {"closeness": 1.0 - float(error), "unused": 0.0}

    choice = choose_nodes(model, tmp_path, images(24), 0.93, metric=metric(closeness))
    assert set(choice.reasons) == {"conv2"} and choice.info.met
    assert (choice.info.criterion, choice.info.ranked_by) == ("closeness", "closeness")
    assert "off the closeness" in choice.reasons["conv2"]


def test_a_metric_that_moves_for_few_regions_is_judged_but_does_not_rank(model, tmp_path: Path, metric) -> None:
    def share_close(outputs, reference, feeds):
        errors = np.linalg.norm(outputs["y"] - reference["y"], axis=1)
        return float((errors < 0.1 * np.linalg.norm(reference["y"], axis=1)).mean())

    choice = choose_nodes(model, tmp_path, images(24), 0.98, metric=metric(share_close))
    assert (choice.info.criterion, choice.info.ranked_by) == ("metric", "mean cosine")
    assert choice.info.met and "conv2" in choice.reasons


def test_outputs_that_are_not_finite_meet_no_budget(model, tmp_path: Path) -> None:
    def overflowing(kept):
        graph = copy_graph(model.base)
        weight = graph.tensors()["head_w"]
        weight.values = np.full_like(weight.values, np.inf)
        return graph

    choice = choose_nodes(model, tmp_path, images(8), 0.9, lower=overflowing)
    assert not choice.info.met and {entry.measured for entry in choice.info.tried} == {None}
    assert "mean cosine of every output NaN on 8 calibration samples" in choice.info.note


def test_samples_are_bounded_by_the_calibration_data(model, tmp_path: Path) -> None:
    def measured(count: int) -> int:
        return int(choose_nodes(model, tmp_path / str(count), images(count), 0.995).info.measured_on.split()[0])

    assert [measured(count) for count in (4, 16, 64)] == [1, 2, 14]


def test_samples_that_do_not_fill_a_batch_are_left_out(model, tmp_path: Path) -> None:
    data = dataclasses.replace(images(8), smallest_batch=3)
    info = choose_nodes(model, tmp_path, data, 0.995, batch=BatchRange(3, 3, 3)).info
    assert info.met and info.measured_on == "3 calibration samples"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [([1, 2, 3], [10, 20, 30], 1.0), ([1, 2, 3], [3, 2, 1], -1.0), ([5], [9], 1.0), ([1, 2, 3, 4], [1, 2, 4, 3], 0.8)],
)
def test_spearman(first, second, expected) -> None:
    assert spearman(first, second) == pytest.approx(expected)
