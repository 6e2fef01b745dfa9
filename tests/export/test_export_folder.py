from __future__ import annotations

import json
from pathlib import Path

import pytest
from export_cases import safetensors_bytes, write_folder

from trtforge.errors import InputError
from trtforge.export.folder import check_folder


def refusal(folder: Path, trust: bool = False) -> InputError:
    with pytest.raises(InputError) as caught:
        check_folder(folder, trust)
    return caught.value


def test_a_folder_names_its_class_and_has_a_hash_of_what_decides_the_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    first = check_folder(folder, False)
    assert (first.path, first.architecture, first.pooling) == (folder, "BertModel", None)
    (folder / "README.md").write_text("no part of the model")
    assert check_folder(folder, False).sha256 == first.sha256
    (folder / "model.safetensors").write_bytes(safetensors_bytes(17))
    changed = check_folder(folder, False).sha256
    assert changed != first.sha256
    (folder / "preprocessor_config.json").write_text("{}")
    assert check_folder(folder, False).sha256 != changed


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, None),
        ([], None),
    ],
)
def test_sentence_folders_say_how_they_pool(tmp_path: Path, config: object, pooling: str | None) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "modules.json").write_text("[]")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert check_folder(folder, False).pooling == pooling


def test_the_model_of_a_sentence_folder_may_lie_in_a_subfolder(tmp_path: Path) -> None:
    inner = write_folder(tmp_path / "m" / "0_Transformer")
    (tmp_path / "m" / "modules.json").write_text("[]")
    assert check_folder(tmp_path / "m", False).path == inner


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    error = refusal(tmp_path)
    assert error.what == f"{tmp_path} is not a Hugging Face model folder"
    assert "config.json" in error.why


@pytest.mark.parametrize("config", [{"architectures": []}, {"architectures": None}, {"architectures": [3]}])
def test_a_config_has_to_name_the_class(tmp_path: Path, config: dict[str, object]) -> None:
    assert "names no architecture" in refusal(write_folder(tmp_path / "m", **config)).what


def test_a_config_has_to_be_a_mapping(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text("[1]")
    assert "is no model config" in refusal(folder).what
    (folder / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(folder).what


def test_pickled_weights_are_refused_with_how_to_convert_them(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert "there is no safetensors file" in refusal(folder).why
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    error = refusal(folder)
    assert "only in pytorch_model.bin" in error.what
    assert "save_pretrained" in error.fix


def test_a_truncated_weight_file_is_told_by_its_header(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    whole = safetensors_bytes(64)
    path = folder / "model.safetensors"
    path.write_bytes(whole[:-10])
    assert refusal(folder).what == f"{path} is truncated"
    path.write_bytes(whole + b"x")
    assert refusal(folder).what == f"{path} is damaged"
    path.write_bytes(whole[:20])
    assert "is truncated or no safetensors file" in refusal(folder).what
    path.write_bytes(b"")
    assert "is truncated or no safetensors file" in refusal(folder).what
    path.write_bytes((4).to_bytes(8, "little") + b"[[[[" + bytes(9))
    assert "is no safetensors file" in refusal(folder).what


def test_a_weight_index_names_files_of_the_folder_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "part-1.safetensors"}}))
    check_folder(folder, False)
    index.write_text(json.dumps({"weight_map": {"w": "../m/part-1.safetensors"}}))
    assert "is not a file of the folder" in refusal(folder).why
    index.write_text(json.dumps({"weight_map": {"w": "part-2.safetensors"}}))
    assert "cannot be read" in refusal(folder).what
    index.write_text("{}")
    assert "is no weight index" in refusal(folder).what


def test_adapters_and_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    quantized = refusal(write_folder(tmp_path / "q", quantization_config={"quant_method": "gptq"}))
    assert "quantized already (gptq)" in quantized.what
    adapter = write_folder(tmp_path / "a")
    (adapter / "adapter_config.json").write_text("{}")
    error = refusal(adapter)
    assert "holds an adapter" in error.what
    assert "merge_and_unload" in error.fix


def test_trusted_code_has_to_lie_in_the_folder(tmp_path: Path) -> None:
    for value in ("someone/else--modeling.Net", "modeling.Net"):
        folder = write_folder(tmp_path / "m", architectures=["Net"], auto_map={"AutoModel": value})
        assert "takes the code of Net from elsewhere" in refusal(folder, trust=True).what
    (folder / "modeling.py").write_text("")
    trusted = check_folder(folder, True)
    (folder / "modeling.py").write_text("x = 1")
    assert check_folder(folder, True).sha256 != trusted.sha256
