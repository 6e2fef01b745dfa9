"""TensorRT's side of the shared build process, run against TensorRT-RTX under the name `tensorrt`.

Their APIs are one up to a few names, so this runs the code that TensorRT takes, with a real builder: what is shared
works, and what TensorRT-RTX refuses without a GPU shows by its refusal that the flag arrived. Nothing here ran in
TensorRT itself; tests/device does that.
"""

from __future__ import annotations

import contextlib
import hashlib
import re

import onnx
import pytest
from backend_cases import batch, model_from_text, profile_set, quantized_mlp
from native_stubs import PLUGIN, compile_library, run_python, tensorrt_module

from trtforge.backends.base import BuildRequest
from trtforge.backends.tensorrt import BACKEND
from trtforge.engine_options import EngineOptions
from trtforge.errors import BuildError, InputError
from trtforge.target import tensorrt_target_from_option

X = {"x": batch(32)}
TARGET = tensorrt_target_from_option(None, 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tensorrt")


@pytest.fixture(scope="module")
def worker(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tensorrt_module(folder))
        # A user may have it set for their own work with Polygraphy.
        patch.setenv("POLYGRAPHY_USE_TENSORRT_RTX", "1")
        with BACKEND.start_worker(folder / "build.log") as child:
            yield child


@pytest.fixture
def build(tmp_path, worker):
    def run(model=None, profile=X, tf32=True, own_timing_cache=False, **options):
        path = tmp_path / "model.onnx"
        onnx.save(model or quantized_mlp(), path)
        request = BuildRequest(
            path,
            tmp_path / "model.engine",
            profile_set(profile),
            TARGET,
            tf32,
            EngineOptions(**options),
            own_timing_cache,
        )
        return BACKEND.build(request, worker)

    return run


def test_the_same_code_builds_and_reads_the_plan(build, worker):
    result = build()
    assert result.backend_version == "11.4.0"
    assert result.plan.gemm == {"int8": 2}
    assert (result.plugin_layers, result.timing_cache_sha256) == (0, None)
    assert hashlib.sha256(result.engine.read_bytes()).hexdigest() == result.engine_sha256
    assert "[W] the engine cannot be loaded here, so its plan is taken from this log" in worker.log.read_text()


def configured(worker, what="Flags"):
    """What Polygraphy says of the last build's configuration."""
    return re.findall(rf"^\s*{what} +\| \[(.*)\]", worker.log.read_text(), re.MULTILINE)[-1].split(", ")


def test_tf32_is_set_either_way(build, worker):
    build(tf32=True)
    assert configured(worker) == ["TF32", "STRONGLY_TYPED"]
    build(tf32=False)
    assert configured(worker) == ["STRONGLY_TYPED"]


def test_an_unknown_operator_is_refused_in_the_name_of_tensorrt(build):
    with pytest.raises(BuildError) as caught:
        build(model_from_text("g (float[b,32] x) => (float[b,32] y) { y = Foo(x) }"))
    assert caught.value.what == "TensorRT refuses node 'node0' (Foo)"


@pytest.mark.parametrize(
    ("options", "flag", "said"),
    [
        ({"refit": True}, "REFIT", "CUDA_SUCCESS"),
        ({"strip_weights": True}, "STRIP_PLAN", "CUDA_SUCCESS"),
        ({"version_compatible": True}, "VERSION_COMPATIBLE", "libnvinfer_lean"),
        ({"workspace": 64}, "TF32", "within workspace limit"),
    ],
)
def test_an_option_reaches_the_builder_which_cannot_do_it_without_a_gpu(build, worker, options, flag, said):
    before = worker.log.stat().st_size
    with pytest.raises(BuildError):
        build(**options)
    assert said in worker.log.read_text()[before:]
    assert flag in configured(worker)


def test_an_engine_whose_weights_are_replaced_later_keeps_the_models_own_names(build, worker):
    for options, name in (({}, "n3"), ({"refit": True}, "up"), ({"strip_weights": True}, "up")):
        before = worker.log.stat().st_size
        with pytest.raises(BuildError) if options else contextlib.nullcontext():
            build(**options)
        assert f"Parsing node: {name} [MatMul]" in worker.log.read_text()[before:]


def test_hardware_compatibility_reaches_the_builder_only_where_it_is_given(build, worker):
    ignored = "setHardwareCompatibilityLevel() is unsupported in TensorRT-RTX"
    before = worker.log.stat().st_size
    build()
    assert ignored not in worker.log.read_text()[before:]
    for level in ("ampere_plus", "same_compute_capability"):
        before = worker.log.stat().st_size
        build(hardware_compatible=level)
        assert ignored in worker.log.read_text()[before:]


def test_levels_and_a_workspace_that_suffices_build(build, worker):
    for level in (0, 5):
        assert build(optimization_level=level, workspace=2**30).plan.gemm == {"int8": 2}
    assert "WORKSPACE: 1024.00 MiB" in configured(worker, "Memory Pools")


CONFIGURE = """
import dataclasses, os, sys
os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = sys.argv[1]
import polygraphy.backend.trt.util as polygraphy_trt
from polygraphy.backend.trt import CreateNetwork
from trtforge.backends.build_log import BuildLog
from trtforge.backends.builder_config import make_config
from trtforge.engine_options import EngineOptions
polygraphy_trt.TRT_LOGGER = log = BuildLog()
levels = []
for level in (None, 4):
    options = dataclasses.asdict(EngineOptions(optimization_level=level))
    meta = {"compute_capabilities": None, "profiles": [], "tf32": True, "options": options}
    levels.append(make_config(*CreateNetwork(strongly_typed=True)(), meta, log, print).builder_optimization_level)
print("levels:", levels)
"""


@pytest.mark.parametrize("is_rtx", ["0", "1"])
def test_the_level_is_the_builders_own_unless_one_is_given(folder, is_rtx):
    own, given = map(
        int, re.search(r"^levels: \[(\d), (\d)\]$", run_python(CONFIGURE, is_rtx, modules=folder), re.M).groups()
    )
    assert own != given == 4


def test_a_timing_cache_is_made_with_its_hash(build, tmp_path):
    cache = tmp_path / "cache"
    result = build(timing_cache=cache)
    assert result.timing_cache_sha256 == hashlib.sha256(cache.read_bytes()).hexdigest()
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "model.onnx", "model.engine"}


def test_a_timing_cache_that_cannot_be_used_is_refused_and_kept(build, tmp_path):
    cache = tmp_path / "cache"
    cache.write_bytes(b"garbage" * 20)
    with pytest.raises(InputError) as caught:
        build(timing_cache=cache)
    assert caught.value.what == f"--timing-cache {cache} cannot be used"
    assert "Failed to deserialize timing cache" in caught.value.why
    assert cache.read_bytes() == b"garbage" * 20
    with pytest.raises(InputError) as caught:
        build(timing_cache=tmp_path)
    assert (caught.value.what, caught.value.why) == (f"--timing-cache {tmp_path} cannot be read", "Is a directory")


def test_a_timing_cache_that_the_user_did_not_name_is_started_anew(build, worker, tmp_path):
    cache = tmp_path / "cache"
    build(timing_cache=cache)
    fresh = cache.read_bytes()
    cache.write_bytes(b"garbage" * 20)
    result = build(timing_cache=cache, own_timing_cache=True)
    assert cache.read_bytes() == fresh
    assert result.timing_cache_sha256 == hashlib.sha256(fresh).hexdigest()
    warning = r"^\[W\] --timing-cache \S+/cache cannot be used: .*; it is started anew$"
    assert re.search(warning, worker.log.read_text(), re.M)


def test_a_plugin_library_that_cannot_be_loaded_says_why(build, tmp_path):
    (tmp_path / "text.so").write_text("no library")
    compile_library(tmp_path / "torn.so", "int missing(void); int use(void) { return missing(); }", "-Wl,-z,now")
    for name, why in (("text.so", "file too short"), ("torn.so", "undefined symbol: missing")):
        with pytest.raises(InputError) as caught:
            build(plugins=(tmp_path / name,))
        assert caught.value.what == f"--plugin {tmp_path / name} cannot be loaded"
        assert why in caught.value.why


def test_a_plugin_library_is_registered_once_for_all_builds_of_a_process(build, tmp_path, worker):
    library = compile_library(tmp_path / "plugin.so", PLUGIN, language="c++")
    for _ in range(2):
        assert build(plugins=(library,)).plugin_layers == 0
    text = "g (float[b,32] x) => (float[b,32] y) { y = my.ops.Foo(x) }"
    model = model_from_text(text)
    model.opset_import.append(onnx.helper.make_opsetid("my.ops", 1))
    with pytest.raises(BuildError) as caught:
        build(model, plugins=(library,))
    # The parser found the creator by the node's domain; without it there would be no operator Foo.
    assert "Could not create the plugin" in caught.value.why


@pytest.mark.parametrize("source", ["int nothing;", "void **getCreators(int *count) { *count = 0; return 0; }"])
def test_a_library_without_plugins_is_refused(build, tmp_path, source):
    library = compile_library(tmp_path / "empty.so", source)
    with pytest.raises(InputError) as caught:
        build(plugins=(library,))
    assert caught.value.what == f"--plugin {library} brings no plugin"
    assert not (tmp_path / "model.engine").exists()
