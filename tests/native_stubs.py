"""Small C libraries that stand in for NVIDIA's where only names count, made with the system's compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# What TensorRT's bindings need to be imported; every call gives null.
TENSORRT_SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "getBuilderPluginRegistry",
    "getPluginRegistry",
    "getNvOnnxParserVersion",
    "initLibNvInferPlugins",
)
TENSORRT_LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
# A plugin library: one creator, laid out as TensorRT's IPluginCreatorV3One; it makes no plugin.
PLUGIN = """
struct InterfaceInfo { const char *kind; int major, minor; };
struct Creator {
    virtual int getAPILanguage() const noexcept { return 0; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
    virtual ~Creator() noexcept = default;
    virtual void *createPlugin(const char *, const void *, int) noexcept { return nullptr; }
    virtual const void *getFieldNames() noexcept { static struct { int n; void *fields; } none{}; return &none; }
    virtual const char *getPluginName() const noexcept { return "Foo"; }
    virtual const char *getPluginVersion() const noexcept { return "1"; }
    virtual const char *getPluginNamespace() const noexcept { return "my.ops"; }
};
static Creator creator;
static void *const creators[] = {&creator};
extern "C" void *const *getCreators(int &count) { count = 1; return creators; }
extern "C" void setLoggerFinder(void *) {}
"""
# A driver with one GPU whose compute capability is a macro; without one where COUNT is 0.
_DRIVER = """
int cuInit(int flags) { return STATUS; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { __builtin_strcpy(name, "NVIDIA Stub"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? MAJOR : MINOR; return 0; }
int cuGetErrorString(int status, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
"""


def compile_library(path: Path, source: str, *flags: str, language: str = "c") -> Path:
    """Compile C or C++ into a shared library."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler here")
    arguments = ["gcc", "-shared", "-fPIC", "-w", "-x", language, "-", "-o", str(path), f"-Wl,-soname,{path.name}"]
    arguments += [*flags, "-lstdc++"] if language == "c++" else flags
    subprocess.run(arguments, input=source, text=True, check=True)
    return path


def stub_driver(folder: Path, compute_capability: int = 90, count: int = 1, status: int = 0) -> Path:
    """A folder with a `libcuda.so.1`."""
    major, minor = divmod(compute_capability, 10)
    macros = {"MAJOR": major, "MINOR": minor, "COUNT": count, "STATUS": status}
    compile_library(folder / "libcuda.so.1", _DRIVER, *(f"-D{name}={value}" for name, value in macros.items()))
    return folder


def tensorrt_module(folder: Path) -> Path:
    """A folder with a module `tensorrt` that is TensorRT-RTX under that name: their APIs are one, up to a few names."""
    (folder / "tensorrt.py").write_text('from tensorrt_rtx import *\n\n__version__ = "11.4.0"\n')
    return folder


def run_python(code: str, *arguments: str, libraries: Path | None = None, modules: Path | None = None) -> str:
    """What a program prints, in a process that finds these libraries and modules first."""
    environment = {**os.environ}
    for name, folder in (("LD_LIBRARY_PATH", libraries), ("PYTHONPATH", modules)):
        if folder is not None:
            environment[name] = os.pathsep.join([str(folder), *filter(None, [os.environ.get(name)])])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
