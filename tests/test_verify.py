from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from support import dataset_of, save_onnx

from trtforge.data import Batch, Dataset
from trtforge.errors import InputError, InternalError
from trtforge.parity import meets_budget
from trtforge.reference import ReferenceModel
from trtforge.tensor import TensorSpec
from trtforge.verify import Candidate, Run, Scorer, Scores, find_worst_nodes, plan_runs

NUMBERS = itertools.count()
NODES = {"up": "hidden", "act": "active", "down": "scores"}


def score(
    reference: Path,
    candidates: list[Candidate],
    runs: list[Run],
    metric: str | None,
    work: Path,
    report: Callable[[str], None],
) -> dict[str, Scores]:
    with ReferenceModel(reference, as_written=True) as model:
        scorer = Scorer(model, runs, metric, work, report)
        return {"fp32": scorer.exact, **{candidate.name: scorer.score(candidate) for candidate in candidates}}


def data(count: int, labels: np.ndarray | None = None, stored: int = 7) -> Dataset:
    x = np.random.default_rng(3).normal(size=(count, 4)).astype(np.float32)
    whole = Batch({"x": x}, labels)
    specs = (TensorSpec("x", "float32", ("batch", 4)),)
    return dataset_of(*(whole.rows(i, min(i + stored, count)) for i in range(0, count, stored)), specs=specs)


def altered(model: Path, change: Callable[[onnx.ModelProto], None], name: str = "candidate") -> Candidate:
    """A candidate that is the model with one change."""
    proto = onnx.load(model)
    change(proto)
    path = model.with_name(f"{name}.onnx")
    onnx.save(proto, path)
    return Candidate(name, f"{name} graph", path)


def scale_weight(name: str, factor: float) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        for tensor in proto.graph.initializer:
            if tensor.name == name:
                array = onnx.numpy_helper.to_array(tensor).copy()
                array[:, 0] *= factor
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))

    return change


def same(_: onnx.ModelProto) -> None:
    """No change."""


@pytest.fixture
def metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes `module:measure` with the given body; the arguments are outputs, reference, feeds."""
    monkeypatch.chdir(tmp_path)

    def make(body: str) -> str:
        name = f"metric_module_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(
            f"import numpy as np\ndef measure(outputs, reference, feeds):\n    {body}\n"
        )
        return f"{name}:measure"

    return make


def test_runs_are_all_samples_at_opt_and_a_few_at_the_smallest_batch() -> None:
    dataset = data(40).view(10, 40)
    first, second = plan_runs(dataset, 8, 1)
    assert (first.dataset, first.batch) == (dataset, 8)
    assert (second.dataset.start, second.dataset.stop, second.batch) == (10, 26, 1)
    assert [run.batch for run in plan_runs(dataset, 1, 1)] == [1]


def test_the_small_run_has_at_least_one_batch() -> None:
    (_, small) = plan_runs(data(100), 64, 32)
    assert sum(len(batch) for batch in small.dataset.batches(32)) == 32


def test_an_equal_graph_scores_1_where_graph_optimisation_would_change_the_outputs(tmp_path: Path) -> None:
    model = save_onnx(
        tmp_path / "model.onnx",
        """g (float[batch, 4] x) => (float[batch, 4, 1, 1] y) {
            axes = Constant <value_ints = [2, 3]> ()
            image = Unsqueeze (x, axes)
            far = Conv (image, w, b)
            y = BatchNormalization (far, ones, zeros, mean, ones)
        }""",
        w=np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1) / 1000,
        b=np.full(4, 1e4, np.float32),
        mean=np.full(4, 1e4, np.float32),
        ones=np.ones(4, np.float32),
        zeros=np.zeros(4, np.float32),
    )
    scores = score(model, [altered(model, same)], plan_runs(data(20), 8, 8), None, tmp_path, lambda _: None)
    assert scores["candidate"].batches[0].outputs["y"].cosine == 1.0


def test_scores_of_an_equal_and_of_a_changed_graph(mlp: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    candidates = [altered(mlp, scale_weight("w2", 3.0)), altered(mlp, same, "before_qdq")]
    scores = score(mlp, candidates, plan_runs(data(20), 8, 1), None, tmp_path, notes.append)
    assert list(scores) == ["fp32", "candidate", "before_qdq"]
    assert scores["fp32"].batches == ()
    for name, is_equal in (("candidate", False), ("before_qdq", True)):
        full, small = scores[name].batches
        assert (full.batch, full.samples, small.batch, small.samples) == (8, 20, 1, 16)
        assert meets_budget(full.outputs, 0.9999) == meets_budget(small.outputs, 0.9999) == is_equal
    assert notes[0] == "fp32 reference, batch 8: 8 of 20 samples"
    assert "candidate graph, batch 1: 16 of 16 samples" in notes


def test_samples_counts_those_that_ran(mlp: Path, tmp_path: Path) -> None:
    dataset = dataclasses.replace(data(20), smallest_batch=8)
    scores = score(mlp, [altered(mlp, same)], plan_runs(dataset, 8, 8), None, tmp_path, lambda _: None)
    assert scores["candidate"].batches[0].samples == 16


def test_top1_comes_from_labels(mlp: Path, tmp_path: Path) -> None:
    x = next(data(20).batches(20)).feeds["x"]
    with ReferenceModel(mlp) as model:
        best = model.run({"x": x})["scores"].argmax(1)
    labels = best.copy()
    labels[:5] = (labels[:5] + 1) % 3

    def negate(proto: onnx.ModelProto) -> None:
        for tensor in proto.graph.initializer:
            if tensor.name == "w2":
                tensor.CopyFrom(onnx.numpy_helper.from_array(-onnx.numpy_helper.to_array(tensor), "w2"))

    scores = score(mlp, [altered(mlp, negate)], plan_runs(data(20, labels), 8, 1), None, tmp_path, lambda _: None)
    assert scores["fp32"].metrics == {"top1": 0.75}
    assert scores["candidate"].metrics["top1"] < 0.5


def test_metric_gets_all_samples_of_the_opt_run_and_its_numbers_are_kept(
    mlp: Path, tmp_path: Path, metric: Callable[[str], str]
) -> None:
    body = (
        "assert feeds['x'].shape == (20, 4) and feeds['labels'].shape == (20,); "
        "return {'gap': np.abs(outputs['scores'] - reference['scores']).max(), 'count': len(outputs['scores'])}"
    )
    labels = np.zeros(20, np.int64)
    candidates = [altered(mlp, scale_weight("w2", 2.0))]
    scores = score(mlp, candidates, plan_runs(data(20, labels), 8, 1), metric(body), tmp_path, lambda _: None)
    assert scores["fp32"].metrics["gap"] == 0.0
    assert scores["candidate"].metrics["gap"] > 0.1
    assert scores["candidate"].metrics["count"] == 20.0
    assert "top1" in scores["candidate"].metrics


def test_metric_may_return_one_number(mlp: Path, tmp_path: Path, metric: Callable[[str], str]) -> None:
    scores = score(mlp, [], plan_runs(data(4), 4, 4), metric("return np.float32(0.5)"), tmp_path, lambda _: None)
    assert scores["fp32"].metrics == {"metric": 0.5}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise SystemExit(0)", "the metric function failed\nwhy: SystemExit: 0"),
        ("raise KeyError('pooled')", "the metric function failed\nwhy: KeyError: 'pooled'"),
        ("return 'good'", "the metric function failed\nwhy: ValueError"),
        ("return {'a': [1, 2]}", "the metric function failed\nwhy: TypeError"),
        ("return None", "the metric function failed\nwhy: TypeError"),
        ("return float('nan')", "returned NaN or Inf"),
        ("return {'a': 1.0, 'b': -np.inf}", "returned NaN or Inf"),
    ],
)
def test_a_metric_that_gives_no_finite_numbers_is_refused(
    mlp: Path, tmp_path: Path, metric: Callable[[str], str], body: str, text: str
) -> None:
    with pytest.raises(InputError) as caught:
        score(mlp, [], plan_runs(data(4), 4, 4), metric(body), tmp_path, lambda _: None)
    assert text in str(caught.value)
    assert caught.value.fix


def test_a_metric_that_is_not_there_is_refused_before_anything_runs(mlp: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    with pytest.raises(InputError, match="metric 'nothing:f' cannot be imported"):
        score(mlp, [], plan_runs(data(4), 4, 4), "nothing:f", tmp_path, notes.append)
    assert notes == []


def test_a_metric_needs_batches_of_one_shape(tmp_path: Path, metric: Callable[[str], str]) -> None:
    path = save_onnx(tmp_path / "m.onnx", "g (float[b, n] x) => (float[b, n] y) { y = Relu(x) }")
    batches = [Batch({"x": np.ones((2, n), np.float32)}, None) for n in (3, 4)]
    dataset = dataset_of(*batches, specs=(TensorSpec("x", "float32", ("b", "n")),))
    with pytest.raises(InputError, match="--metric needs batches of one shape"):
        score(path, [], plan_runs(dataset, 2, 2), metric("return 1"), tmp_path, lambda _: None)
    candidates = [Candidate("candidate", "built", path)]
    scores = score(path, candidates, plan_runs(dataset, 2, 2), None, tmp_path, lambda _: None)
    assert scores["candidate"].batches[0].outputs["y"].cosine == 1.0


def test_a_metric_takes_scalar_outputs_one_per_batch(tmp_path: Path, metric: Callable[[str], str]) -> None:
    path = save_onnx(tmp_path / "m.onnx", "g (float[b] x) => (float y) { y = ReduceMax<keepdims = 0>(x) }")
    dataset = dataset_of(
        Batch({"x": np.arange(6, dtype=np.float32)}, None), specs=(TensorSpec("x", "float32", ("b",)),)
    )
    body = "return outputs['y'].sum()"
    scores = score(path, [], plan_runs(dataset, 2, 2), metric(body), tmp_path, lambda _: None)
    assert scores["fp32"].metrics == {"metric": 1.0 + 3.0 + 5.0}


def test_a_graph_with_a_batch_size_baked_in_shows_at_batch_1(tmp_path: Path) -> None:
    text = "g (float[b, 4] x) => (float[p, 4] y) { y = Reshape(x, s) }"
    path = save_onnx(tmp_path / "m.onnx", text, s=np.array([0, 4]))
    broken = save_onnx(tmp_path / "broken.onnx", text, s=np.array([8, 4]))
    candidates = [Candidate("candidate", "built", broken)]
    with pytest.raises(InputError, match=r"ONNX Runtime cannot run the model on x \[1, 4\]"):
        score(path, candidates, plan_runs(data(16), 8, 1), None, tmp_path, lambda _: None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("g (float[batch, 4] x) => (float[b, 1] scores) { scores = ReduceSum(x, axis) }", "has shape (4, 1)"),
        ("g (float[batch, 4] x) => (float[b, 1] other) { other = ReduceSum(x, axis) }", "scores"),
    ],
)
def test_outputs_that_a_pass_changed_are_a_defect(mlp: Path, tmp_path: Path, text: str, why: str) -> None:
    path = save_onnx(tmp_path / "c.onnx", text, axis=np.array([1]))
    candidates = [Candidate("candidate", "built graph", path)]
    with pytest.raises(InternalError, match="the built graph does not match the source model") as caught:
        score(mlp, candidates, plan_runs(data(4), 4, 4), None, tmp_path, lambda _: None)
    assert why in caught.value.why


def test_the_broken_node_is_named_first_and_equal_ones_are_not(mlp: Path) -> None:
    broken = altered(mlp, scale_weight("w2", 1.5))
    (worst,) = find_worst_nodes(mlp, broken.path, NODES, data(20), 8)
    assert worst.node == "down"
    assert worst.sqnr_db is not None
    assert 0 < worst.sqnr_db < 30


def test_nodes_are_ranked_worst_first_with_those_that_overflow_at_the_top(mlp: Path) -> None:
    def overflow(proto: onnx.ModelProto) -> None:
        scale_weight("w1", 1.001)(proto)
        scale_weight("w2", math.inf)(proto)

    worst = find_worst_nodes(mlp, altered(mlp, overflow).path, NODES, data(20), 8)
    assert (worst[0].node, worst[0].sqnr_db) == ("down", None)
    assert {entry.node for entry in worst} == {"down", "up", "act"}


def test_the_search_for_the_worst_nodes_fills_the_smallest_batch(mlp: Path) -> None:
    dataset = dataclasses.replace(data(40), smallest_batch=16)
    (worst,) = find_worst_nodes(mlp, altered(mlp, scale_weight("w2", 1.5)).path, NODES, dataset, 16)
    assert worst.node == "down"


def squeezing(path: Path, operator: str) -> Path:
    return save_onnx(path, f"g (float[batch, 4] x) => (float[batch, n] y) {{ a = Relu(x) y = {operator} }}")


def test_a_batch_of_one_that_the_source_squeezes_away_is_no_difference(tmp_path: Path) -> None:
    source = squeezing(tmp_path / "source.onnx", "Squeeze(a)")
    built = Candidate("candidate", "built graph", squeezing(tmp_path / "built.onnx", "Identity(a)"))
    found = score(source, [built], plan_runs(data(8), 4, 1), None, tmp_path, print)["candidate"]
    assert [batch.outputs["y"].cosine for batch in found.batches] == [1.0, 1.0]
    # The other way round it is one: the built graph has lost an axis.
    built = Candidate("candidate", "built graph", source)
    with pytest.raises(InternalError, match="does not match the source model"):
        score(
            squeezing(tmp_path / "whole.onnx", "Identity(a)"), [built], plan_runs(data(8), 4, 1), None, tmp_path, print
        )
