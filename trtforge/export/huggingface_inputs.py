"""Which inputs a transformers model takes, in which shapes, and seeded values for them; in the child process only."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtforge.errors import InputError
from trtforge.export.torch_model import BATCH, Dims, ModelInput, Sampler, merge_layout

SEQ = "seq"
SAMPLES = "samples"
FRAMES = "frames"
# Example sizes, and those of the second run.
_FIRST = {BATCH: 2, SEQ: 16, SAMPLES: 16000, FRAMES: 128}
_SECOND = {BATCH: 1, SEQ: 9, SAMPLES: 12000, FRAMES: 96}


@dataclasses.dataclass(frozen=True, slots=True)
class InputPlan:
    """Inputs of a model.

    Attributes:
        inputs: in order.
        sizes: size of every named dim in the example.
        other_sizes: of the second run.
        sample: makes them.
    """

    inputs: tuple[ModelInput, ...]
    sizes: dict[str, int]
    other_sizes: dict[str, int]
    sample: Sampler

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return tuple(item.name for item in self.inputs)


def plan_inputs(
    model: Any,
    config: Any,
    folder: Path,
    layout: Mapping[str, Dims] | None,
    known: Iterable[str] | None,
    supported: str,
) -> InputPlan:
    """The inputs of a model by its main input.

    Args:
        model: the model.
        config: its config.
        folder: where preprocessor_config.json may be.
        layout: the dims of each input that the profile file gives.
        known: inputs that the profile or the data knows; optional ones outside of them are left out.
        supported: what an error lists.

    Raises:
        InputError: another kind of model, or an image size that nothing states.
    """
    parameters = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids" and "pixel_values" in parameters and "inputs_embeds" not in parameters:
        main = "input_ids and pixel_values"
    if main == "input_ids":
        dims = _text_dims(config, parameters, known)
    elif main == "pixel_values":
        dims = {main: _image_dims(config, folder, layout)}
    elif main == "input_values":
        dims = _audio_dims(config, folder, parameters)
    elif main == "input_features":
        dims = {main: _feature_dims(config)}
    else:
        raise InputError(
            f"{type(model).__name__} takes {main}, which is not supported",
            f"supported are {supported}",
            "wrap the model in package.module:function with example inputs",
        )
    inputs = tuple(ModelInput(name, merge_layout(own, layout, name)) for name, own in dims.items())
    sizes: dict[str, int] = {}
    other: dict[str, int] = {}
    for item in inputs:
        for dim, own in zip(item.dims, dims[item.name], strict=True):
            # A dim that the profile opens has no other example than the size that the model's config states.
            if isinstance(dim, str) and dim not in sizes:
                sizes[dim] = _FIRST[own] if isinstance(own, str) else own
                other[dim] = _SECOND[own] if isinstance(own, str) else own
    return InputPlan(inputs, sizes, other, _sampler(config))


def _text_dims(config: Any, parameters: set[str], known: Iterable[str] | None) -> dict[str, Dims]:
    names = ["input_ids"]
    if "attention_mask" in parameters:
        names.append("attention_mask")
    if "token_type_ids" in parameters and (getattr(config, "type_vocab_size", 0) or 0) > 1:
        names.append("token_type_ids")
    if known is not None and "input_ids" in known:
        names = [name for name in names if name in known]
    return dict.fromkeys(names, (BATCH, SEQ))


def _image_dims(config: Any, folder: Path, layout: Mapping[str, Dims] | None) -> Dims:
    vision = getattr(config, "vision_config", config)
    channels: int = getattr(vision, "num_channels", 3)
    size = getattr(vision, "image_size", None) or _preprocessor(folder).get("crop_size")
    size = size or _preprocessor(folder).get("size")
    if isinstance(size, Mapping):
        edge = size.get("shortest_edge")
        size = (size.get("height", edge), size.get("width", edge))
    height, width = size if isinstance(size, (list, tuple)) and len(size) == 2 else (size, size)
    if isinstance(height, int) and isinstance(width, int):
        return (BATCH, channels, height, width)
    given = (layout or {}).get("pixel_values", ())
    if len(given) == 4 and all(isinstance(dim, int) for dim in given[2:]):
        return (BATCH, channels, *given[2:])
    raise InputError(
        f"nothing in {folder} says how large the images are",
        "config.json has no image_size, and there is no preprocessor_config.json with a size",
        f"give a profile with 'inputs: {{pixel_values: [batch, {channels}, 224, 224]}}' and your own sizes",
    )


def _audio_dims(config: Any, folder: Path, parameters: set[str]) -> dict[str, Dims]:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        # A spectrogram of fixed length, as the Audio Spectrogram Transformer takes it.
        return {"input_values": (BATCH, config.max_length, config.num_mel_bins)}
    dims: dict[str, Dims] = {"input_values": (BATCH, SAMPLES)}
    if "attention_mask" in parameters and _preprocessor(folder).get("return_attention_mask"):
        dims["attention_mask"] = (BATCH, SAMPLES)
    return dims


def _feature_dims(config: Any) -> Dims:
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        # Whisper pads every recording to 30 s, and its position table has exactly that length after a stride of 2.
        return (BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    width: int = getattr(config, "input_feat_per_channel", 0) or getattr(config, "feature_projection_input_dim", 80)
    return (BATCH, FRAMES, width)


def _preprocessor(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _sampler(config: Any) -> Sampler:
    text = getattr(config, "text_config", config)
    vocabulary = int(getattr(text, "vocab_size", 2) or 2)
    padding = getattr(text, "pad_token_id", None)

    def sample(shapes: Mapping[str, tuple[int, ...]], seed: int) -> tuple[Tensor, ...]:
        """Right-padded rows of random tokens, segments in halves, and normal values."""
        generator = torch.Generator().manual_seed(seed)
        mask = _mask(next(iter(shapes.values()))) if "attention_mask" in shapes else None
        values = []
        for name, shape in shapes.items():
            if name == "input_ids":
                ids = torch.randint(min(5, vocabulary - 1), vocabulary, shape, generator=generator)
                values.append(ids if mask is None else torch.where(mask.bool(), ids, padding or 0))
            elif name == "attention_mask":
                values.append(_mask(shape))
            elif name == "token_type_ids":
                segments = torch.arange(shape[-1]) >= shape[-1] // 2
                values.append(segments.to(torch.int64).expand(shape).clone())
            else:
                values.append(torch.randn(shape, generator=generator))
        return tuple(values)

    return sample


def _mask(shape: tuple[int, ...]) -> Tensor:
    """`[batch, length]`: the first row is full, each further one shorter by a quarter, but never empty."""
    rows, length = shape[0], shape[1]
    lengths = torch.tensor([max(1, length - (row % 4) * length // 4) for row in range(rows)])
    return (torch.arange(length) < lengths.unsqueeze(1)).to(torch.int64)
