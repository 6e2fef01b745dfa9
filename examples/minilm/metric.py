"""A metric for sentence encoders: does the built model still put the same texts close together?

Give it to a build as `--metric metric:pooled_cosine` together with `--eval eval.npz`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


def pool_hidden(hidden: NDArray[Any], attention_mask: NDArray[Any]) -> NDArray[np.float64]:
    """Average hidden `[N, S, H]` over positions where attention_mask `[N, S]` is 1, scaled to unit length `[N, H]`."""
    # A sum has the mean's direction, and only the direction is used.
    pooled: NDArray[np.float64] = np.einsum("nsh,ns->nh", hidden, attention_mask, dtype=np.float64)
    norm = np.linalg.norm(pooled, axis=1, keepdims=True)
    unit: NDArray[np.float64] = pooled / np.maximum(norm, np.finfo(np.float64).tiny)
    return unit


def find_nearest(unit: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return for each row of unit `[N, H]` the index of the other row with the largest cosine, `[N]`."""
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    nearest: NDArray[np.intp] = similarity.argmax(axis=1)
    return nearest


def pooled_cosine(outputs: Arrays, reference: Arrays, feeds: Arrays) -> dict[str, float]:
    """Compare the sentence embeddings of two runs over the same N samples.

    Args:
        outputs: of the built model; `last_hidden_state` `[N, S, H]` is used.
        reference: the same of the fp32 model.
        feeds: the inputs; `attention_mask` `[N, S]` is used.

    Returns:
        pooled_cosine: mean over samples of the cosine between the two masked-mean pooled vectors.
        nearest_neighbour_agreement: share of samples whose nearest other sample is the same one in both runs.
    """
    mask = feeds["attention_mask"]
    actual = pool_hidden(outputs["last_hidden_state"], mask)
    expected = pool_hidden(reference["last_hidden_state"], mask)
    return {
        "pooled_cosine": float((actual * expected).sum(axis=1).mean()),
        "nearest_neighbour_agreement": float((find_nearest(actual) == find_nearest(expected)).mean()),
    }
