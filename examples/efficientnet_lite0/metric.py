"""A metric for classifiers without labels: does the built model still choose the same class?

Give it to a build as `--metric metric:top1_agreement` together with `--eval eval.npz`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


def top1_agreement(outputs: Arrays, reference: Arrays, _feeds: Arrays) -> dict[str, float]:
    """Compare the classes chosen by two runs over the same N images from `logits` `[N, C]`.

    Returns:
        top1_agreement: share of images whose largest logit is of the same class in both runs.
    """
    same = outputs["logits"].argmax(axis=1) == reference["logits"].argmax(axis=1)
    return {"top1_agreement": float(np.mean(same))}
