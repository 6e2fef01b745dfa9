"""Small models and folders for the export's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# What a test gives to the command line as `export_models:NAME`, from a folder of its own.
MODELS = """
import torch
from types import SimpleNamespace
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return {"scores": self.down(self.up(x).relu())}


class Baked(Mlp):
    def forward(self, x):
        rows = int(x.shape[0])
        return self.up(x).view(rows, 2, 4).sum(1)


class Different(Mlp):
    def forward(self, x):
        y = self.up(x)
        return y * 1.5 if torch.compiler.is_exporting() else y


class Branching(nn.Module):
    def forward(self, x):
        if x.shape[0] > 3 or x.shape[1] == 1:
            return x * 2
        return x + 1


class Parity(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[1] % 2 == 0 else x + 1


class EvenOnly(Parity):
    def forward(self, x):
        if x.shape[0] % 2:
            raise ValueError("an even batch is needed")
        return super().forward(x)


def mlp():
    return Mlp(), (torch.randn(1, 4),)


def baked():
    return Baked(), {"x": torch.randn(3, 4)}


def different():
    return Different(), (torch.randn(2, 4),)


def branching():
    names = {"x": {0: "batch", 1: "seq"}}
    return SimpleNamespace(module=Branching(), example_inputs=(torch.randn(2, 6, 4),), dynamic_shapes=names)


def parity(module=Parity, length=8):
    names = {"x": {0: "batch", 1: "seq"}}
    return SimpleNamespace(module=module(), example_inputs=(torch.randn(2, length, 4),), dynamic_shapes=names)


def odd_parity():
    return parity(length=7)


def even_only():
    return parity(EvenOnly)
"""


def write_models(folder: Path) -> None:
    """Write the module `export_models` into a folder."""
    (folder / "export_models.py").write_text(MODELS)


def safetensors_bytes(size: int = 16, claimed: int | None = None) -> bytes:
    """A safetensors file with one tensor of `size` bytes, whose header may speak of another size."""
    end = size if claimed is None else claimed
    header = json.dumps({"w": {"dtype": "U8", "shape": [end], "data_offsets": [0, end]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def write_folder(folder: Path, **config: Any) -> Path:
    """A folder with a config and weights that belong to no model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"} | config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes())
    return folder
