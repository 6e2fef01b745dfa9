"""Which regions are rewritten: the plan decides, and a build says what was done and why not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from encoder import WIDTH, save_encoder, save_profile, save_project
from support import save_onnx

from trtforge import lowering, stages
from trtforge.backends.base import BuildRequest, BuildResult
from trtforge.backends.builder import NativeBuilder
from trtforge.backends.plan import EnginePlan, PlanLayer
from trtforge.backends.registry import select_backend
from trtforge.cli.app import run
from trtforge.describe import check_plugin_layers, describe_fusion, describe_near_misses
from trtforge.errors import BuildError, TrtForgeError
from trtforge.fusing import find_fusions
from trtforge.fusion.lower_attention import LOWERED_TO
from trtforge.fusion.lower_block import BlockReport, LoweredBlock
from trtforge.fusion.match import match_regions
from trtforge.fusion.regions import NearMiss
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.signature import input_specs
from trtforge.limits import DEFAULT_LIMITS
from trtforge.lowering import decide, find_candidates, rewrite, worse_by
from trtforge.manifest import PlanTensor
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.profile_sources import load_profiles
from trtforge.recipe import QuantRecipe
from trtforge.spec import precision_from_name
from trtforge.trials import Trials

FP16, INT8 = precision_from_name("fp16"), precision_from_name("int8")


def plan_of(kernels: int, fused: int = 1, gemms: str = "", unreadable: str | None = None) -> EnginePlan:
    """A plan of so many kernels; `gemms` names the type of each GEMM among them."""

    def layer(name: str, kind: str, dtype: str = "fp16") -> PlanLayer:
        tensors = tuple(PlanTensor(name=side, dtype=dtype, shape=(8, 8)) for side in "ab")
        return PlanLayer(name, kind, "", tensors, (), (), (), ())

    layers = [layer(f"_gemm_mha_v2_{index}", "kgen") for index in range(fused)]
    layers += [layer("g", "gemm", dtype) for dtype in gemms.split()]
    layers += [layer("__myl_Add", "kgen") for _ in range(kernels - len(layers))]
    return EnginePlan(tuple(layers), unreadable)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> gs.Graph:
    """Two attentions of different kinds, one behind the other."""
    folder = tmp_path_factory.mktemp("lowering")
    with OnnxNative() as native:
        loaded = load_model(save_two_kinds(folder / "two.onnx"), DEFAULT_LIMITS)
        return normalise(loaded.graph, native=native, operators="float")[0]


def save_two_kinds(path: Path) -> Path:
    """x [batch, 16, 32] -> y: attention with two heads, then one with four."""

    def attention(name: str, x: str, y: str, heads: int) -> str:
        parts = " ".join(
            f"[{name}_m{r}] {name}_{r}0 = MatMul ({x}, w{r}) {name}_{r}1 = Reshape ({name}_{r}0, heads{heads}) "
            f"{name}_{r} = Transpose <perm = [{'0, 2, 3, 1' if r == 'k' else '0, 2, 1, 3'}]> ({name}_{r}1)"
            for r in "qkv"
        )
        return f"""{parts} {name}_s = MatMul ({name}_q, {name}_k) [{name}] {name}_p = Softmax ({name}_s)
            {name}_c = MatMul ({name}_p, {name}_v) {name}_t = Transpose <perm = [0, 2, 1, 3]> ({name}_c)
            {name}_f = Reshape ({name}_t, flat) [{name}_out] {y} = MatMul ({name}_f, wo)"""

    random = np.random.default_rng(3)
    weights = {f"w{r}": random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 6 for r in "qkvo"}
    shapes = {f"heads{n}": np.array([0, 0, n, WIDTH // n]) for n in (2, 4)} | {"flat": np.array([0, 0, WIDTH])}
    body = attention("one", "x", "h", 2) + attention("two", "h", "y", 4)
    return save_onnx(path, f"g (float[batch, 16, 32] x) => (float[batch, 16, 32] y) {{ {body} }}", **weights, **shapes)


Plans = Callable[[frozenset[str]], EnginePlan | TrtForgeError]


def decision(graph: gs.Graph, plans: Plans, wanted: str | None = None) -> tuple[tuple[str, ...], dict[str, str], int]:
    """The decision with a builder that gives the plans of `plans`, and how often it was asked."""
    asked = []

    def measure(trial: gs.Graph, whole: tuple[str, ...]) -> EnginePlan | TrtForgeError:
        assert sorted(whole) == sorted(node.name for node in trial.nodes if node.op == "Attention")
        asked.append(whole)
        return plans(frozenset(whole))

    found = decide(graph, match_regions(graph).attentions(), wanted, measure)
    return found.lowered, found.kept, len(asked)


def test_all_regions_are_rewritten_where_the_plan_is_not_worse(graph: gs.Graph) -> None:
    found = decision(graph, lambda _: plan_of(10, 2))
    assert found == (("one", "two"), {}, 2)


def test_the_kind_that_costs_kernels_stays(graph: gs.Graph) -> None:
    def plans(whole: frozenset[str]) -> EnginePlan:
        return plan_of(10 - ("one" in whole) + 2 * ("two" in whole), 2)

    lowered, kept, trials = decision(graph, plans)
    assert lowered == ("one",)
    assert kept == {"two": "the plan has 11 kernels with it, 9 without"}
    assert trials == 4


def test_nothing_is_rewritten_where_each_kind_is_worse(graph: gs.Graph) -> None:
    lowered, kept, _ = decision(graph, lambda whole: plan_of(10 + len(whole), 2))
    assert lowered == ()
    assert set(kept.values()) == {"the plan has 11 kernels with it, 10 without"}


def test_no_more_kinds_are_tried_than_the_limit(graph: gs.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "MAX_KINDS", 1)
    lowered, kept, trials = decision(graph, lambda whole: plan_of(10 + ("two" in whole), 2))
    assert (lowered, kept, trials) == (
        ("one",),
        {"two": "it is tried alone only where fewer than 1 kinds have more regions"},
        3,
    )


def test_a_refusal_of_the_builder_is_the_reason(graph: gs.Graph) -> None:
    def plans(whole: frozenset[str]) -> EnginePlan | TrtForgeError:
        return BuildError("it refuses", "there is no kernel", "change it") if "two" in whole else plan_of(9, 2)

    lowered, kept, _ = decision(graph, plans)
    assert (lowered, kept) == (("one",), {"two": "the builder refuses it: there is no kernel"})


@pytest.mark.parametrize(
    ("plain", "why"),
    [
        (BuildError("it refuses", "why", "fix"), "it refuses"),
        (plan_of(0, 0, unreadable="it is cut off"), "it is cut off"),
    ],
)
def test_without_a_plan_to_compare_with_all_stays(graph: gs.Graph, plain: EnginePlan | TrtForgeError, why: str) -> None:
    lowered, kept, trials = decision(graph, lambda _: plain)
    assert (lowered, trials) == ((), 1)
    assert kept == dict.fromkeys(("one", "two"), f"there is no plan to compare with: {why}")


def test_fewer_fused_attentions_are_worse() -> None:
    assert worse_by(plan_of(9, 1), plan_of(9, 2)) == "the plan has 1 fused attentions with it, 2 without"
    assert worse_by(plan_of(9, 2), plan_of(9, 2)) is None


def test_a_gemm_that_leaves_int8_is_worse() -> None:
    plan, plain = plan_of(9, 1, "int8 fp16"), plan_of(9, 1, "int8 int8")
    assert worse_by(plan, plain, "int8") == "1 GEMMs of the plan are not in int8 with it, 0 without"
    assert worse_by(plan, plain) is None


def test_a_recipe_can_forbid_the_rewrite(graph: gs.Graph) -> None:
    recipe = QuantRecipe(exclude=("one_mk", "*_out"))
    found = find_candidates(graph, INT8, recipe)
    assert [region.name for region in found.regions] == ["two"]
    assert found.unfit == {
        "one": "the recipe's pattern 'one_mk' names one of its projections, which would be one product"
    }
    assert len(find_candidates(graph, FP16, recipe).regions) == 2
    quantized = find_candidates(graph, INT8, QuantRecipe(attention=True))
    assert set(quantized.unfit.values()) == {"the recipe quantizes attention's products, and the operator ignores Q/DQ"}


@pytest.mark.parametrize(
    ("mask_type", "reason"), [("", "it has this form already"), ("float", "it has this form already"), ("bool", None)]
)
def test_an_operator_that_was_packed_is_tried_only_for_its_mask(
    mask_type: str, reason: str | None, tmp_path: Path
) -> None:
    sizes = {"heads": np.array([0, 0, 2, WIDTH // 2])} | {f"w{r}": np.eye(WIDTH, dtype=np.float32) for r in "qkv"}
    parts = " ".join(
        f"{r}0 = MatMul (x, w{r}) {r}1 = Reshape ({r}0, heads) {r} = Transpose <perm = [0, 2, 1, 3]> ({r}1)"
        for r in "qkv"
    )
    given, read = (f", {mask_type}[2, 1, 16, 16] mask", ", mask") if mask_type else ("", "")
    body = f"g (float[2, 16, {WIDTH}] x{given}) => (float[2, 2, 16, {WIDTH // 2}] y)"
    body += f" {{ {parts} [own] y = Attention (q, k, v{read}) }}"
    loaded = load_model(save_onnx(tmp_path / "own.onnx", body, **sizes), DEFAULT_LIMITS)
    profiles = trtforge_profiles(loaded.graph)
    with OnnxNative() as native:
        normalised = stages.normalise_source(loaded, FP16, native)
        prepared = stages.prepare(*normalised, profiles, FP16, native)
    assert [done.lowered_to for done in prepared.fused.rewritten] == ["packed"]
    found = find_candidates(prepared.graph, FP16, QuantRecipe())
    assert [region.name for region in found.regions] == (["own"] if reason is None else [])
    assert found.unfit == ({} if reason is None else {"own": reason})
    assert find_fusions(tmp_path / "own.onnx").forms[0].reason == reason


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the encoder and its profile."""
    pytest.importorskip("tensorrt_rtx", reason="the rtx extra is not installed")
    monkeypatch.chdir(tmp_path)
    save_encoder(tmp_path / "encoder.onnx")
    (tmp_path / "profiles").mkdir()
    save_profile(tmp_path / "profiles" / "encoder.yaml")
    return tmp_path


def build(*arguments: str) -> dict[str, object]:
    """The manifest of a build in the working directory."""
    assert run(["build", "encoder.onnx", "--gpu", "sm_86,sm_89,sm_120", "-o", "out", "--force", *arguments]) == 0
    found: dict[str, object] = json.loads(Path("out/manifest.json").read_text())
    return found


def kernels_of(graph: gs.Graph, folder: Path) -> int:
    """Kernels of a float graph, in fp16, as it is."""
    backend = select_backend("tensorrt-rtx")
    profiles = load_profiles(Path("profiles/encoder.yaml"), input_specs(graph), DEFAULT_LIMITS)
    with Trials(backend, backend.target("sm_86"), folder) as trials:
        plan = trials.plan(stages.lower(graph, FP16, None).graph, profiles)
    assert isinstance(plan, EnginePlan)
    return plan.kernels


def test_a_build_fuses_each_attention_and_takes_no_more_kernels(project: Path) -> None:
    manifest = build("--fp16")
    assert manifest["fusion"] == [
        {"region": "qkv", "pattern": "packed_qkv", "lowered_to": "sliced", "reason": None},
        {"region": "softmax", "pattern": "attention", "lowered_to": LOWERED_TO, "reason": None},
    ]
    plan = manifest["plan"]
    assert isinstance(plan, dict)
    (fused,) = [layer for layer in plan["layers"] if layer["name"].startswith("_gemm_mha")]
    assert "softmax" in fused["onnx_nodes"]
    with OnnxNative() as native:
        plain = normalise(load_model(project / "encoder.onnx", DEFAULT_LIMITS).graph, native=native)[0]
    assert plan["kernels"] <= kernels_of(plain, project)


def test_the_engine_of_the_trial_is_not_built_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[BuildRequest] = []

    def count(self: NativeBuilder, request: BuildRequest, *rest: object) -> BuildResult:
        requests.append(request)
        return make(self, request, *rest)  # type: ignore[arg-type]

    make = NativeBuilder.build
    monkeypatch.setattr(NativeBuilder, "build", count)
    manifest = build("--fp16")
    assert [request.whole_attention for request in requests] == [(), ("softmax",)]
    engine = (project / "out" / "model.engine").read_bytes()
    assert manifest["files"]["model.engine"]["bytes"] == len(engine)  # type: ignore[index]
    log = (project / "out" / "build.log").read_text()
    # One builder's table: with the build before it in the log, there would be two.
    assert log.count("node names in this log") == 1
    assert "LayerType: gemm" in log


def test_fp32_stays_as_it_is(project: Path) -> None:
    assert build("--fp32")["fusion"] == []


def test_explain_and_the_report_say_why_a_region_stays(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_two_inputs(project / "encoder.onnx")
    (project / "profiles" / "encoder.yaml").unlink()
    manifest = build("--fp16", "--explain")
    reason = "query, key and value are not projections of one tensor (cross-attention)"
    assert manifest["fusion"] == [
        {"region": "one", "pattern": "attention", "lowered_to": "unchanged", "reason": reason}
    ]
    assert f"one: attention stays as it was, because {reason}" in capsys.readouterr().err
    assert reason in (project / "out" / "report.html").read_text()


def save_two_inputs(path: Path) -> Path:
    """Cross-attention of x with z."""
    folder = path.parent
    save_two_kinds(folder / "two.onnx")
    import onnx

    model = onnx.load(folder / "two.onnx")
    del model.graph.node[[node.name for node in model.graph.node].index("one_out") + 1 :]
    for node in model.graph.node:
        if node.name in ("one_mk", "one_mv"):
            node.input[0] = "z"
    port = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2, 16, WIDTH])
    model.graph.input.append(port)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, [2, 16, WIDTH]))
    onnx.save(model, path)
    return path


def test_an_attention_that_must_be_one_kernel_fails_where_there_is_none(project: Path) -> None:
    """Head size 512 has no fused kernel: the operator is taken apart, unless it is named."""
    path = save_onnx(
        project / "wide.onnx",
        "g (float16[1, 1, 16, 512] q, float16[1, 1, 16, 512] k) => (float16[1, 1, 16, 512] y) "
        "{ [wide] y = Attention (q, k, k) }",
    )
    wide = load_model(path, DEFAULT_LIMITS).graph
    backend = select_backend("tensorrt-rtx")
    profiles = trtforge_profiles(wide)
    with Trials(backend, backend.target("sm_86"), project) as trials:
        apart = trials.plan(wide, profiles)
        whole = trials.plan(wide, profiles, ("wide",))
        again = trials.plan(wide, profiles, ("another",))
    assert isinstance(apart, EnginePlan)
    assert apart.fused_attention == 0
    assert isinstance(whole, BuildError)
    assert whole.diagnosis is not None
    assert whole.diagnosis.cause == "attention-kernel"
    assert isinstance(again, EnginePlan)


def trtforge_profiles(graph: gs.Graph) -> ProfileSet:
    """Profiles of a graph without open dims."""
    shapes = {tensor.name: ShapeRange(*[tuple(tensor.shape)] * 3) for tensor in graph.inputs}
    return ProfileSet((Profile("default", shapes, {}),), "file")


def test_a_cached_decision_is_not_tried_again(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_project(project)
    arguments = ["build", "encoder.onnx", "--gpu", "sm_86", "--cache", "store", "--explain"]
    assert run([*arguments, "--fp16", "-o", "one"]) == 0
    assert "choose fusion: started" in capsys.readouterr().err
    assert run([*arguments, "--fp16", "--budget", "0.99", "-o", "two"]) == 0
    text = capsys.readouterr().err
    assert "choose fusion" not in text
    assert "softmax: attention is now Attention-23" in text
    models = [(project / name / "model.onnx").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]


def test_rewrite_leaves_the_graph_alone(graph: gs.Graph) -> None:
    before = [node.name for node in graph.nodes]
    copy, names = rewrite(graph, match_regions(graph).attentions()[:1])
    assert names == ("one",)
    assert [node.name for node in graph.nodes] == before
    assert {node.op for node in copy.nodes} >= {"Attention", "Softmax"}


def test_int8_takes_at_most_one_kernel_a_block_more(project: Path) -> None:
    save_project(project)
    half = build("--fp16")
    int8 = build("--int8", "--budget", "0")
    assert int8["plan"]["kernels"] <= half["plan"]["kernels"] + 1  # type: ignore[index]
    assert int8["plan"]["gemm"].keys() == {"int8"}  # type: ignore[index]
    assert [entry["lowered_to"] for entry in int8["fusion"]] == ["sliced", LOWERED_TO]  # type: ignore[index, attr-defined]


def test_an_engine_without_the_plugin_layers_that_were_lowered_is_refused() -> None:
    blocks = BlockReport((LoweredBlock("softmax", "AttentionFFN_post_gelu", "softmax"),) * 2, {}, ())
    lowered = stages.Lowered(gs.Graph(), None, None, blocks)
    engine = BuildResult(Path("model.engine"), "0" * 64, plan_of(3), 1.0, "11.4", plugin_layers=1)
    with pytest.raises(BuildError, match="a plugin computes 1 layers of the engine, of 2 blocks made for it"):
        check_plugin_layers(lowered, engine)
    check_plugin_layers(lowered, dataclasses.replace(engine, plugin_layers=2))
    check_plugin_layers(stages.Lowered(gs.Graph(), None, None), engine)


def test_blocks_of_a_plugin_are_in_the_manifest_with_what_stayed(graph: gs.Graph) -> None:
    done = LoweredBlock("softmax", "AttentionFFN_post_gelu", "softmax")
    miss = NearMiss("attention_ffn_block", "two", "two_out", "no FFN reads the attention's result")
    report = BlockReport((done,), {"other": "its heads are 8 wide"}, (miss,))
    prepared = stages.Prepared(graph, None, stages.PackedQkvReport((), ()), {}, {})  # type: ignore[arg-type]
    lowered = stages.Lowered(graph, None, None, report)
    assert [entry.describe() for entry in describe_fusion(prepared, lowered)] == [
        "softmax: attention_ffn_block is now trtforge::AttentionFFN_post_gelu",
        "other: attention_ffn_block stays as it was, because its heads are 8 wide",
    ]
    (entry,) = describe_near_misses(prepared, lowered)
    assert (entry.pattern, entry.node, entry.reason) == (miss.pattern, miss.node, miss.reason)
