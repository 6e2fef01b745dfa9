"""Inputs and a profile file that the tests of profiles share."""

from __future__ import annotations

from pathlib import Path

from trtforge.profile import ProfileSet
from trtforge.profile_sources import load_profiles
from trtforge.tensor import TensorSpec

BERT = (
    TensorSpec("input_ids", "int64", ("batch", "seq")),
    TensorSpec("attention_mask", "int64", ("batch", "seq")),
)
BERT_YAML = """
dims: {batch: {min: 1, opt: 8, max: 32}, seq: {min: 1, opt: 128, max: 512}}
inputs: {input_ids: [batch, seq], attention_mask: [batch, seq]}
"""
IMAGE = (TensorSpec("x", "float32", ("N", 3, None, None)),)


def load(tmp_path: Path, text: str, specs: tuple[TensorSpec, ...]) -> ProfileSet:
    """The profiles of a file with this text."""
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return load_profiles(path, specs)
