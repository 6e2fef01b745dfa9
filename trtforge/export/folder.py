"""Check a Hugging Face model folder before any of it is loaded; no torch here.

Only `config.json` and safetensors files are read: nothing is unpickled, and no code of the folder runs unasked.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trtforge.errors import InputError
from trtforge.hashing import fingerprint, sha256_of_file
from trtforge.limits import DEFAULT_LIMITS, Limits
from trtforge.textfile import kind_of, parse_json, read_text

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "tf_model.h5", "flax_model.msgpack")
# Files beside the weights that shape the exported model.
_SETTINGS = (CONFIG, _INDEX, "preprocessor_config.json", "modules.json", "1_Pooling/config.json")
# The safetensors format's own bound on a header, in bytes.
_HEADER_BYTES = 100 * 10**6


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that may be loaded.

    Attributes:
        path: the folder that holds config.json; in a sentence-transformers folder that can be a subfolder.
        architecture: the class that config.json names.
        sha256: over everything that decides the model.
        pooling: "mean" or "cls" where a sentence-transformers folder says so; else None.
    """

    path: Path
    architecture: str
    sha256: str
    pooling: str | None


def check_folder(folder: Path, trust_remote_code: bool, limits: Limits = DEFAULT_LIMITS) -> ModelFolder:
    """Check everything that can be checked without loading the model.

    Raises:
        InputError: no model folder, pickled weights only, damaged weights, or code of its own that is not trusted.
    """
    is_sentence_model = kind_of(folder / "modules.json", "model") == "file"
    inner = folder / "0_Transformer"
    base = inner if is_sentence_model and kind_of(folder / CONFIG, "model") is None else folder
    if kind_of(base / CONFIG, "model") != "file":
        raise InputError(
            f"{folder} is not a Hugging Face model folder",
            f"it has no {CONFIG}",
            "give a folder that save_pretrained wrote, an .onnx file, a .pt2 file or package.module:function",
        )
    config = parse_json(read_text(base / CONFIG, "model config", limits), str(base / CONFIG))
    if not isinstance(config, dict):
        raise InputError(f"{base / CONFIG} is no model config", "it holds no mapping", "download the folder again")
    _refuse_variants(base, config)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"{base / CONFIG} names no architecture",
            "'architectures' says which class and task head the weights are for",
            "save the model with model.save_pretrained(folder)",
        )
    _check_code(base, config, names[0], trust_remote_code)
    weights = _weight_files(base, limits)
    code = sorted(base.glob("*.py")) if trust_remote_code else []
    settings = [root / name for root in {base, folder} for name in _SETTINGS]
    used = sorted({path for path in (*settings, *weights, *code) if path.is_file()})
    digest = fingerprint([[str(path.relative_to(folder)), sha256_of_file(path)] for path in used])
    return ModelFolder(base, names[0], digest, _pooling(folder, limits) if is_sentence_model else None)


def _refuse_variants(base: Path, config: dict[str, Any]) -> None:
    if (base / "adapter_config.json").exists():
        raise InputError(
            f"{base} holds an adapter (LoRA), which is no part of the exported model",
            "its weights are changes to another model's",
            "merge it: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(folder)",
        )
    if isinstance(config.get("quantization_config"), dict):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise InputError(
            f"the weights in {base} are quantized already ({method})",
            "their kernels have no ONNX form; trtforge quantizes the float model itself",
            "give the float model's folder",
        )


def _check_code(base: Path, config: dict[str, Any], architecture: str, trust_remote_code: bool) -> None:
    """Refuse `auto_map` entries that lead elsewhere, whether or not they are trusted."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict) or not trust_remote_code:
        return
    values = [
        entry for value in auto_map.values() for entry in (value if isinstance(value, list) else [value]) if entry
    ]
    for value in values:
        module = str(value).partition(".")[0]
        if "--" in str(value) or not (base / f"{module}.py").is_file():
            raise InputError(
                f"{base} takes the code of {architecture} from elsewhere",
                f"'auto_map' in {CONFIG} names {value!r}, and there is no {module}.py in the folder",
                "download the folder with its code",
            )


def _weight_files(base: Path, limits: Limits) -> list[Path]:
    """The safetensors files, each of them whole."""
    if (base / _WEIGHTS).exists():
        names = [_WEIGHTS]
    elif (base / _INDEX).exists():
        index = parse_json(read_text(base / _INDEX, "weight index", limits), str(base / _INDEX))
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{base / _INDEX} is no weight index", "it has no 'weight_map'", "download it again")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        raise _no_weights(base)
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"{base / _INDEX} names the weight file {name!r}", "it is not a file of the folder", "do not trust it"
            )
        _check_safetensors(base / name)
    return [base / name for name in names]


def _no_weights(base: Path) -> InputError:
    pickled = sorted({path.name for pattern in _PICKLED for path in base.glob(pattern)})
    others = sorted(path.name for path in base.glob("*.safetensors"))
    if pickled:
        return InputError(
            f"{base} has its weights only in {', '.join(pickled[:3])}",
            "unpickling a file runs whatever code it holds, so trtforge reads safetensors only",
            "convert it where you trust the file: AutoModel...from_pretrained(folder).save_pretrained(folder) writes "
            f"{_WEIGHTS}",
        )
    found = f"it has {', '.join(others[:3])}" if others else "there is no safetensors file in it"
    return InputError(f"{base} has no {_WEIGHTS}", found, "save the model with model.save_pretrained(folder)")


def _check_safetensors(path: Path) -> None:
    """Refuse a file whose length is not what its header says."""
    fix = "download it again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_HEADER_BYTES, size - 8):
                raise InputError(f"{path} is truncated or no safetensors file", f"it has {size} bytes", fix)
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except OSError as err:
        raise InputError(f"weights {path} cannot be read", err.strerror or str(err), "check the folder") from err
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as err:
        raise InputError(f"{path} is no safetensors file", "its header is damaged", fix) from err
    if not isinstance(expected, int) or size != expected:
        what = "is truncated" if isinstance(expected, int) and size < expected else "is damaged"
        raise InputError(f"{path} {what}", f"it has {size} bytes; its header speaks of {expected}", fix)


def _pooling(folder: Path, limits: Limits) -> str | None:
    """How a sentence-transformers folder makes one vector of a sentence, where that is mean or first token."""
    path = folder / "1_Pooling" / CONFIG
    if kind_of(path, "pooling config") != "file":
        return None
    config = parse_json(read_text(path, "pooling config", limits), str(path))
    if not isinstance(config, dict):
        return None
    if config.get("pooling_mode") in {"mean", "cls"}:
        return str(config["pooling_mode"])
    modes = {key for key, value in config.items() if key.startswith("pooling_mode_") and value is True}
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    return known.get(next(iter(modes))) if len(modes) == 1 else None
