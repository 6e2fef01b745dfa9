"""`trtforge calibrate --compare`: sixteen combinations from one pass, each what `quantize` would give."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from encoder import WIDTH, save_encoder, save_profile, save_samples
from support import save_onnx

from trtforge import api
from trtforge.cli.app import run
from trtforge.comparison import METHODS, SMOOTH, WEIGHTS
from trtforge.data import open_dataset
from trtforge.errors import InputError
from trtforge.graph.load import load_model
from trtforge.graph.signature import input_specs
from trtforge.method_table import MethodRow, MethodTable, find_best, measured, recipe_text, vary
from trtforge.parity import OutputParity, ParityAccumulator
from trtforge.progress import Event
from trtforge.recipe import QuantRecipe, load_recipe
from trtforge.reference import ReferenceModel

DIGITS = Path(__file__).parent.parent / "examples" / "digits_vit"
SAMPLES, HELD_OUT = 24, 8
RECIPE = "version: 1\npercentile: 100\n"
METRIC = """
import numpy as np

def distance(outputs, reference, feeds):
    assert "attention_mask" in feeds
    return {"closeness": 1.0 - np.abs(outputs["y"] - reference["y"]).mean(), "other": 1.0}
"""


def save_project(folder: Path) -> Path:
    """A small project with a metric, whose recipe makes the percentile method minmax; returns the model.

    A few channels behind the LayerNormalization are large, so that smoothing has something to win.
    """
    save_samples(folder / "calibration" / "encoder.npz", SAMPLES)
    save_profile(folder / "profiles" / "encoder.yaml")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "closeness_metric.py").write_text(METRIC)
    path = save_encoder(folder / "encoder.onnx")
    model = onnx.load(path)
    gamma = next(tensor for tensor in model.graph.initializer if tensor.name == "gamma")
    values = np.where(np.arange(WIDTH) % 8 == 0, 6.0, 1.0).astype(np.float32)
    gamma.CopyFrom(onnx.numpy_helper.from_array(values, "gamma"))
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MethodTable, list[Event]]:
    """A project, its table, and what was reported on the way."""
    folder = tmp_path_factory.mktemp("compared")
    model = save_project(folder)
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        table = api.compare(model, recipe="recipe.yaml", metric="closeness_metric:distance", report=events.append)
    return folder, table, events


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def row_of(table: MethodTable, method: str, weights: str, smooth: str) -> MethodRow:
    (row,) = [r for r in table.rows if (r.method, r.weights, r.smooth) == (method, weights, smooth)]
    return row


def without_measurements(document: dict[str, Any]) -> dict[str, Any]:
    """What has to repeat exactly."""
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in document["rows"]]
    return {**document, "rows": rows, "pass_seconds": None, "peak_rss_bytes": None}


def test_every_combination_has_a_row(compared: tuple[Path, MethodTable, list[Event]]) -> None:
    _, table, _ = compared
    found = [(row.method, row.weights, row.smooth) for row in table.rows]
    assert found == [(method, weights, smooth) for method in METHODS for weights in WEIGHTS for smooth in SMOOTH]
    assert len(found) == 16
    for row in table.rows:
        assert row.outputs.keys() == {"y"}
        assert 0.99 < row.worst.cosine < 1.0
        assert row.quantized_nodes == 6
        assert (row.smoothed_tensors > 0) == (row.smooth == "auto")
        assert row.metrics["closeness"] < 1.0
    assert len({row.worst.cosine for row in table.rows}) == 12, "minmax and percentile 100 are the same"


def test_conditions_are_recorded(compared: tuple[Path, MethodTable, list[Event]]) -> None:
    folder, table, _ = compared
    assert (table.calibration.samples, table.evaluation.samples) == (SAMPLES - HELD_OUT, HELD_OUT)
    assert table.calibration.sha256 != table.evaluation.sha256
    assert table.model_sha256 == load_model(folder / "encoder.onnx").sha256
    assert table.versions.keys() == {"trtforge", "onnxruntime", "numpy"}
    assert table.tensors == 4
    plain, smoothed = (row_of(table, "mse", "per_channel", smooth).state_bytes for smooth in SMOOTH)
    assert plain >= table.tensors * 4096 * 8, "a histogram per tensor"
    channels = 3 * 32 + 128
    assert smoothed - plain >= 64 * channels * 4, "and a sample of the rows"
    assert table.peak_rss_bytes > 10e6


def test_percentile_100_is_minmax(compared: tuple[Path, MethodTable, list[Event]]) -> None:
    _, table, _ = compared
    for weights in WEIGHTS:
        for smooth in SMOOTH:
            minmax, percentile = (row_of(table, method, weights, smooth) for method in ("minmax", "percentile"))
            assert minmax.outputs == percentile.outputs
            assert minmax.metrics == percentile.metrics


@pytest.mark.parametrize(
    ("method", "weights", "smooth"), [("entropy", "per_tensor", "auto"), ("mse", "per_channel", "none")]
)
def test_a_row_is_what_quantize_gives(
    method: Any, weights: Any, smooth: Any, compared: tuple[Path, MethodTable, list[Event]], tmp_path: Path
) -> None:
    folder, table, _ = compared
    with np.load(folder / "calibration" / "encoder.npz") as file:
        np.savez(tmp_path / "calib.npz", **{name: file[name][:-HELD_OUT] for name in file.files})
        np.savez(tmp_path / "eval.npz", **{name: file[name][-HELD_OUT:] for name in file.files})
    (tmp_path / "recipe.yaml").write_text(recipe_text(vary(measured(QuantRecipe()), method, weights, smooth)))
    model, quantized = folder / "encoder.onnx", tmp_path / "quantized.onnx"
    recipe, calib = str(tmp_path / "recipe.yaml"), str(tmp_path / "calib.npz")
    api.quantize(model, quantized, precision="int8+fp32", calib=calib, recipe=recipe)
    accumulator = ParityAccumulator()
    dataset = open_dataset(tmp_path / "eval.npz", input_specs(load_model(model).graph))
    with ReferenceModel(model, as_written=True) as exact, ReferenceModel(quantized, as_written=True) as candidate:
        for batch in dataset.batches(8):
            accumulator.add(exact.run(batch.feeds), candidate.run(batch.feeds), batch.feeds)
    expected = accumulator.result()["y"]
    row = row_of(table, method, weights, smooth)
    assert row.worst.sqnr_db == pytest.approx(expected.sqnr_db, abs=1e-3)
    assert row.loss == pytest.approx(1.0 - expected.cosine, rel=1e-3)
    others = [r.loss for r in table.rows if (r.method, r.weights, r.smooth) != (method, weights, smooth)]
    assert not any(loss == pytest.approx(row.loss, rel=1e-3) for loss in others)


def test_the_best_row_is_chosen_by_the_first_figure_of_the_metric(
    compared: tuple[Path, MethodTable, list[Event]],
) -> None:
    _, table, _ = compared
    assert table.judged_by == "closeness"
    assert table.best_row.metrics["closeness"] == max(row.metrics["closeness"] for row in table.rows)
    assert table.reference_metrics == {"closeness": 1.0, "other": 1.0}


def test_progress_says_which_combination_it_is_at(compared: tuple[Path, MethodTable, list[Event]]) -> None:
    _, table, events = compared
    shown = [event for event in events if event.stage == "compare"]
    tenth = [(event.done, event.total) for event in shown if event.detail == "10 of 16: entropy, per channel, smoothed"]
    assert set(tenth) == {(9, 16)} and len(tenth) > table.tensors, "it shows life while smoothing is searched"
    assert [event.detail for event in shown[:2]] == ["", "fp32 graph"]
    assert [event.stage for event in events if event.detail == ""][:4] == [
        "load",
        "normalise",
        "specialise",
        "check shapes",
    ]
    assert {event.stage for event in events} == {
        "load",
        "normalise",
        "specialise",
        "check shapes",
        "calibrate",
        "compare",
    }


def test_the_command_saves_a_table_and_a_page_and_repeats(
    compared: tuple[Path, MethodTable, list[Event]], project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = entries(project)
    command = ["calibrate", "encoder.onnx", "--compare", "--data", "calibration/encoder.npz", "--recipe", "recipe.yaml"]
    metric = ["--metric", "closeness_metric:distance"]
    assert run([*command, *metric]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert entries(project) - before == {"build", "build/encoder-methods.json", "build/encoder-methods.html"}
    text = Path("build/encoder-methods.json").read_text()
    document = json.loads(text)
    _, table, _ = compared
    assert without_measurements(document) == without_measurements(table.model_dump(mode="json"))
    assert MethodTable.model_validate_json(text).to_json() == text
    out = captured.out
    assert out.startswith("build/encoder-methods.json\nbuild/encoder-methods.html\n")
    lines = out.splitlines()
    titles = ["method", "weights", "smoothing", "cosine", "1 - cosine", "SQNR", "closeness", "other", "seconds"]
    assert [title.strip() for title in lines[2].split("  ") if title] == [*titles, "memory"]
    best = table.best_row
    (marked,) = [line for line in lines[3:19] if line.lstrip().startswith("*")]
    assert marked.split()[1] == best.method and f"{best.worst.sqnr_db:.1f} dB" in marked
    assert f"* best by closeness, then the worst output's cosine: {best.label}; closeness of fp32 1.0000; other" in out
    assert "measured on 8 samples, the rest in fp32; all ranges come from one pass over 16 samples" in out
    # The snippet is a recipe file.
    snippet = "\n".join(lines[lines.index("recipe of the best, for --recipe FILE:") + 1 :])
    Path("best.yaml").write_text(snippet)
    assert load_recipe("best.yaml") == vary(QuantRecipe(), best.method, best.weights, best.smooth)
    page = Path("build/encoder-methods.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<rect") == 16


def test_an_existing_table_is_not_replaced_and_nothing_runs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m.html").write_text("mine")
    assert run(["calibrate", "encoder.onnx", "--compare", "-o", "m.json", "--calib", "missing.npz"]) == 2
    assert "error: m.html exists" in capsys.readouterr().err
    assert not Path("m.json").exists() and Path("m.html").read_text() == "mine"


def test_one_sample_is_enough_and_json_is_the_document_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_samples(Path("one.npz"), count=1)
    assert run(["calibrate", "encoder.onnx", "--compare", "--calib", "one.npz", "-o", "one.json", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out == Path("one.json").read_text()
    assert captured.err.startswith("warning: only 1 samples: too few to hold any out")
    table = MethodTable.model_validate_json(captured.out)
    assert (table.calibration.samples, table.evaluation.samples, table.judged_by) == (1, 1, "cosine")
    assert table.best_row.loss == min(row.loss for row in table.rows)


def test_evaluation_data_and_its_number_of_samples_can_be_given(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_samples(Path("four.npz"), count=4, seed=1)
    save_samples(Path("eval.npz"), count=6, seed=2)
    command = ["calibrate", "encoder.onnx", "--compare", "--calib", "four.npz", "--eval", "eval.npz"]
    assert run([*command, "--samples", "5", "-o", "t.json", "--json"]) == 0
    table = MethodTable.model_validate_json(capsys.readouterr().out)
    assert (table.calibration.samples, table.evaluation.samples) == (4, 5)
    assert (
        table.calibration.sha256 == open_dataset("four.npz", input_specs(load_model(Path("encoder.onnx")).graph)).sha256
    )


def test_digits_are_judged_by_top1(tmp_path: Path) -> None:
    with np.load(DIGITS / "calibration" / "model.npz") as file:
        np.savez(tmp_path / "calib.npz", **{name: file[name][:4] for name in file.files})
    # Most nodes stay float: searching their smoothing would take a while.
    patterns = ["node_MatMul_1*", "node_MatMul_2*", "node_MatMul_6?", "node_MatMul_7?"]
    (tmp_path / "recipe.yaml").write_text(f"version: 1\nexclude: {patterns}\n")
    table = api.compare(
        DIGITS / "model.onnx",
        samples=32,
        calib=str(tmp_path / "calib.npz"),
        eval=str(DIGITS / "eval.npz"),
        recipe=str(tmp_path / "recipe.yaml"),
    )
    assert len(table.rows) == 16
    assert table.evaluation.samples == 32
    assert (table.judged_by, table.reference_metrics) == ("top1", {"top1": 1.0})
    assert all(row.metrics["top1"] == 1.0 and 0.999 < row.worst.cosine < 1.0 for row in table.rows)
    assert table.best_row.loss == min(row.loss for row in table.rows), "equal metrics are decided by cosine"
    assert "exclude:\n- node_MatMul_1*" in table.best_recipe()


def made_row(cosine: float, top1: float = 0.5, nan: bool = False) -> MethodRow:
    other = OutputParity(cosine=0.9999, cosine_min=0.9, sqnr_db=20.0, max_abs_error=0.1, nan=False)
    outputs = {"a": other, "b": other.model_copy(update={"cosine": cosine, "nan": nan})}
    return MethodRow(
        method="minmax",
        weights="per_channel",
        smooth="none",
        outputs=outputs,
        metrics={"top1": top1},
        quantized_nodes=1,
        smoothed_tensors=0,
        seconds=0.0,
        state_bytes=0,
    )


def test_the_best_has_the_largest_metric_then_cosine_then_comes_first() -> None:
    rows = [made_row(0.99, 0.8), made_row(0.98, 0.9), made_row(0.97, 0.9), made_row(0.98, 0.9)]
    assert find_best(rows, "top1") == 1
    assert find_best(rows, "cosine") == 0
    assert find_best([made_row(0.9999, 1.0, nan=True), made_row(0.1, 0.1)], "top1") == 1


def test_a_row_stands_by_its_worst_output() -> None:
    assert made_row(0.98).worst.cosine == 0.98
    assert made_row(1.0).worst.cosine == 0.9999
    assert made_row(1.0, nan=True).worst.nan and not made_row(1.0, nan=True).is_finite


def test_a_recipe_text_reads_back() -> None:
    recipe = QuantRecipe(method="mse", smooth="auto", exclude=("a*", "b"), percentile=99.0, weight_range="mse")
    text = recipe_text(recipe)
    assert text.startswith("version: 1\nmethod: mse\nweights: per_channel\nsmooth: auto\n")
    assert "percentile" not in text, "mse does not use it"
    assert "percentile: 99.0\n" in recipe_text(recipe.model_copy(update={"method": "percentile"}))


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--compare", "-o", "m.html"], "m.html cannot be the method table"),
        (["--compare", "--samples", "0"], "--samples 0 cannot be used"),
        (["--compare", "--metric", "closeness_metric:nothing"], "'closeness_metric:nothing' cannot be imported"),
        (["--compare", "--calib", "table.json"], "what was found for encoder.onnx is a calibration table already"),
        (["--metric", "closeness_metric:distance"], "--metric has nothing to measure"),
        (["--eval", "eval.npz"], "--eval has nothing to measure"),
        (["--samples", "3"], "--samples has nothing to measure"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    arguments: list[str], what: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "table.json" in arguments:
        assert run(["calibrate", "encoder.onnx", "-o", "table.json"]) == 0
        capsys.readouterr()
    before = entries(project)
    assert run(["calibrate", "encoder.onnx", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and what in captured.err.splitlines()[0]
    assert len(captured.err.splitlines()) == 3
    assert entries(project) == before


def test_a_metric_is_looked_up_before_the_pass(project: Path) -> None:
    events: list[Event] = []
    with pytest.raises(InputError, match="cannot be imported"):
        api.compare("encoder.onnx", metric="closeness_metric:nothing", report=events.append)
    assert "calibrate" not in {event.stage for event in events}


def test_a_model_with_nothing_to_quantize_says_why(tmp_path: Path) -> None:
    model = save_onnx(
        tmp_path / "small.onnx",
        "small (float[batch, 4] x) => (float[batch, 3] y) { [tiny] y = MatMul(x, w) }",
        w=np.ones((4, 3), np.float32),
    )
    np.savez(tmp_path / "data.npz", x=np.ones((20, 4), np.float32))
    with pytest.raises(InputError, match="nothing to quantize") as caught:
        api.compare(model, calib=str(tmp_path / "data.npz"))
    assert "tiny" in caught.value.why


def test_data_of_zeros_is_refused_and_a_constant_input_is_not(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    model = save_onnx(
        tmp_path / "m.onnx",
        """g (float[batch, 32] a, float[batch, 32] b) => (float[batch, 32] y) {
            [left] p = MatMul(a, w)
            [right] q = MatMul(b, v)
            y = Add(p, q)
        }""",
        w=random.normal(size=(32, 32)).astype(np.float32),
        v=random.normal(size=(32, 32)).astype(np.float32),
    )
    zeros, data = np.zeros((40, 32), np.float32), str(tmp_path / "data.npz")
    np.savez(data, a=zeros, b=zeros)
    with pytest.raises(InputError, match="no range can be chosen") as caught:
        api.compare(model, calib=data)
    assert caught.value.why == "each of the 2 activations to quantize was zero in all 32 samples"
    np.savez(data, a=random.normal(size=(40, 32)).astype(np.float32), b=zeros)
    table = api.compare(model, calib=data)
    assert {row.quantized_nodes for row in table.rows} == {1}, "the constant one stays float"
    assert all(0.99 < row.worst.cosine < 1.0 for row in table.rows)


def test_comparing_imports_nothing_into_a_plain_start() -> None:
    import subprocess

    code = (
        "import sys, trtforge.api, trtforge.cli.app; print([m for m in sys.modules if m.startswith('trtforge.comp')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
