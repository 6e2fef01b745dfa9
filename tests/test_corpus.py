"""The script of the corpus: samples, commands, rows, totals and table. No network: the one model is the example's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import corpus  # noqa: E402
from corpus_models import MODELS, Model  # noqa: E402
from corpus_run import (  # noqa: E402
    Files,
    Limits,
    measure_model,
    measure_ranges,
    read_failure,
    read_manifest,
    read_ranges,
    show_row,
)
from corpus_samples import SAMPLES, Draw, Feed, make_draws, noise, write_samples  # noqa: E402
from corpus_table import count_totals, format_report, format_totals, list_failures, list_remedies  # noqa: E402
from process import Measurement  # noqa: E402

DIGITS = ROOT / "examples" / "digits_vit" / "model.onnx"
LIMITS = Limits(timeout_s=300, memory_bytes=8 << 30)


def make_digits(draw: Draw) -> Feed:
    return {"image": noise(draw, draw.batch, 1, 8, 8)}


DIGITS_MODEL = Model("digits==1", "model.onnx", "classifier", make_digits, batches=(1, 3, 4, 8))


def test_every_model_gets_sixteen_samples_and_names_its_origin() -> None:
    real = [model for model in MODELS.values() if model.origin != "synthetic"]
    assert len(real) >= 25
    assert len({model.package for model in real}) >= 15
    for name, model in MODELS.items():
        assert sum(model.batches) == SAMPLES, name
        assert model.origin in ("packaged", "derived", "synthetic"), name
        assert model.base is None or model.base in MODELS, name
        assert ("==" in model.package) == (model.origin != "synthetic"), name
        if model.origin == "packaged":
            assert model.source.endswith(".onnx"), name
        else:
            assert model.source in corpus.MAKERS, name


def test_samples_are_seeded_and_calibration_shares_none_with_evaluation(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_samples("digits", make_digits, (1, 3, 4, 8), tmp_path / folder)
    seen = []
    for split in ("calib", "eval"):
        files = sorted((tmp_path / "a" / split).glob("*.npz"))
        assert [len(np.load(path)["image"]) for path in files] == [1, 3, 4, 8]
        for path in files:
            image = np.load(path)["image"]
            np.testing.assert_array_equal(image, np.load(tmp_path / "b" / split / path.name)["image"])
            seen += [entry.tobytes() for entry in image]
    assert len(set(seen)) == 2 * SAMPLES


def test_a_half_written_split_is_made_again(tmp_path: Path) -> None:
    (tmp_path / ".calib").mkdir()
    (tmp_path / ".calib" / "00.npz").write_bytes(b"half")
    write_samples("digits", make_digits, (16,), tmp_path)
    assert np.load(tmp_path / "calib" / "00.npz")["image"].shape == (16, 1, 8, 8)


@pytest.mark.parametrize(
    "name", ["magika", "minilm", "ppocr-det", "ppocr-rec", "silero-vad", "caustic-nmr", "tashkeel"]
)
def test_feeds_are_finite_and_batched_as_asked(name: str) -> None:
    model = MODELS[name]
    for draw in list(make_draws(name, "eval", model.batches))[:2]:
        feed = model.make(draw)
        assert all(np.isfinite(array).all() for array in feed.values() if array.dtype.kind == "f")
        if len(model.batches) < SAMPLES:
            assert any(array.shape[:1] == (draw.batch,) for array in feed.values())


def test_ranges_of_a_profile_and_of_data(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(
        "dims: {batch: {min: 1, opt: 4, max: 8}}\n"
        "inputs: {'x:0': [batch, 3], rate: []}\n"
        "values: {rate: {min: [8000], opt: [16000], max: [16000]}}\n"
    )
    assert read_ranges(profile) == ["x:0=1x3,4x3,8x3", "rate=-,-,-", "@rate=8000,16000,16000"]
    (tmp_path / "calib").mkdir()
    for i, batch in enumerate((4, 2, 2)):
        np.savez(tmp_path / "calib" / f"{i}.npz", x=np.zeros((batch, 3)), rate=np.array(1))
    assert measure_ranges(tmp_path) == ["x=2x3,2x3,4x3", "rate=-,-,-"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'warning\n{"error": {"what": "refused", "why": "", "fix": "cut", "exit_code": 2}}\n',
            {"what": "refused", "fix": "cut", "exit_code": 2},
        ),
        ("[TRT] [E] Error Code 4: first\n[TRT] [E] second\nlast\n", {"what": "Error Code 4: first"}),
        ("last words\n", {"what": "exit 1: last words"}),
    ],
)
def test_a_failure_is_read_from_the_log(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert read_failure(log, Measurement(1.0, 1, "exit 1: last words")) == expected


def test_accuracy_is_that_of_the_worst_output() -> None:
    outputs = {
        "a": {"cosine": 0.99, "cosine_min": 0.98, "nan": False},
        "b": {"cosine": 0.995, "cosine_min": 0.5, "nan": True},
    }
    row = read_manifest(
        {"parity": {"verified": True, "outputs": outputs}, "precision": {"gemm_flops_fraction": {"int8": 0.75}}}
    )
    assert (row["cosine"], row["cosine_min"], row["nan"], row["int8_gemm_share"]) == (0.99, 0.5, True, 0.75)


@pytest.fixture
def digits_files(tmp_path: Path) -> Files:
    files = Files(DIGITS, tmp_path / "data", tmp_path / "work")
    write_samples("digits", make_digits, DIGITS_MODEL.batches, files.data)
    return files


def test_a_model_is_measured_by_the_commands_of_a_user(digits_files: Files) -> None:
    row = measure_model(DIGITS_MODEL, digits_files, LIMITS, ("fp16", "bare"))
    assert row["fp16"]["built"], row
    assert row["bare"]["built"], row
    assert row["fp16"]["cosine"] > 0.999
    assert (row["opset"], row["samples"], row["origin"]) == (20, "synthetic", "packaged")
    assert not (digits_files.work / "fp16").exists(), "artifacts are not kept"
    assert "fp16 ok" in show_row("digits", row)


def test_where_no_profile_comes_out_each_build_fails_with_its_message(digits_files: Files) -> None:
    for path in (digits_files.data / "calib").glob("*.npz"):
        np.savez(path, wrong=np.zeros((1, 1, 8, 8), np.float32))
    row = measure_model(DIGITS_MODEL, digits_files, LIMITS, ("fp16",))
    assert not row["fp16"]["built"]
    assert "image" in json.dumps(row["fp16"]["failure"])
    assert "fp16 NO" in show_row("digits", row)


ROWS = {
    "one": {
        "package": "p==1",
        "origin": "packaged",
        "kind": "CNN",
        "samples": "natural",
        "opset": 9,
        "fp16": {"built": True, "seconds": 2.0, "cosine": 0.9995, "cosine_min": 0.9, "int8_gemm_share": 0.0},
        "int8": {
            "built": True,
            "seconds": 3.0,
            "cosine": 0.98,
            "cosine_min": 0.7,
            "int8_gemm_share": 0.5,
            "remedies": [{"node": "n", "op": "Conv", "reason": "no kernel", "remedy": "kept in fp16"}],
        },
        "bare": {"built": False, "seconds": 1.0, "failure": {"what": "no\nengine"}},
    },
    "two": {
        "package": "p==1",
        "origin": "derived",
        "kind": "RNN",
        "samples": "synthetic",
        "opset": 7,
        "fp16": {
            "built": False,
            "seconds": 1.0,
            "failure": {"what": "refused", "fix": "cut", "diagnosis": {"op": "Loop", "node": "while"}},
        },
        "bare": {"built": True, "seconds": 1.0},
    },
    "made": {
        "package": "torch",
        "origin": "synthetic",
        "kind": "decoder",
        "samples": "synthetic",
        "opset": 23,
        "bare": {"built": True, "seconds": 1.0},
    },
}


def test_totals_count_built_and_accurate_apart_and_leave_synthetic_models_out() -> None:
    assert count_totals(ROWS) == {
        "fp16": {"models": 2, "built": 1, "accurate": 1},
        "int8": {"models": 1, "built": 1, "accurate": 0},
        "bare": {"models": 2, "built": 1},
    }
    assert format_totals(ROWS).splitlines()[0] == "2 models from 1 packages"
    assert "fp16: builds 1 of 2" in format_totals(ROWS)


def test_failures_name_node_reason_and_remedy() -> None:
    assert list_failures(ROWS) == ["- `one` bare: no engine", "- `two` fp16: Loop while; refused; fix: cut"]
    assert list_remedies(ROWS) == ["- `one` int8: kept in fp16 (`n`, no kernel)"]


def test_the_report_has_a_row_for_each_model() -> None:
    conditions = {
        "date": "d",
        "cpu": "c",
        "cores": 2,
        "load_average_at_start": 0.1,
        "python": "3",
        "versions": {"a": "1"},
    }
    report = format_report({"conditions": conditions, "models": ROWS})
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in report.splitlines() if line.startswith("| ")}
    assert set(rows) == {"model", "--", *ROWS}
    assert "| yes | 2.0 | 0.99950 / 0.90000 | yes | 3.0 | 0.98000 / 0.70000 | 50% | **no** | 1.0 |" in rows["one"]
    assert len({line.count("|") for line in rows.values()}) == 1


def test_a_finished_row_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "rows" / "magika.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps({"fp16": {"built": True}, "bare": {"built": True}}))

    def fail(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(corpus, "prepare_model", fail)
    options = argparse.Namespace(folder=tmp_path, again=False, steps=["fp16", "bare"])
    corpus.run_model("magika", options, LIMITS)
    assert corpus.read_rows(tmp_path)["magika"]["fp16"] == {"built": True}
    with pytest.raises(AssertionError, match="measured again"):
        corpus.run_model("magika", argparse.Namespace(folder=tmp_path, again=True, steps=["fp16"]), LIMITS)


def test_wheels_are_found_by_requirement(tmp_path: Path) -> None:
    (tmp_path / "Resemblyzer-0.1.4-py3-none-any.whl").touch()
    (tmp_path / "silero_vad-6.2.3-py3-none-any.whl").touch()
    assert corpus.find_wheel("resemblyzer==0.1.4", tmp_path) is not None
    assert corpus.find_wheel("silero-vad==6.2.3", tmp_path) is not None
    assert corpus.find_wheel("silero-vad==6.2", tmp_path) is None
