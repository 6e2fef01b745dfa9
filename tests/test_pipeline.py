"""The main job, with the real builder and the real ONNX Runtime."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from encoder import WIDTH, save_encoder, save_profile, save_project, save_samples
from support import save_onnx

import trtforge
from trtforge.errors import BuildError, InputError
from trtforge.manifest import load_manifest
from trtforge.progress import Event

FILES = {"model.engine", "model.onnx", "manifest.json", "report.html", "build.log"}


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> trtforge.BuildResult:
    """An INT8 artifact of the encoder, built once for all tests that only look at it."""
    folder = tmp_path_factory.mktemp("int8")
    return trtforge.build(save_project(folder), precision="int8", gpu="sm_86,sm_89", output=folder / "out")


def test_int8_build_leaves_a_whole_artifact_and_nothing_else(int8: trtforge.BuildResult) -> None:
    assert {path.name for path in int8.directory.iterdir()} == FILES | {"calibration.json"}
    assert {path.name for path in int8.directory.parent.iterdir()} == {
        "out",
        "encoder.onnx",
        "calibration",
        "profiles",
    }
    engine = int8.engine.read_bytes()
    assert len(engine) == int8.manifest.files["model.engine"].bytes > 100_000
    assert hashlib.sha256(engine).hexdigest() == int8.manifest.files["model.engine"].sha256
    assert load_manifest(int8.directory) == int8.manifest


def test_int8_comes_from_the_plan(int8: trtforge.BuildResult) -> None:
    precision = int8.manifest.precision
    assert precision.gemm_flops_fraction == {"int8": 1.0}
    assert precision.nodes["int8"] == sum(precision.nodes.values())
    gemms = [layer for layer in int8.manifest.plan.layers if layer.type == "gemm"]
    assert gemms
    assert all(tensor.dtype == "int8" for layer in gemms for tensor in layer.inputs[:2])


def test_attention_stays_fused_and_float_and_says_why(int8: trtforge.BuildResult) -> None:
    assert int8.manifest.plan.fused_attention == 1
    assert set(int8.manifest.precision.attention_flops_fraction) == {"fp16"}
    lowered = {entry.region: entry.lowered_to for entry in int8.manifest.fusion}
    assert lowered == {"qkv": "sliced", "softmax": "Attention-23"}


def test_every_loss_is_measured(int8: trtforge.BuildResult) -> None:
    parity = int8.manifest.parity
    assert parity.verified
    assert parity.passed
    assert parity.candidate == "the built graph in ONNX Runtime, fp16 emulated"
    assert [run.batch for run in parity.batches] == [8, 1]
    assert 0.99 < parity.outputs["y"].cosine < parity.before_qdq["y"].cosine < 1.0
    assert parity.samples == 9  # the last fifth of 48


def test_calibration_does_not_see_the_held_out_samples(int8: trtforge.BuildResult) -> None:
    assert int8.manifest.calibration is not None
    assert int8.manifest.calibration.samples == 39


def test_the_built_graph_keeps_the_interface_of_the_source(int8: trtforge.BuildResult) -> None:
    source = onnx.load(str(int8.directory.parent / "encoder.onnx")).graph
    built = onnx.load(str(int8.directory / "model.onnx")).graph
    for mine, theirs in zip([*built.input, *built.output], [*source.input, *source.output], strict=True):
        assert (mine.name, mine.type.tensor_type.elem_type) == (theirs.name, theirs.type.tensor_type.elem_type)


def test_two_builds_give_equal_files_and_manifests(int8: trtforge.BuildResult, tmp_path: Path) -> None:
    again = trtforge.build(
        int8.directory.parent / "encoder.onnx", precision="int8", gpu="sm_86,sm_89", output=tmp_path / "again"
    )
    assert not again.reused
    for name in ("model.onnx", "calibration.json"):
        assert (again.directory / name).read_bytes() == (int8.directory / name).read_bytes()

    def comparable(result: trtforge.BuildResult) -> dict[str, object]:
        value = result.manifest.model_dump(mode="json", exclude={"timings_s", "environment"})
        del value["files"]["model.engine"]
        return value

    assert comparable(again) == comparable(int8)


def test_an_artifact_from_identical_inputs_is_left_alone(int8: trtforge.BuildResult) -> None:
    before = (int8.directory / "manifest.json").stat().st_mtime_ns
    again = trtforge.build(
        int8.directory.parent / "encoder.onnx", precision="int8", gpu="sm_89,sm_86", output=int8.directory
    )
    assert again.reused
    assert again.passed
    assert (int8.directory / "manifest.json").stat().st_mtime_ns == before


def test_an_artifact_from_other_inputs_needs_force(int8: trtforge.BuildResult, tmp_path: Path) -> None:
    source = save_project(tmp_path)
    first = trtforge.build(source, precision="fp16", output=tmp_path / "out")
    with pytest.raises(InputError, match="made from other inputs") as caught:
        trtforge.build(source, precision="fp32", output=tmp_path / "out")
    assert "--force" in caught.value.fix
    assert load_manifest(tmp_path / "out") == first.manifest
    replaced = trtforge.build(source, precision="fp32", output=tmp_path / "out", force=True)
    assert load_manifest(tmp_path / "out") == replaced.manifest != first.manifest


@pytest.mark.parametrize(
    ("precision", "gemm"),
    [("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("int8+bf16", "int8"), ("int8+fp32", "int8")],
)
def test_every_precision_builds_and_verifies(precision: str, gemm: str, tmp_path: Path) -> None:
    result = trtforge.build(save_project(tmp_path), precision=precision, gpu="sm_86", output=tmp_path / "out")
    assert result.passed
    assert result.manifest.parity.verified
    assert result.manifest.precision.gemm_flops_fraction == {gemm: 1.0}


def test_bf16_says_that_onnxruntime_emulates_it(tmp_path: Path) -> None:
    result = trtforge.build(save_project(tmp_path), precision="bf16", output=tmp_path / "out")
    assert result.manifest.parity.candidate == "the built graph in ONNX Runtime, bf16 emulated"


def test_a_bf16_source_is_emulated_as_reference_and_candidate(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    source = save_onnx(
        tmp_path / "half.onnx",
        """half (float[batch, 32] x) => (float[batch, 16] y) {
            xb = Cast<to = 16>(x) [product] yb = MatMul(xb, w) y = Cast<to = 1>(yb) }""",
        w=random.normal(size=(32, 16)).astype(ml_dtypes.bfloat16),
    )
    np.savez(tmp_path / "data.npz", x=random.normal(size=(40, 32)).astype(np.float32))
    result = trtforge.build(source, precision="fp32", eval=str(tmp_path / "data.npz"), output=tmp_path / "out")
    parity = result.manifest.parity
    assert result.passed and parity.outputs["y"].cosine == 1.0
    assert parity.reference == "the normalised source model in ONNX Runtime, bf16 emulated"
    assert parity.candidate == "the built graph in ONNX Runtime, bf16 emulated"
    again = trtforge.verify_artifact(trtforge.VerifySpec(tmp_path / "out", eval=str(tmp_path / "data.npz")))
    assert (again.reference, again.candidate) == (parity.reference, parity.candidate)


def test_a_missed_budget_fails_keeps_the_artifact_and_names_nodes(tmp_path: Path) -> None:
    source, output = save_project(tmp_path), tmp_path / "out"
    result = trtforge.build(source, precision="int8", budget=0.999999, search=False, output=output)
    assert not result.passed
    assert load_manifest(tmp_path / "out").parity.passed is False
    worst = result.manifest.parity.worst_nodes
    assert {entry.node for entry in worst} <= {"qkv", "qkv_part_1", "qkv_part_2", "out", "up", "down"}
    assert [entry.sqnr_db for entry in worst] == sorted(entry.sqnr_db or 0.0 for entry in worst)
    assert "FAILED" in (tmp_path / "out" / "report.html").read_text()


def test_an_artifact_that_another_metric_judged_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_project(tmp_path)
    monkeypatch.chdir(tmp_path)

    def build() -> trtforge.BuildResult:
        return trtforge.build(source, precision="fp16", metric="changing_metric:figure", output=tmp_path / "out")

    (tmp_path / "changing_metric.py").write_text("def figure(outputs, reference, feeds):\n    return 0.5\n")
    assert not build().reused
    assert build().reused
    (tmp_path / "changing_metric.py").write_text("def figure(outputs, reference, feeds):\n    return 0.25\n")
    with pytest.raises(InputError, match="made from other inputs"):
        build()


def test_labels_give_top1_and_the_users_metric_its_own_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    weight = random.normal(size=(32, 16)).astype(np.float32)
    source = save_onnx(
        tmp_path / "head.onnx",
        "head (float[batch, 32] x) => (float[batch, 16] scores) { [head] scores = MatMul(x, w) }",
        w=weight,
    )
    x = random.normal(size=(40, 32)).astype(np.float32)
    labels = (x @ weight).argmax(axis=1)
    np.savez(tmp_path / "data.npz", x=x, labels=labels)
    (tmp_path / "own.py").write_text(
        "def figure(outputs, reference, feeds):\n"
        "    return {'worst': abs(outputs['scores'] - reference['scores']).max(), 'n': len(feeds['labels'])}\n"
    )
    monkeypatch.chdir(tmp_path)
    result = trtforge.build(source, precision="fp16", calib="data.npz", metric="own:figure", output=tmp_path / "out")
    metrics = result.manifest.parity.metrics
    assert metrics["top1"]["fp32"] == 1.0
    assert metrics["n"] == {"fp32": 8.0, "candidate": 8.0}
    assert metrics["worst"]["fp32"] == 0.0 < metrics["worst"]["candidate"] < 0.1


def test_a_build_without_data_is_marked_not_verified(tmp_path: Path) -> None:
    save_profile(tmp_path / "profiles" / "encoder.yaml")
    source = save_encoder(tmp_path / "encoder.onnx")
    result = trtforge.build(source, precision="fp16", output=tmp_path / "out")
    assert result.passed
    assert not result.manifest.parity.verified
    assert "NOT VERIFIED" in (tmp_path / "out" / "report.html").read_text().upper()
    required = trtforge.build(source, precision="fp16", verify="required", output=tmp_path / "required")
    assert not required.passed
    assert (tmp_path / "required" / "model.engine").exists()


def test_a_calibration_table_replaces_the_data(tmp_path: Path) -> None:
    source = save_project(tmp_path)
    table = trtforge.calibrate(source)
    (tmp_path / "table.json").write_text(table.to_json())
    result = trtforge.build(source, precision="int8", calib=str(tmp_path / "table.json"), output=tmp_path / "out")
    assert result.manifest.precision.gemm_flops_fraction == {"int8": 1.0}
    assert not result.manifest.parity.verified
    assert (tmp_path / "out" / "calibration.json").read_text() == table.to_json()


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    table = trtforge.calibrate(save_project(tmp_path)).model_copy(update={"model_sha256": "0" * 64})
    (tmp_path / "table.json").write_text(table.to_json())
    with pytest.raises(InputError, match="another model"):
        trtforge.build(
            tmp_path / "encoder.onnx", precision="int8", calib=str(tmp_path / "table.json"), output=tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_several_profiles_go_into_one_engine(tmp_path: Path) -> None:
    source = save_project(tmp_path)
    save_profile(
        tmp_path / "profiles" / "encoder.yaml",
        "dims: {batch: {min: 1, opt: 8, max: 16}, seq: {min: 4, opt: 16, max: 32}}\n"
        "inputs: {x: [batch, seq, 32], attention_mask: [batch, seq]}\n"
        "profiles: [{name: short}, {name: long, dims: {seq: {min: 32, opt: 64, max: 128}, batch: 1}}]\n",
    )
    result = trtforge.build(source, precision="fp16", output=tmp_path / "out")
    assert [profile.name for profile in result.manifest.profiles] == ["short", "long"]
    assert result.manifest.profiles[1].inputs["x"].max == (1, 128, WIDTH)


def test_profile_from_the_shapes_of_the_data(tmp_path: Path) -> None:
    save_samples(tmp_path / "calibration" / "encoder.npz")
    result = trtforge.build(save_encoder(tmp_path / "encoder.onnx"), precision="int8", output=tmp_path / "out")
    span = result.manifest.profiles[0].inputs["x"]
    assert (span.min, span.opt, span.max) == ((1, 16, WIDTH), (8, 16, WIDTH), (8, 16, WIDTH))


def test_an_open_dim_prints_the_profile_to_fill_in(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dynamic dimensions without a range") as caught:
        trtforge.build(save_encoder(tmp_path / "encoder.onnx"), precision="fp16", output=tmp_path / "out")
    assert "batch: {min: 1, opt: ?, max: ?}" in caught.value.fix
    assert "attention_mask: [batch, seq]" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h = Relu(x) y = Exp(h)", "--int8 has nothing to quantize in this model; it is built in fp16 as it is"),
        (
            "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) "
            "wd = DequantizeLinear(codes, s, z) y = MatMul(d, wd)",
            "every layer of this model that could be quantized came with Q/DQ; it is built in fp16 as it is",
        ),
    ],
)
def test_int8_builds_a_model_with_nothing_to_quantize_and_says_so(text: str, said: str, tmp_path: Path) -> None:
    weights = {"s": np.float32(0.05), "z": np.int8(0), "codes": np.full((32, 32), 3, np.int8)}
    model = save_onnx(
        tmp_path / "model.onnx",
        f"g (float[batch, 32] x) => (float[batch, 32] y) {{ {text} }}",
        **(weights if "codes" in text else {}),
    )
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32))
    result = trtforge.build(model, precision="int8", calib=str(tmp_path / "data.npz"), output=tmp_path / "out")
    assert result.passed and result.manifest.parity.verified
    assert [warning for warning in result.manifest.warnings if warning.startswith(said)]
    assert result.manifest.calibration is None


def test_int8_without_data_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs calibration data") as caught:
        trtforge.build(save_encoder(tmp_path / "encoder.onnx"), precision="int8", output=tmp_path / "out")
    assert "calibration/encoder.npz" in caught.value.fix
    assert "attention_mask int64 [batch, seq]" in caught.value.fix


@pytest.mark.parametrize("domain", ["", "com.example"])
def test_an_op_that_the_builder_lacks_is_named_with_its_node(domain: str, tmp_path: Path) -> None:
    op = "StringNormalizer" if not domain else f"{domain}.Swirl"
    source = tmp_path / "odd.onnx"
    imports = '"" : 20' + (f', "{domain}" : 1' if domain else "")
    model = onnx.parser.parse_model(
        f"<ir_version: 10, opset_import: [{imports}]>\n"
        f"odd (float[2, 16] x) => (float[2, 16] y) {{ a = Relu(x)  [the_odd_one] y = {op} (a) }}"
    )
    onnx.save(model, str(source))
    with pytest.raises((BuildError, InputError)) as caught:
        trtforge.build(source, precision="fp32", verify="off", output=tmp_path / "out")
    assert "the_odd_one" in str(caught.value)
    assert op.rpartition(".")[2] in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_hostile_names_do_not_reach_the_plan(tmp_path: Path) -> None:
    forged = "a\nName: fake, LayerType: gemm, Inputs: [ { Name: x, Datatype: Int8 }], Metadata: [ONNX Layer: b]"
    source = save_project(tmp_path)
    model = onnx.load(str(source))
    for node in model.graph.node:
        node.name = {"up": forged, "down": "", "out": "scores"}.get(node.name, node.name)
    onnx.save(model, str(source))
    result = trtforge.build(source, precision="fp16", gpu="sm_86", output=tmp_path / "out")
    assert result.manifest.precision.gemm_flops_fraction == {"fp16": 1.0}
    assert not any(layer.name.startswith("fake") for layer in result.manifest.plan.layers)
    covered = {node for layer in result.manifest.plan.layers for node in layer.onnx_nodes}
    assert forged in covered
    assert "" not in covered


def test_an_int8_build_without_any_int8_product_warns(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    source = save_onnx(
        tmp_path / "zero.onnx",
        "zero (float[batch, 32] x) => (float[batch, 16] y) { [only] y = MatMul(x, w) }",
        w=random.normal(size=(32, 16)).astype(np.float32),
    )
    np.savez(tmp_path / "data.npz", x=np.zeros((20, 32), np.float32))
    result = trtforge.build(source, precision="int8", calib=str(tmp_path / "data.npz"), output=tmp_path / "out")
    assert "int8" not in result.manifest.precision.gemm_flops_fraction
    assert "no product runs in INT8" in result.manifest.warnings[0]
    assert "only: calibration saw no non-zero value" in result.manifest.warnings[0]


def test_products_inside_an_if_are_said_to_be_left_out(tmp_path: Path) -> None:
    source = save_onnx(
        tmp_path / "branch.onnx",
        """branch (float[2, 32] x, bool flag) => (float[2, 32] y) {
            h = MatMul (x, w)
            y = If (flag) <
                then_branch = a () => (float[2, 32] s) { [inner] s = MatMul (h, w2) },
                else_branch = b () => (float[2, 32] t) { t = Relu (h) }
            >
        }""",
        w=np.eye(32, dtype=np.float32),
        w2=np.eye(32, dtype=np.float32),
    )
    result = trtforge.build(source, precision="fp16", verify="off", output=tmp_path / "out")
    assert any("If, Loop" in text and "inner" in text for text in result.manifest.warnings)


def test_progress_names_every_stage_in_order(tmp_path: Path) -> None:
    events: list[Event] = []
    trtforge.build(save_project(tmp_path), precision="int8", output=tmp_path / "out", report=events.append)
    stages = list(dict.fromkeys(event.stage for event in events if event.level != "detail"))
    # INT8 graphs are verified before they are built: nodes may have to stay float.
    assert stages == [
        *("load", "normalise", "specialise", "check shapes", "match", "choose fusion"),
        *("calibrate", "round weights", "lower", "verify", "build", "write"),
    ]


def test_quantize_writes_what_build_would_build(int8: trtforge.BuildResult, tmp_path: Path) -> None:
    source = save_project(tmp_path)
    result = trtforge.quantize(source, tmp_path / "q.onnx")
    ops = [node.op_type for node in onnx.load(str(result.model)).graph.node]
    assert ops.count("QuantizeLinear") == 4
    assert set(result.qdq.nodes) == {"qkv", "qkv_part_1", "qkv_part_2", "out", "up", "down"}
    with pytest.raises(InputError, match="exists"):
        trtforge.quantize(source, tmp_path / "q.onnx")


def test_verify_artifact_scores_other_data_and_records_it(tmp_path: Path) -> None:
    source = save_project(tmp_path)
    built = trtforge.build(source, precision="int8", verify="off", output=tmp_path / "out")
    assert not built.manifest.parity.verified
    other = save_samples(tmp_path / "other.npz", count=20, seed=9)
    parity = trtforge.verify_artifact(trtforge.VerifySpec(tmp_path / "out", eval=str(other)))
    assert parity.passed
    assert parity.samples == 20
    assert load_manifest(tmp_path / "out").parity == parity


def test_verify_artifact_refuses_damage_and_another_model(tmp_path: Path) -> None:
    source = save_project(tmp_path)
    trtforge.build(source, precision="fp16", output=tmp_path / "out")
    other = save_encoder(tmp_path / "other.onnx")
    model = onnx.load(str(other))
    model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))
    onnx.save(model, str(other))
    with pytest.raises(InputError, match="not the model that"):
        trtforge.verify_artifact(trtforge.VerifySpec(tmp_path / "out", model=other))
    engine = tmp_path / "out" / "model.engine"
    engine.write_bytes(engine.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="damaged") as caught:
        trtforge.verify_artifact(trtforge.VerifySpec(tmp_path / "out"))
    assert "model.engine" in caught.value.why


def test_manifest_is_plain_json_with_the_contract_keys(int8: trtforge.BuildResult) -> None:
    value = json.loads((int8.directory / "manifest.json").read_text())
    assert value["schema_version"] == 1
    for key in ("model", "backend", "targets", "precision", "fusion", "near_misses", "plan", "profiles", "io"):
        assert key in value
    assert value["files"]["model.engine"]["bytes"] == int8.engine.stat().st_size
    assert value["environment"]["tf32"] is True
