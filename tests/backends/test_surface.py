"""Every name of the builder's Python module that the backends use exists, in TensorRT 11.4 and in TensorRT-RTX.

See tensorrt_names.py for how, without TensorRT's library. That proves names, never behaviour.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from native_stubs import run_python
from tensorrt_names import BINDINGS, RTX, look_up, names_in, stub_tensorrt

import trtforge.backends

# Classes of the objects that the backends call by these names.
CLASSES = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "error": "ParserError",
    "config": "IBuilderConfig",
    "layer": "IAttentionInputLayer",
    "port": "ITensor",
    "runtime": "Runtime",
    "registry": "IPluginRegistry",
    "cache": "ITimingCache",
    "loaded": "ICudaEngine",
}


def used_names():
    """Names of the builder's module that the build process uses."""
    folder = Path(trtforge.backends.__file__).parent
    sources = [path.read_text() for path in sorted(folder.glob("*.py"))]
    return set().union(*(names_in(source, CLASSES) for source in sources if re.search(r"import .*\btrt\b", source)))


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    return stub_tensorrt(tmp_path_factory.mktemp("stubs"))


def test_the_walk_finds_names_of_modules_and_objects():
    source = "import trt\nx = trt.BuilderFlag.TF32\nconfig.set_flag(x)\nnetwork.get_layer(0).type\nother.thing"
    members = {"IBuilderConfig.set_flag", "INetworkDefinition.get_layer"}
    assert names_in(source, CLASSES) == {"BuilderFlag", "BuilderFlag.TF32", *members}


def test_every_name_exists_in_tensorrt(stubs):
    names = used_names()
    assert {
        "BuilderFlag.TF32",
        "ILogger.Severity.VERBOSE",
        "LayerType.PLUGIN_V3",
        "Runtime.deserialize_cuda_engine",
    } <= names
    assert len(names) > 30
    version, missing = look_up(BINDINGS, names, stubs)
    assert version.startswith("11.")
    assert missing == []


def test_every_name_exists_in_tensorrt_rtx():
    assert look_up(RTX, used_names())[1] == []


def test_what_polygraphy_sets_exists_in_tensorrt(stubs):
    """Names that reach TensorRT through Polygraphy's configuration, by option."""
    flags = [f"BuilderFlag.{name}" for name in ("REFIT", "STRIP_PLAN", "VERSION_COMPATIBLE", "TF32")]
    fields = ["builder_optimization_level", "hardware_compatibility_level", "set_memory_pool_limit", "progress_monitor"]
    fields += ["profiling_verbosity", "add_optimization_profile", "create_timing_cache", "set_timing_cache"]
    names = [*flags, *(f"IBuilderConfig.{name}" for name in fields), "Builder.build_serialized_network"]
    names += ["NetworkDefinitionCreationFlag.STRONGLY_TYPED", "INetworkDefinition.add_plugin_v3"]
    # What tests/device refits an engine with.
    names += ["Logger", "Refitter.refit_cuda_engine", "OnnxParserRefitter.refit_from_file"]
    assert look_up(BINDINGS, names, stubs)[1] == []


def test_a_name_that_does_not_exist_is_noticed(stubs):
    names = ["BuilderFlag.FP16", "IInt8Calibrator", "BuilderFlag.TF32", "IBuilderConfig.set_compute_capability"]
    assert look_up(BINDINGS, names, stubs)[1] == sorted(set(names) - {"BuilderFlag.TF32"})
    assert look_up(RTX, ["INetworkDefinition.add_plugin_v3"])[1] == ["INetworkDefinition.add_plugin_v3"]


def test_the_build_process_can_be_imported_with_tensorrt_itself(stubs, tmp_path):
    """Its classes derive from TensorRT's, which the bindings check while they are defined."""
    (tmp_path / "tensorrt.py").write_text(
        "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"
    )
    code = (
        "from trtforge.backends import worker; print('build' in worker.SERVICE, worker.IS_RTX, worker.trt.__version__)"
    )
    assert run_python(code, libraries=stubs, modules=tmp_path).startswith("True False 11.")


IMPORT = """
from trtforge.errors import UnavailableError
try:
    import trtforge.backends.worker
except UnavailableError as error:
    print(error)
"""


def test_a_library_that_cannot_be_loaded_names_its_install_line(tmp_path):
    (tmp_path / "tensorrt.py").write_text("import ctypes\nctypes.CDLL('libnvinfer.so.11')\n")
    found = run_python(IMPORT, modules=tmp_path)
    assert found.startswith("TensorRT is installed but cannot be loaded\nwhy: libnvinfer.so.11")
    assert found.endswith("fix: pip install --force-reinstall 'trtforge[tensorrt]'")
