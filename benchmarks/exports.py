"""Export tiny models of many Hugging Face architectures, and build them: `python exports.py [NAME ...] [--build]`.

Every model is made from its config with random weights and saved as `save_pretrained` does, so nothing is downloaded.
What is shown is trtforge's own answer: the dims that stay open, the largest difference from torch in two runs of other
shapes, and with `--build` the compiled fp16 plan.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers as hf

import trtforge
from trtforge.export.run import ExportRequest, choose_opset, export_model
from trtforge.export_info import ExportInfo
from trtforge.spec import precision_from_name

TEXT = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
CONV = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
PROFILE = "dims: {batch: {min: 1, opt: 2, max: 4}, %s}\n"
OPEN_DIMS = {"seq": "seq: {min: 1, opt: 16, max: 32}", "samples": "samples: {min: 8000, opt: 16000, max: 16000}"}

MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT)),
    "bert-tokens": lambda: hf.BertForTokenClassification(hf.BertConfig(**TEXT)),
    "bert-answers": lambda: hf.BertForQuestionAnswering(hf.BertConfig(**TEXT)),
    "distilbert": lambda: hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(vocab_size=200, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    ),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT, type_vocab_size=1, pad_token_id=1)),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=16)),
    "electra": lambda: hf.ElectraForPreTraining(hf.ElectraConfig(**TEXT, embedding_size=16)),
    "mpnet": lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)),
    "deberta-v2": lambda: hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(
            **TEXT,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_biased_input=False,
            type_vocab_size=0,
            pooler_hidden_size=32,
        )
    ),
    "modernbert": lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**TEXT, pad_token_id=0)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=200, n_embd=32, n_layer=2, n_head=2, n_positions=64)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=1)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT, num_key_value_heads=1)),
    "t5-encoder": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=200, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    ),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, image_size=32, patch_size=8)),
    "yolos": lambda: hf.YolosForObjectDetection(
        hf.YolosConfig(**VISION, image_size=[32, 48], patch_size=8, num_detection_tokens=5)
    ),
    "convnext": lambda: hf.ConvNextForImageClassification(
        hf.ConvNextConfig(hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], image_size=64)
    ),
    "swin": lambda: hf.SwinForImageClassification(
        hf.SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[2, 2], image_size=32, patch_size=4, window_size=4)
    ),
    "segformer": lambda: hf.SegformerForSemanticSegmentation(
        hf.SegformerConfig(
            hidden_sizes=[8, 16, 16, 32],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=16,
            image_size=64,
        )
    ),
    "whisper-encoder": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **LAYERS,
            vocab_size=200,
            d_model=32,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_mel_bins=16,
            max_source_positions=50,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    ),
    "wav2vec2": lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**VISION, **CONV, vocab_size=32)),
    "hubert": lambda: hf.HubertModel(hf.HubertConfig(**VISION, **CONV, vocab_size=32)),
    "ast": lambda: hf.ASTForAudioClassification(hf.ASTConfig(**VISION, max_length=64, num_mel_bins=32)),
}


def export_one(name: str, folder: Path) -> ExportInfo:
    """Make, save and export one model."""
    torch.manual_seed(0)
    MODELS[name]().eval().save_pretrained(folder / name)
    opset, reason = choose_opset(precision_from_name("fp16"))
    request = ExportRequest(folder / name, opset, reason)
    return export_model(request, folder / f"{name}.onnx", lambda *_, **__: None)


def build_one(name: str, folder: Path, info: ExportInfo) -> str:
    """Build an fp16 engine; its kernels, or the reason why there is none."""
    profile = folder / f"{name}.yaml"
    spans = [OPEN_DIMS[dim] for dim in info.dims if dim in OPEN_DIMS]
    profile.write_text(PROFILE % ", ".join(spans))
    try:
        model, output = folder / f"{name}.onnx", folder / f"{name}-engine"
        built = trtforge.build(model, precision="fp16", profile=str(profile), verify="off", output=output)
    except trtforge.TrtForgeError as err:
        return f"not built: {err.what}: {err.why}"
    return f"{built.manifest.plan.kernels} kernels, {built.manifest.plan.fused_attention} fused attention"


def main() -> None:
    """Print one line per model."""
    parser = argparse.ArgumentParser(description="Export tiny models of many architectures.")
    parser.add_argument("names", nargs="*", default=list(MODELS), help="which; all by default")
    parser.add_argument("--build", action="store_true", help="build fp16 engines as well")
    options = parser.parse_args()
    for name in options.names:
        with tempfile.TemporaryDirectory() as work:
            started = time.perf_counter()
            try:
                info = export_one(name, Path(work))
            except trtforge.TrtForgeError as err:
                print(f"{name}: {err.what}: {err.why}", flush=True)
                continue
            errors = [o.max_abs_error or 0.0 for run in info.runs for o in run.outputs.values()]
            dims = ", ".join(f"{dim} {span.min}..{span.max or ''}" for dim, span in info.dims.items())
            verdict = "equal" if info.passed else "DIFFERS"
            seconds = time.perf_counter() - started
            built = f"; {build_one(name, Path(work), info)}" if options.build else ""
            print(
                f"{name}: {info.architecture}, {dims}; {verdict}, off by {max(errors, default=0.0):.0e}; "
                f"{seconds:.0f} s{built}",
                flush=True,
            )


if __name__ == "__main__":
    main()
