"""`trtforge package`: what it writes, prints and refuses. The engines here are a few bytes that nothing runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_checks import Watch
from google.protobuf import text_format
from packaging_cases import ABSENT, BATCHES, DYNAMIC, SHAPES, Case, make_artifact, one_profile, span
from support import make_manifest
from tritonclient.grpc import model_config_pb2

from trtforge.errors import InputError
from trtforge.manifest import BackendInfo, EngineInfo, IoInfo, ModelInfo, ParityInfo, ProfileInfo
from trtforge.packaging import PackageSpec, package
from trtforge.serving.model_file import load_model_file
from trtforge.serving.names import model_names
from trtforge.serving.repository import load_repository

TENSORRT = BackendInfo(name="tensorrt", version="10.7.0.23")
FAILED = ParityInfo(reference="fp32", candidate="c", verified=True, passed=False, budget=0.99)
PASSED = FAILED.model_copy(update={"passed": True})


def config_at(folder: Path) -> Any:
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_cpu_package_holds_the_graph_and_the_code_that_runs_it(watch: Watch) -> None:
    manifest = make_artifact(watch.folder / "a", parity=PASSED)
    code, out, err = watch.run(["package", "a", "--triton", "models", "--cpu"])
    assert (code, err) == (0, "")
    assert "models/m\n" in out
    assert "max_batch_size 8: profile 'default' takes at most 8" in out
    assert "serve it: trtforge triton serve models" in out
    folder = watch.folder / "models/m"
    assert {"config.pbtxt", "1/model.py", "1/model.json", "1/model.onnx", "warmup/profile0_opt_0"} <= files_below(
        folder
    )
    assert "1/model.engine" not in files_below(folder)
    assert (folder / "1/model.onnx").read_bytes() == (watch.folder / "a/model.onnx").read_bytes()
    (model,) = load_repository(watch.folder / "models").models
    assert (model.kind, model.artifact_sha256, model.max_batch_size) == ("onnxruntime", manifest.inputs_sha256, 8)
    assert not model.needs_gpu
    described = load_model_file(folder / "1/model.json")
    assert [port.shape for port in described.inputs] == [(-1, 4)]
    assert described.profiles == manifest.profiles


def test_a_tensorrt_package_holds_the_plan_for_the_release_that_loads_it(watch: Watch) -> None:
    make_artifact(watch.folder / "a", backend=TENSORRT, targets=("sm_90",), parity=PASSED)
    code, out, err = watch.run(["package", "a", "--triton", "models", "--gpus", "0,1", "--instances", "2", "--json"])
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["models"][0]["triton"], result["models"][0]["backend_version"]) == ("24.12", "10.7.0.23")
    assert result["notes"] == ["m loads in Triton 24.12 (TensorRT 10.7.0.23) only"]
    folder = watch.folder / "models/m"
    assert (folder / "1/model.plan").read_bytes() == b"engine"
    assert not (folder / "1/model.py").exists()
    config = config_at(folder)
    assert config.backend == "tensorrt"
    assert (config.instance_group[0].count, list(config.instance_group[0].gpus)) == (2, [0, 1])


def test_a_rtx_package_holds_the_engine_the_runtime_and_the_exact_version(watch: Watch) -> None:
    make_artifact(watch.folder / "a", backend=BackendInfo(name="tensorrt-rtx", version="1.7.1.116"), parity=PASSED)
    code, out, _ = watch.run(["package", "a", "--triton", "models"])
    assert code == 0
    folder = watch.folder / "models/m"
    assert (folder / "1/model.engine").read_bytes() == b"engine"
    assert "tensorrt-rtx-cu13==1.7.1.116\n" in (folder / "1/requirements.txt").read_text()
    assert "TensorRT-RTX 1.7.1.116" in out
    assert "1/model.onnx" not in files_below(folder)
    assert config_at(folder).backend == "python"
    (model,) = load_repository(watch.folder / "models").models
    assert model.needs_gpu


def test_a_rtx_package_with_bfloat16_asks_for_what_reads_it(watch: Watch) -> None:
    case = Case("bf16 (bfloat16[batch,4] x) => (bfloat16[batch,4] y) { y = Identity(x) }")
    make_artifact(watch.folder / "a", case, parity=PASSED)
    assert watch.run(["package", "a", "--triton", "models"])[0] == 0
    assert "ml_dtypes\n" in (watch.folder / "models/m/1/requirements.txt").read_text()


def test_a_rtx_package_from_onnx_holds_the_graph_and_the_command(watch: Watch) -> None:
    make_artifact(watch.folder / "a", backend=BackendInfo(name="tensorrt-rtx", version="1.7.1.116"), parity=PASSED)
    code, out, _ = watch.run(["package", "a", "--triton", "models", "--from-onnx"])
    assert code == 0
    folder = watch.folder / "models/m"
    assert {"1/model.onnx", "1/build_engine.py"} <= files_below(folder)
    assert "1/model.engine" not in files_below(folder)
    assert "python3 models/m/1/build_engine.py" in out


def test_the_same_again_is_told_and_left(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    arguments = ["package", "a", "--triton", "models", "--cpu"]
    assert watch.run(arguments)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (watch.folder / "models").rglob("*")}
    code, out, _ = watch.run(arguments)
    assert code == 0
    assert "models/m  (already there)" in out
    assert {path: path.stat().st_mtime_ns for path in (watch.folder / "models").rglob("*")} == before
    assert json.loads(watch.run([*arguments, "--json"])[1])["models"][0]["written"] is False


def test_a_name_that_is_taken_needs_force(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    watch.run(["package", "a", "--triton", "models", "--cpu"])
    other = ["package", "a", "--triton", "models", "--cpu", "--max-batch", "2"]
    assert "holds another model or configuration" in watch.refusal(other)
    assert config_at(watch.folder / "models/m").max_batch_size == 8
    assert watch.run([*other, "--force"])[0] == 0
    assert config_at(watch.folder / "models/m").max_batch_size == 2
    assert watch.run([*other, "--name", "second"])[0] == 0
    assert [model.name for model in load_repository(watch.folder / "models").models] == ["m", "second"]


def test_a_damaged_artifact_is_refused_even_with_force(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    (watch.folder / "a/model.onnx").write_bytes(b"other")
    err = watch.refusal(["package", "a", "--triton", "models", "--cpu", "--force"])
    assert "a is damaged: model.onnx is not what the manifest says" in err


def test_an_artifact_that_missed_its_budget_needs_force(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=FAILED)
    arguments = ["package", "a", "--triton", "models", "--cpu"]
    assert "a missed its accuracy budget of 0.99" in watch.refusal(arguments)
    code, _, err = watch.run([*arguments, "--force"])
    assert code == 0
    assert "missed its accuracy budget and is packaged by --force" in err


def test_an_artifact_that_nothing_verified_is_told(watch: Watch) -> None:
    make_artifact(watch.folder / "a")
    code, _, err = watch.run(["package", "a", "--triton", "models", "--cpu"])
    assert code == 0
    assert err.startswith("warning: the accuracy of a was not verified")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "../up"], "--name '../up' cannot be used"),
        (["--gpus", "0"], "--gpus cannot be used with --cpu"),
        (["--from-onnx"], "--from-onnx cannot be used with --cpu"),
        (["--max-batch", "9"], "--max-batch 9 is more than the engine takes"),
        (["--preferred", "4,16"], "a preferred batch size of 16 cannot be had"),
        (["--preferred", "4,,8"], "--preferred '4,,8' cannot be used"),
        (["--preferred", "4,4"], "--preferred '4,4' cannot be used"),
        (["--preferred", "4,04"], "--preferred '4,04' cannot be used"),
        (["--queue-delay", str(2**31)], f"--queue-delay {2**31} cannot be used"),
        (["--instances", str(2**31)], f"--instances {2**31} cannot be used"),
        (["--threads", str(2**31)], f"--threads {2**31} cannot be used"),
        (["--gpus", f"0,{2**31}"], f"--gpus {2**31} cannot be used"),
        (["--priority-levels", str(2**31)], f"--priority-levels {2**31} cannot be used"),
        (["--queue-timeout", str(2**31)], f"--queue-timeout {2**31} cannot be used"),
        (["--queue-size", str(2**31)], f"--queue-size {2**31} cannot be used"),
        (["--versions", str(2**31)], f"--versions {2**31} cannot be used"),
        (["--version-number", str(2**70)], f"--version-number {2**70} cannot be used"),
        (["--buckets", "16,32"], "--buckets needs --tokenizer"),
        (["--truncate"], "--truncate needs --tokenizer"),
        (["--tokenizer", "missing"], "m cannot be served with a tokenizer"),
    ],
)
def test_options_that_do_not_fit_are_refused(watch: Watch, options: list[str], message: str) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    assert message in watch.refusal(["package", "a", "--triton", "models", "--cpu", *options])


def test_options_of_a_batch_need_a_batch_dim(watch: Watch) -> None:
    make_artifact(watch.folder / "a", ABSENT, parity=PASSED)
    base = ["package", "a", "--triton", "models", "--cpu"]
    assert "--max-batch 4 cannot be had: the model has no batch dim" in watch.refusal([*base, "--max-batch", "4"])
    assert "the model has no batch dim" in watch.refusal([*base, "--preferred", "4"])
    code, out, _ = watch.run(base)
    assert code == 0
    assert "max_batch_size 0: output 'y' differs" in out


def test_threads_are_for_the_cpu(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    assert "--threads is for --cpu" in watch.refusal(["package", "a", "--triton", "models", "--threads", "2"])
    assert watch.run(["package", "a", "--triton", "models", "--cpu", "--threads", "2"])[0] == 0
    assert config_at(watch.folder / "models/m").parameters["threads"].string_value == "2"


def test_from_onnx_is_for_tensorrt_rtx(watch: Watch) -> None:
    make_artifact(watch.folder / "a", backend=TENSORRT, parity=PASSED)
    err = watch.refusal(["package", "a", "--triton", "models", "--from-onnx"])
    assert "it was built with tensorrt; the option is for tensorrt-rtx" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--triton-version", "24.08"], "Triton 24.08 cannot load the engine: it has TensorRT 10.3.0.26"),
        (["--triton-version", "99.01"], "the TensorRT version of Triton 99.01 is not known"),
    ],
)
def test_a_release_with_another_tensorrt_is_refused(watch: Watch, options: list[str], message: str) -> None:
    make_artifact(watch.folder / "a", backend=TENSORRT, parity=PASSED)
    assert message in watch.refusal(["package", "a", "--triton", "models", *options])


def test_an_engine_of_an_unknown_tensorrt_takes_the_release_that_the_user_states(watch: Watch) -> None:
    backend = BackendInfo(name="tensorrt", version="11.4.1.5")
    make_artifact(watch.folder / "a", backend=backend, parity=PASSED)
    base = ["package", "a", "--triton", "models"]
    assert "no release of Triton is known that has TensorRT 11.4.1.5" in watch.refusal(base)
    assert watch.run([*base, "--triton-version", "30.01=11.4.1.5"])[0] == 0
    assert load_repository(watch.folder / "models").models[0].triton == "30.01"


def test_an_engine_without_weights_is_refused(watch: Watch) -> None:
    make_artifact(watch.folder / "a", backend=TENSORRT, engine=EngineInfo(strip_weights=True), parity=PASSED)
    assert "holds an engine without weights" in watch.refusal(["package", "a", "--triton", "models"])


def test_a_version_of_another_kind_does_not_come_beside_the_old_one(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    make_artifact(watch.folder / "b", backend=TENSORRT, parity=PASSED)
    assert watch.run(["package", "a", "--triton", "models", "--cpu"])[0] == 0
    err = watch.refusal(["package", "b", "--triton", "models", "--version-number", "2"])
    assert "holds another model or configuration" in err


def test_a_version_compatible_engine_says_how_to_start_its_server(watch: Watch) -> None:
    engine = EngineInfo(version_compatible=True)
    make_artifact(watch.folder / "a", backend=TENSORRT, engine=engine, parity=PASSED)
    _, out, _ = watch.run(["package", "a", "--triton", "models"])
    assert "note: start the server with --backend-config=tensorrt,version-compatible=true" in out
    assert "only" not in out


def test_plugins_and_caches_are_told(watch: Watch) -> None:
    engine = EngineInfo(plugins={"libblock.so": "a" * 64}, plugin_layers=1)
    make_artifact(watch.folder / "a", backend=TENSORRT, engine=engine, parity=PASSED)
    _, out, _ = watch.run(["package", "a", "--triton", "models", "--response-cache"])
    assert '--backend-config=tensorrt,plugins="libblock.so"' in out
    assert "--cache-config local,size=104857600" in out
    assert config_at(watch.folder / "models/m").response_cache.enable


def test_no_warmup_leaves_it_out(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    assert watch.run(["package", "a", "--triton", "models", "--cpu", "--no-warmup"])[0] == 0
    assert not (watch.folder / "models/m/warmup").exists()
    assert list(config_at(watch.folder / "models/m").model_warmup) == []


def test_artifacts_of_one_model_are_named_by_what_sets_them_apart() -> None:
    def named(name: str, targets: tuple[str, ...] = ("sm_86",), precision: str = "fp16") -> Any:
        manifest = make_manifest(model=ModelInfo(name=name, sha256="b" * 64), targets=targets)
        return manifest.model_copy(update={"precision": manifest.precision.model_copy(update={"requested": precision})})

    assert model_names([named("vit")], None) == ["vit"]
    assert model_names([named("vit"), named("bert")], None) == ["vit", "bert"]
    assert model_names([named("vit"), named("vit", ("sm_75",))], None) == ["vit_sm86", "vit_sm75"]
    assert model_names([named("vit", ("sm_86", "sm_89")), named("vit", precision="int8+bf16")], "m") == [
        "m_sm86_sm89",
        "m_sm86",
    ]
    assert model_names([named("vit"), named("vit", precision="int8+bf16")], None) == [
        "vit_fp16",
        "vit_int8_bf16",
    ]
    four = [named("vit", (gpu,), precision) for gpu in ("sm_75", "sm_86") for precision in ("fp16", "int8")]
    assert model_names(four, None) == ["vit_sm75_fp16", "vit_sm75_int8", "vit_sm86_fp16", "vit_sm86_int8"]
    assert model_names([named("a b/ü.onnx")], None) == ["a_b_onnx"]
    with pytest.raises(InputError, match="--name 'a b' cannot be used"):
        model_names([named("vit")], "a b")


def test_several_artifacts_go_into_one_repository(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    make_artifact(watch.folder / "b", targets=("sm_75",), parity=PASSED, inputs_sha256="d" * 64)
    assert watch.run(["package", "a", "b", "--triton", "models", "--cpu"])[0] == 0
    models = load_repository(watch.folder / "models").models
    assert [(model.name, model.targets, model.artifact_sha256[0]) for model in models] == [
        ("m_sm75", ("sm_75",), "d"),
        ("m_sm86", ("sm_86",), "a"),
    ]


def test_a_new_version_keeps_the_old_one(watch: Watch) -> None:
    make_artifact(watch.folder / "a", parity=PASSED)
    base = ["package", "a", "--triton", "models", "--cpu", "--name", "m"]
    assert watch.run(base)[0] == 0
    second = [*base, "--version-number", "2", "--versions", "2"]
    assert watch.run(second)[0] == 0
    assert {"1/model.onnx", "2/model.onnx"} <= files_below(watch.folder / "models/m")
    assert config_at(watch.folder / "models/m").version_policy.latest.num_versions == 2
    assert "(already there)" in watch.run(second)[1]
    io = (
        IoInfo(name="x", mode="input", dtype="float32", shape=("batch", 4)),
        IoInfo(name="z", mode="output", dtype="float32", shape=("batch", 3)),
    )
    case = Case("g (float[batch,4] x) => (float[batch,3] z) { z = MatMul(x, w) }", {"w": DYNAMIC.weights["w"]})
    make_artifact(watch.folder / "b", case, io=io, parity=PASSED)
    err = watch.refusal(["package", "b", "--triton", "models", "--cpu", "--name", "m", "--version-number", "3"])
    assert "it takes or gives something else than version 1" in err


def test_inputs_whose_values_become_shapes_are_never_batched(tmp_path: Path) -> None:
    profile = ProfileInfo(
        name="default",
        inputs={"x": span((1, 4), (2, 4), (8, 4)), "size": span((2,), (2,), (2,))},
        values={"size": span((1, 4), (2, 4), (8, 4))},
    )
    make_artifact(tmp_path / "a", SHAPES, profiles=(profile,), backend=TENSORRT)
    package(PackageSpec(artifacts=(tmp_path / "a",), repository=tmp_path / "models"))
    config = config_at(tmp_path / "models/m")
    assert config.max_batch_size == 0
    assert [port.is_shape_tensor for port in config.input] == [False, True]


def test_each_profile_of_a_plan_is_named(tmp_path: Path) -> None:
    profiles = (BATCHES, one_profile("long", x=span((1, 4), (2, 4), (3, 4))))
    make_artifact(tmp_path / "a", profiles=profiles, backend=TENSORRT)
    package(PackageSpec(artifacts=(tmp_path / "a",), repository=tmp_path / "models"))
    config = config_at(tmp_path / "models/m")
    assert config.max_batch_size == 3
    assert list(config.instance_group[0].profile) == ["0", "1"]
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 3]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_artifact_is_refused(watch: Watch, name: str) -> None:
    (watch.folder / "file").write_text("x")
    assert f"{name} is not a trtforge artifact" in watch.refusal(["package", name, "--triton", "models", "--cpu"])


def test_a_model_that_refuses_made_up_values_gets_no_warm_up(watch: Watch) -> None:
    case = Case(
        """g (int64[batch,2] start) => (float[batch,2] y) {
            far = Add(start, hundred)  picked = Gather(table, far)  y = Identity(picked)
        }""",
        {"hundred": np.array(100), "table": np.zeros(9, np.float32)},
    )
    profile = one_profile(start=span((1, 2), (4, 2), (8, 2)))
    make_artifact(watch.folder / "a", case, profiles=(profile,), parity=PASSED)
    code, _, err = watch.run(["package", "a", "--triton", "models", "--cpu"])
    assert code == 0
    assert "warning: m gets no warm-up: it did not run on made-up values" in err
    config = config_at(watch.folder / "models/m")
    assert (config.max_batch_size, list(config.model_warmup)) == (8, [])


def test_a_graph_that_onnx_runtime_does_not_take_is_not_for_the_cpu(watch: Watch) -> None:
    case = Case(
        """g (bfloat16[batch,4,8] x) => (bfloat16[batch,3,8] y) { w = Cast<to = 16>(weight)  y = Conv(x, w) }""",
        {"weight": np.zeros((3, 4, 1), np.float32)},
    )
    profile = one_profile(x=span((1, 4, 8), (4, 4, 8), (8, 4, 8)))
    make_artifact(watch.folder / "a", case, profiles=(profile,), parity=PASSED, backend=TENSORRT)
    err = watch.refusal(["package", "a", "--triton", "models", "--cpu"])
    assert "a cannot be served with --cpu: ONNX Runtime does not take its graph" in err
    code, _, err = watch.run(["package", "a", "--triton", "models"])
    assert code == 0
    assert "m gets no warm-up" in err
    # The names agree on what the batch is, where no run can show it.
    assert config_at(watch.folder / "models/m").max_batch_size == 8


def test_a_model_that_refuses_one_point_of_its_profiles_gets_no_warm_up(watch: Watch) -> None:
    # Positions come from a table of 6 rows, and the profile goes on to 8.
    case = Case(
        """g (float[batch,seq] x) => (float[batch,seq] y) {
            shape = Shape<start = 1>(x)  end = Squeeze(shape)  positions = Range(zero, end, one)
            rows = Gather(table, positions)  y = Add(x, rows)
        }""",
        {"zero": np.array(0), "one": np.array(1), "table": np.zeros(6, np.float32)},
    )
    profile = one_profile(x=span((1, 1), (4, 4), (8, 8)))
    make_artifact(watch.folder / "a", case, profiles=(profile,), parity=PASSED)
    code, _, err = watch.run(["package", "a", "--triton", "models", "--cpu"])
    assert code == 0
    assert "warning: m gets no warm-up: it did not run on made-up values (max of profile 'default': " in err
    config = config_at(watch.folder / "models/m")
    assert (config.max_batch_size, list(config.model_warmup)) == (8, [])
