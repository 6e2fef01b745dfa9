from __future__ import annotations

from pathlib import Path

import pytest
from support import zip_of

from trtforge.errors import InputError
from trtforge.source import source_kind, source_name


def test_kinds_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bge-small-v1.5"
    folder.mkdir()
    monkeypatch.chdir(folder)
    cases = {
        "model.v2.onnx": ("onnx", "model.v2"),
        "program.pt2": ("program", "program"),
        str(folder): ("folder", "bge-small-v1.5"),
        ".": ("folder", "bge-small-v1.5"),
        "package.module:make_model": ("function", "make_model"),
        "no/such/file": ("onnx", "file"),
        "9module:x": ("onnx", "9module:x"),
        "x" * 5000: ("onnx", "x" * 5000),
    }
    found = {text: (source_kind(Path(text)), source_name(Path(text))) for text in cases}
    assert found == cases


def test_a_file_with_a_colon_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("module:model").write_bytes(b"")
    assert source_kind(Path("module:model")) == "onnx"


@pytest.mark.parametrize(("name", "content"), [("m.pt", b""), ("m.pth", b""), ("m.bin", b"\x80\x02}"), ("m.ckpt", b"")])
def test_checkpoints_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    if content:
        path.write_bytes(content)
    else:
        zip_of(path, {"archive/data.pkl": b"\x80\x02}"})
    with pytest.raises(InputError, match="would have to be unpickled") as caught:
        source_kind(path)
    assert "package.module:function" in caught.value.fix


def test_an_onnx_model_may_be_called_bin(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x08\x0a")
    assert source_kind(tmp_path / "model.bin") == "onnx"


def test_weights_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="holds weights only") as caught:
        source_kind(tmp_path / "model.safetensors")
    assert "config.json" in caught.value.fix
