"""Transformer blocks in the ways that people write them in PyTorch, and small models of transformers, as ONNX files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from trtforge.export.folder import check_folder
from trtforge.export.huggingface import load_from_folder
from trtforge.export.trace import trace
from trtforge.export.write import write_onnx

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "silu": functional.silu,
}


class Block(nn.Module):
    """x [B, S, 32], mask [B, S] -> y [B, S, 32].

    Args:
        qkv: "split" (one layer, Split), "three" (three layers), "packed" ([B, S, 3, N, D]) or "interleaved"
            ([B, S, N, 3, D]).
        scale: "sdpa" leaves it to PyTorch; else it stands "before" or "after" the product of query and key.
        mask: "bool", "additive", "fill" (masked_fill of the scores) or "".
        heads, kv_heads: of query, and of key and value.
    """

    def __init__(
        self,
        *,
        qkv: str = "split",
        is_pre: bool = True,
        activation: str = "gelu",
        bias: bool = True,
        scale: str = "sdpa",
        mask: str = "",
        is_causal: bool = False,
        is_rotary: bool = False,
        heads: int = 2,
        kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv_kind, self.is_pre, self.activation = qkv, is_pre, ACTIVATIONS[activation]
        self.scale, self.mask_kind, self.is_causal, self.is_rotary = scale, mask, is_causal, is_rotary
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, 32 // heads
        widths = [32, self.kv_heads * self.size, self.kv_heads * self.size]
        if qkv == "three":
            self.projections = nn.ModuleList(nn.Linear(32, width, bias) for width in widths)
        else:
            self.widths, self.qkv = widths, nn.Linear(32, sum(widths), bias)
        self.out, self.up, self.down = nn.Linear(32, 32, bias), nn.Linear(32, 64, bias), nn.Linear(64, 32, bias)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        for norm in (self.norm1, self.norm2):
            nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """y."""
        if self.is_pre:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.ffn(self.norm2(x))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.ffn(x))

    def ffn(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self._heads(x)
        if self.is_rotary:
            q, k = self._rotated(q), self._rotated(k)
        bias = None if mask is None else self._bias(mask, x.shape[1])
        if self.scale == "sdpa":
            is_grouped = self.kv_heads != self.heads
            found = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=self.is_causal, enable_gqa=is_grouped
            )
        else:
            found = self._plain(q, k, v, bias)
        return self.out(found.transpose(1, 2).reshape(x.shape[0], x.shape[1], 32))

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        before, after = (self.size**-0.5, 1.0) if self.scale == "before" else (1.0, self.size**0.5)
        scores = (q * before) @ k.transpose(-1, -2) / after
        if bias is not None:
            scores = scores.masked_fill(~bias, float("-inf")) if self.mask_kind == "fill" else scores + bias
        return scores.softmax(-1) @ v

    def _heads(self, x: Tensor) -> list[Tensor]:
        batch, seq = x.shape[:2]
        if self.qkv_kind == "three":
            parts = [layer(x) for layer in self.projections]
        elif self.qkv_kind == "split":
            parts = list(self.qkv(x).split(self.widths, -1))
        elif self.qkv_kind == "packed":
            return list(self.qkv(x).reshape(batch, seq, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0))
        else:
            return list(self.qkv(x).reshape(batch, seq, self.heads, 3, self.size).permute(3, 0, 2, 1, 4).unbind(0))
        return [part.view(batch, seq, -1, self.size).transpose(1, 2) for part in parts]

    def _bias(self, mask: Tensor, seq: int) -> Tensor:
        # ONNX Runtime's Attention wants one row for each query.
        rows = mask[:, None, None, :].expand(-1, -1, seq, -1)
        return (1.0 - rows.float()) * -1e4 if self.mask_kind == "additive" else rows != 0

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.size // 2
        steps = torch.tensor([100.0 ** (-i / half) for i in range(half)])
        angles = torch.arange(x.shape[2])[:, None] * steps
        cos, sin = (torch.cat([wave] * 2, -1) for wave in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class EncoderLayer(nn.Module):
    """PyTorch's own layer, which computes attention on [S, B, N * D]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        """y."""
        return self.layer(x)


def export_module(
    module: nn.Module, path: Path, opset: int, *, is_traced: bool = False, has_mask: bool = False
) -> Path:
    """Export x [batch, seq, 32] and maybe mask [batch, seq]; `is_traced` takes the TorchScript exporter."""
    module.eval()
    inputs = (torch.randn(2, 6, 32), *((torch.ones(2, 6, dtype=torch.int64),) if has_mask else ()))
    names = ["x", "mask"][: len(inputs)]
    options: dict[str, Any] = {"opset_version": opset, "input_names": names, "output_names": ["y"], "verbose": False}
    if is_traced:
        axes = {name: {0: "batch", 1: "seq"} for name in names}
        torch.onnx.export(module, inputs, str(path), dynamo=False, dynamic_axes=axes, **options)
    else:
        dims = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        shapes = tuple(dims for _ in inputs)
        torch.onnx.export(module, inputs, str(path), dynamo=True, dynamic_shapes=shapes, external_data=False, **options)
    return path


@dataclasses.dataclass(frozen=True)
class Library:
    """A model class of transformers, tiny and with random weights."""

    make: Callable[[], Any]
    attention: str = "sdpa"


_TEXT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 42,
}
_IMAGE = {key: _TEXT[key] for key in list(_TEXT)[1:5]} | {"image_size": [16, 24], "patch_size": 8}
_t = transformers
LIBRARY: dict[str, Library] = {
    "bert": Library(lambda: _t.BertForSequenceClassification(_t.BertConfig(**_TEXT))),
    "roberta": Library(lambda: _t.RobertaModel(_t.RobertaConfig(**_TEXT, type_vocab_size=1, pad_token_id=1)), "eager"),
    "distilbert": Library(
        lambda: _t.DistilBertModel(
            _t.DistilBertConfig(vocab_size=60, dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=42)
        )
    ),
    "vit": Library(lambda: _t.ViTModel(_t.ViTConfig(**_IMAGE))),
    "deit": Library(lambda: _t.DeiTModel(_t.DeiTConfig(**(_IMAGE | {"image_size": 16}))), "eager"),
    "whisper": Library(
        lambda: _t.WhisperForConditionalGeneration(
            _t.WhisperConfig(
                vocab_size=60,
                d_model=32,
                encoder_layers=2,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=64,
                decoder_ffn_dim=32,
                num_mel_bins=8,
                max_source_positions=20,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            )
        )
    ),
    "gpt2": Library(lambda: _t.GPT2LMHeadModel(_t.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2))),
    "llama": Library(lambda: _t.LlamaForCausalLM(_t.LlamaConfig(**_TEXT, num_key_value_heads=1)), "eager"),
}


def export_library(name: str, folder: Path, opset: int) -> Path:
    """Export a model of `LIBRARY` the way `trtforge export` exports a local folder."""
    entry = LIBRARY[name]
    torch.manual_seed(0)
    model = entry.make()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    model.save_pretrained(folder / name)
    return export_folder(folder / name, folder / f"{name}.onnx", opset, entry.attention)


def export_folder(folder: Path, path: Path, opset: int, attention: str) -> Path:
    """Export a local folder with one of transformers' ways to compute attention."""
    found = check_folder(folder, False)
    loaded = load_from_folder(
        found.path,
        found.architecture,
        pooling=found.pooling,
        trust_remote_code=False,
        layout=None,
        input_names=None,
    )
    for module in loaded.module.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = attention
    program, _ = trace(loaded)
    write_onnx(loaded, program, path, opset)
    return path
