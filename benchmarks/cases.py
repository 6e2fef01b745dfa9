"""The models that quantizers are compared on: fp32 file, calibration and evaluation data, profile, metric.

All come from `examples/`; what is not committed there is made by the examples' own scripts from installed packages.
"""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scoring import Arrays, Metric

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


class PreparationError(Exception):
    """A model or its data could not be made."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model with all that a comparison needs.

    Attributes:
        title: for the table.
        example: its folder under `examples/`.
        model, calib, eval: paths inside the work folder, or inside `example` where `is_committed`.
        profile: path under the repository.
        metric: a function of the example's `metric.py`, None for top-1 by the labels in the evaluation data.
        scripts: of the example, each with its argument inside the work folder.
    """

    title: str
    example: str
    model: str
    calib: str
    eval: str
    profile: str
    metric: str | None
    scripts: tuple[tuple[str, str], ...] = ()
    is_committed: bool = False

    def locate(self, path: str, folder: Path) -> Path:
        """Return where one of the case's files lies, given the work folder."""
        return (EXAMPLES / self.example if self.is_committed else folder / self.example) / path


def make_ocr_case(title: str, name: str, metric: str) -> Case:
    """Make the case of one of PP-OCR's two models."""
    return Case(
        title=title,
        example="pp_ocr",
        model=f"{name}/{name}.onnx",
        calib=f"{name}/calib.npz",
        eval=f"{name}/eval.npz",
        profile=f"examples/pp_ocr/profiles/{name}.yaml",
        metric=metric,
        scripts=(("make_data.py", "."),),
    )


CASES = {
    "minilm": Case(
        title="MiniLM-L6, sentence encoder",
        example="minilm",
        model="minilm.onnx",
        calib="calib.npz",
        eval="eval.npz",
        profile="profiles/minilm.yaml",
        metric="pooled_cosine",
        scripts=(("export.py", "minilm.onnx"), ("make_data.py", ".")),
    ),
    "digits": Case(
        title="Digits ViT, classifier",
        example="digits_vit",
        model="model.onnx",
        calib="calibration/model.npz",
        eval="eval.npz",
        profile="examples/digits_vit/profiles/model.yaml",
        metric=None,
        is_committed=True,
    ),
    "efficientnet": Case(
        title="EfficientNet-Lite0, classifier",
        example="efficientnet_lite0",
        model="efficientnet_lite0.onnx",
        calib="calib.npz",
        eval="eval.npz",
        profile="examples/efficientnet_lite0/profiles/efficientnet_lite0.yaml",
        metric="top1_agreement",
        scripts=(("export.py", "efficientnet_lite0.onnx"), ("make_data.py", ".")),
    ),
    "ocr-det": make_ocr_case("PP-OCRv4 text detection", "det", "map_iou"),
    "ocr-rec": make_ocr_case("PP-OCRv4 text recognition", "rec", "text_agreement"),
}


def prepare_case(case: Case, folder: Path) -> None:
    """Make the model and the data of a case in the work folder where they are not there yet.

    Raises:
        PreparationError: one of the example's scripts failed.
    """
    if all(case.locate(path, folder).exists() for path in (case.model, case.calib, case.eval)):
        return
    for script, argument in case.scripts:
        command = [sys.executable, str(EXAMPLES / case.example / script), str(case.locate(argument, folder))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip() or "no output").splitlines()[-1]
            raise PreparationError(f"{case.example}/{script}: {reason}")


def score_labels(outputs: Arrays, _reference: Arrays, feeds: Arrays) -> dict[str, float]:
    """Return the share of samples whose largest logit is at their label."""
    (logits,) = outputs.values()
    return {"top1": float(np.mean(logits.argmax(axis=1) == feeds["labels"]))}


def load_metric(case: Case) -> Metric:
    """Load the metric function of a case's example."""
    if case.metric is None:
        return score_labels
    spec = importlib.util.spec_from_file_location(f"{case.example}_metric", EXAMPLES / case.example / "metric.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    metric: Metric = getattr(module, case.metric)
    return metric
