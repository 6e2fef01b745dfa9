from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from native_stubs import run_python, stub_driver, tensorrt_module

from trtforge.backends.registry import all_backends, select_backend
from trtforge.backends.tensorrt import BACKEND as TENSORRT
from trtforge.backends.tensorrt_rtx import BACKEND as RTX
from trtforge.engine_options import EngineOptions
from trtforge.errors import InputError, UnavailableError
from trtforge.target import BackendName, rtx_target_from_option, tensorrt_target_from_option


@pytest.mark.parametrize("name", ["auto", "tensorrt-rtx"])
def test_without_a_gpu_auto_is_tensorrt_rtx(name):
    backend = select_backend(name)
    assert backend.name == BackendName.TENSORRT_RTX
    assert backend.unavailable() is None
    assert backend.version()[0].isdecimal()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError) as caught:
        select_backend("openvino")
    assert caught.value.what == "--backend 'openvino' is unknown"
    assert caught.value.why == "it takes auto, tensorrt, tensorrt-rtx"


def test_both_backends_are_registered_with_tensorrt_first():
    assert [backend.name for backend in all_backends()] == list(BackendName)


SELECT = """
import sys
from trtforge.backends.registry import select_backend
from trtforge.errors import TrtForgeError
try:
    backend = select_backend(sys.argv[1])
    heavy = [name for name in sys.modules if name.startswith(("tensorrt", "polygraphy"))]
    print(backend.name, backend.target(None).names, heavy)
except TrtForgeError as error:
    print(error)
"""


def test_auto_is_tensorrt_where_its_package_and_a_gpu_are(tmp_path):
    found = run_python(SELECT, "auto", libraries=stub_driver(tmp_path, 100), modules=tensorrt_module(tmp_path))
    assert found == "tensorrt ['sm_100'] []"


@pytest.mark.parametrize("missing", ["package", "gpu"])
def test_auto_is_tensorrt_rtx_where_either_is_missing(tmp_path, missing):
    parts = {"modules": tensorrt_module(tmp_path)} if missing == "gpu" else {"libraries": stub_driver(tmp_path)}
    assert run_python(SELECT, "auto", **parts).startswith("tensorrt-rtx ['sm_80', ")


def test_tensorrt_says_which_part_is_missing(tmp_path):
    no_gpu = run_python(SELECT, "tensorrt", modules=tensorrt_module(tmp_path))
    assert no_gpu.startswith("--backend tensorrt is not available here\nwhy: it builds on a GPU only, and no NVIDIA")
    assert "not installed;" not in no_gpu
    assert no_gpu.endswith("fix: use a machine with an NVIDIA GPU, or use --backend tensorrt-rtx, which needs no GPU")
    no_package = run_python(SELECT, "tensorrt", libraries=stub_driver(tmp_path))
    assert "why: the Python package 'tensorrt-cu13' is not installed\n" in no_package
    assert no_package.endswith(
        "fix: pip install 'trtforge[tensorrt]', or use --backend tensorrt-rtx, which needs no GPU"
    )


def test_tensorrt_names_both_parts_where_both_are_missing():
    with pytest.raises(UnavailableError) as caught:
        select_backend("tensorrt")
    assert caught.value.why.startswith("the Python package 'tensorrt-cu13' is not installed; it builds on a GPU only")
    assert caught.value.fix.startswith("pip install 'trtforge[tensorrt]' and use a machine with an NVIDIA GPU, or use")


def test_an_old_tensorrt_is_refused_with_its_version(tmp_path):
    modules = tensorrt_module(tmp_path)
    (modules / "tensorrt-10.9.0.dist-info").mkdir()
    (modules / "tensorrt-10.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorrt\nVersion: 10.9.0\n"
    )
    found = run_python(SELECT, "tensorrt", libraries=stub_driver(tmp_path), modules=modules)
    assert "why: TensorRT 10.9.0 is installed, but trtforge needs 11 or newer\n" in found
    assert "fix: pip install --upgrade 'trtforge[tensorrt]', or" in found


def test_a_folder_named_like_the_package_is_not_taken_for_it(tmp_path):
    (tmp_path / "tensorrt").mkdir()
    found = run_python(SELECT, "tensorrt", libraries=stub_driver(tmp_path), modules=tmp_path)
    assert "why: the Python package 'tensorrt-cu13' is not installed\n" in found


RTX_TARGET = rtx_target_from_option(None)


@pytest.mark.parametrize(
    ("options", "flag", "why"),
    [
        ({"plugins": (Path("a.so"),)}, "--plugin", "it has no custom plugins"),
        ({"refit": True}, "--refit", "a refittable engine needs a GPU"),
        ({"strip_weights": True}, "--strip-weights", "stripping weights needs a GPU"),
        ({"version_compatible": True}, "--version-compatible", "the release that built them only"),
        ({"hardware_compatible": "ampere_plus"}, "--hardware-compatible", "which --gpu chooses"),
        ({"timing_cache": Path("cache")}, "--timing-cache", "a timing cache has no effect"),
    ],
)
def test_tensorrt_rtx_refuses_what_only_tensorrt_can_do(options, flag, why):
    with pytest.raises(InputError) as caught:
        RTX.check(EngineOptions(**options), RTX_TARGET)
    assert caught.value.what == f"{flag} cannot be used with tensorrt-rtx"
    assert why in caught.value.why
    assert "--backend tensorrt" in caught.value.fix
    TENSORRT.check(EngineOptions(**options), tensorrt_target_from_option(None, 90))


def test_tensorrt_rtx_takes_a_level_and_a_workspace():
    RTX.check(EngineOptions(optimization_level=5, workspace=2**30), RTX_TARGET)


def test_ampere_compatibility_takes_an_ampere_gpu():
    options = EngineOptions(hardware_compatible="ampere_plus")
    TENSORRT.check(options, tensorrt_target_from_option(None, 80))
    with pytest.raises(InputError) as caught:
        TENSORRT.check(options, tensorrt_target_from_option(None, 75))
    assert caught.value.what == "--hardware-compatible ampere_plus cannot be built on sm_75"


@pytest.mark.parametrize(
    ("place", "why"),
    [(".", "it is no regular file"), ("none/cache", "there is no folder "), ("file/cache", "there is no")],
)
def test_a_timing_cache_that_could_not_be_written_is_refused_before_the_build(tmp_path, place, why):
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as caught:
        TENSORRT.check(EngineOptions(timing_cache=tmp_path / place), tensorrt_target_from_option(None, 90))
    assert caught.value.what == f"--timing-cache {tmp_path / place} cannot be used"
    assert caught.value.why.startswith(why)


WITHOUT_PACKAGE = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "tensorrt_rtx" else find(name, *rest)
from trtforge.backends.registry import select_backend
try:
    select_backend("auto")
except Exception as error:
    print(error)
"""


def test_a_missing_package_names_its_install_line():
    found = subprocess.run([sys.executable, "-c", WITHOUT_PACKAGE], capture_output=True, text=True, check=True).stdout
    assert "'tensorrt-rtx-cu13' is not installed" in found
    assert "fix: pip install 'trtforge[rtx]'" in found


def test_choosing_a_backend_does_not_import_the_builder():
    code = (
        "import sys; from trtforge.backends.registry import select_backend; select_backend().version();"
        "print([name for name in sys.modules if name.startswith(('tensorrt', 'polygraphy'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def test_the_worker_starts_before_this_process_loads_pydantic():
    code = (
        "import sys, trtforge.pipeline; from trtforge.backends.registry import all_backends; all_backends();"
        "print([name for name in sys.modules if name in ('pydantic', 'yaml', 'onnx')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def test_auto_imports_no_backend_behind_the_one_that_it_takes(tmp_path):
    code = "import sys; from trtforge.backends.registry import select_backend; print(select_backend().name, " + (
        "'trtforge.backends.tensorrt_rtx' in sys.modules)"
    )
    found = run_python(code, libraries=stub_driver(tmp_path, 90), modules=tensorrt_module(tmp_path))
    assert found == "tensorrt False"
