"""Metrics of PP-OCRv4: does the built model find the same text, and does it read the same text?

Give them to a build as `--metric metric:map_iou` (detection) or `--metric metric:text_agreement` (recognition).
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import distribution
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]

# rapidocr's own `thresh`: a pixel above it belongs to text.
TEXT_THRESHOLD = 0.3
BLANK = 0


def get_only_output(outputs: Arrays) -> NDArray[Any]:
    """Return the one output that either model has."""
    (output,) = outputs.values()
    return output


def map_iou(outputs: Arrays, reference: Arrays, _feeds: Arrays) -> dict[str, float]:
    """Compare the text maps of two runs, `[N, 1, H, W]` in [0, 1], cut at 0.3.

    Returns:
        map_iou: pixels that are text in both runs over those that are text in either, all images together.
        worst_image_iou: the least such ratio of one image; 1 where neither run finds text.
    """
    actual, expected = (get_only_output(run) > TEXT_THRESHOLD for run in (outputs, reference))
    axes = tuple(range(1, actual.ndim))
    both, either = (actual & expected).sum(axes), (actual | expected).sum(axes)
    per_image = np.where(either, both / np.maximum(either, 1), 1.0)
    return {
        "map_iou": float(both.sum() / either.sum()) if either.any() else 1.0,
        "worst_image_iou": float(per_image.min()),
    }


@cache
def read_characters() -> tuple[str, ...]:
    """Read the recogniser's characters, class by class, from the metadata of its file; class 0 is the CTC blank."""
    # Found without importing the package, which would load OpenCV.
    path = distribution("rapidocr-onnxruntime").locate_file("rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx")
    metadata = {entry.key: entry.value for entry in onnx.load(str(path)).metadata_props}
    # The list leaves out the blank, which comes first, and the space, which comes last.
    return ("", *metadata["character"].splitlines(), " ")


def decode_greedily(probabilities: NDArray[Any], characters: tuple[str, ...]) -> list[str]:
    """Read text by CTC's greedy rule: best class of each step, repeats merged, blanks dropped.

    Args:
        probabilities: `[N, T, C]`.
        characters: of each class, `[C]`.
    """
    texts = []
    for best in probabilities.argmax(axis=2):
        is_new = np.append(True, best[1:] != best[:-1])
        texts.append("".join(characters[index] for index in best[is_new & (best != BLANK)]))
    return texts


def text_agreement(outputs: Arrays, reference: Arrays, _feeds: Arrays) -> dict[str, float]:
    """Compare the texts read from the probabilities `[N, T, 6625]` of two runs.

    Returns:
        text_agreement: share of images from which both runs read the same text, letter by letter.
    """
    characters = read_characters()
    actual, expected = (decode_greedily(get_only_output(run), characters) for run in (outputs, reference))
    return {"text_agreement": float(np.mean([a == e for a, e in zip(actual, expected, strict=True)]))}
