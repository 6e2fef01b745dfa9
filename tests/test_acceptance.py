from __future__ import annotations

from pathlib import Path

import pytest
from support import save_onnx

from trtforge.acceptance import _open_reference
from trtforge.errors import InputError


def test_a_source_that_onnxruntime_cannot_load_in_any_form_is_named(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "odd.onnx", "g (float[4] x) => (float[4] y) { y = Missing(x) }")
    expected = r"neither .*odd\.onnx nor its normalised form(.|\n)*Missing(.|\n)*--no-verify"
    with pytest.raises(InputError, match=expected), _open_reference(path, path, is_emulated=False):
        pass
