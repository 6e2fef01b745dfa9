from __future__ import annotations

import subprocess
import sys

import pytest

from trtforge.backends.registry import select_backend
from trtforge.errors import InputError, UnavailableError
from trtforge.target import BackendName


@pytest.mark.parametrize("name", ["auto", "tensorrt-rtx"])
def test_auto_and_its_name_select_tensorrt_rtx(name):
    backend = select_backend(name)
    assert backend.name == BackendName.TENSORRT_RTX
    assert backend.availability() is None
    assert backend.version()[0].isdecimal()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError) as caught:
        select_backend("openvino")
    assert caught.value.what == "--backend 'openvino' is unknown"
    assert caught.value.why == "it takes auto, tensorrt, tensorrt-rtx"


def test_tensorrt_is_refused_with_what_to_use_instead():
    with pytest.raises(UnavailableError) as caught:
        select_backend("tensorrt")
    assert caught.value.why == "this version of trtforge builds with tensorrt-rtx only"
    assert caught.value.fix.startswith("use --backend tensorrt-rtx")


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
