"""The builder's configuration, in the build process: profiles, flags, plugin libraries, the timing cache."""

from __future__ import annotations

import contextlib
import ctypes
import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
from polygraphy.backend.trt import CreateConfig, Profile

from trtforge.backends.build_log import BuildLog, BuildMonitor, write_log
from trtforge.backends.library import IS_RTX, trt
from trtforge.errors import InputError
from trtforge.isolation import Meta, Progress

# Libraries that this process has registered; it may build more than once.
_registered: set[str] = set()
_PLUGIN_LAYERS = (trt.LayerType.PLUGIN, trt.LayerType.PLUGIN_V2, trt.LayerType.PLUGIN_V3)


def make_config(builder: Any, network: Any, meta: Meta, log: BuildLog, progress: Progress) -> Any:
    """Builder configuration; profiles are added in order.

    Raises:
        InputError: the timing cache that the user named is none, or one of another GPU or release.
    """
    options, targets = meta["options"], meta["compute_capabilities"]
    common = {
        "profiles": [_make_profile(_ranges(network, entries)) for entries in meta["profiles"]],
        "profiling_verbosity": trt.ProfilingVerbosity.DETAILED,
        "progress_monitor": BuildMonitor(progress),
        "builder_optimization_level": options["optimization_level"],
        "memory_pool_limits": options["workspace"] and {trt.MemoryPoolType.WORKSPACE: options["workspace"]},
    }
    if IS_RTX:
        pairs = None if targets is None else [divmod(target, 10) for target in targets]
        config = CreateConfigRTX(compute_capabilities=pairs, **common)(builder, network)
    else:
        config = CreateConfig(**common, **_tensorrt_only(options))(builder, network)
        if options["timing_cache"] is not None:
            _set_timing_cache(config, Path(options["timing_cache"]), log, is_own=options["own_timing_cache"])
    # Set either way: Polygraphy's two config loaders differ in what they leave on.
    change_flag: Callable[[Any], None] = config.set_flag if meta["tf32"] else config.clear_flag
    change_flag(trt.BuilderFlag.TF32)
    return config


def _ranges(network: Any, entries: Meta) -> dict[str, list[list[int]]]:
    """Ranges by input: of values for shape tensors, of shapes otherwise. Values that choose a branch of an If do not
    make a shape tensor; the graph passes have used them by now.
    """
    ports = [network.get_input(index) for index in range(network.num_inputs)]
    shape_tensors = {port.name for port in ports if port.is_shape_tensor}
    values = {name: span for name, span in entries["values"].items() if name in shape_tensors}
    ranges: dict[str, list[list[int]]] = entries["inputs"] | values
    return ranges


def _make_profile(ranges: dict[str, list[list[int]]]) -> Any:
    profile = Profile()
    for name, (low, opt, high) in ranges.items():
        # Polygraphy takes names for patterns: an input called "x[0]" would not be found.
        profile.add(glob.escape(name), min=low, opt=opt, max=high)
    return profile


def _tensorrt_only(options: Meta) -> dict[str, Any]:
    """What TensorRT-RTX ignores or fails with, and refuses before it comes to this."""
    levels = {
        "ampere_plus": trt.HardwareCompatibilityLevel.AMPERE_PLUS,
        "same_compute_capability": trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,
    }
    return {
        "refittable": options["refit"],
        "strip_plan": options["strip_weights"],
        "version_compatible": options["version_compatible"],
        "hardware_compatibility_level": levels.get(options["hardware_compatible"]),
    }


def load_plugins(libraries: list[str], log: BuildLog) -> None:
    """Register the plugins of TensorRT itself and of the user's libraries.

    Args:
        libraries: absolute paths. Their constructors run in this process.
        log: takes what is said of it.

    Raises:
        InputError: one cannot be loaded, or brings no plugin.
    """
    trt.init_libnvinfer_plugins(log, "")
    registry = trt.get_plugin_registry()
    for path in libraries:
        if path in _registered:
            continue
        known = len(registry.all_creators)
        try:
            # The registry gives no reason when it fails; the loader does. Older libraries register themselves here.
            is_dynamic = hasattr(ctypes.CDLL(path, ctypes.RTLD_GLOBAL), "getCreators")
        except OSError as err:
            raise InputError(
                f"--plugin {path} cannot be loaded", str(err), "build it for this machine and this TensorRT release"
            ) from err
        if is_dynamic:
            registry.load_library(path)
        if len(registry.all_creators) == known:
            raise InputError(
                f"--plugin {path} brings no plugin",
                "its plugins are registered already, or it neither exports getCreators nor registers any on loading",
                "give a TensorRT plugin library, each only once",
            )
        _registered.add(path)


def count_plugin_layers(network: Any) -> int:
    """Layers that a plugin computes. Without its library, a plugin's function body is imported instead, silently."""
    return sum(network.get_layer(index).type in _PLUGIN_LAYERS for index in range(network.num_layers))


def _set_timing_cache(config: Any, path: Path, log: BuildLog, *, is_own: bool) -> None:
    """Read the timing cache where there is one, else start an empty one, in the place of Polygraphy's.

    Args:
        config: of the builder.
        path: of the timing cache.
        log: takes what is said of it.
        is_own: the user did not name it; one that does not fit is none.
    """
    try:
        _load_timing_cache(config, path, log)
    except InputError as err:
        if not is_own:
            raise
        write_log("W", f"{err.what}: {err.why}; it is started anew")
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def _load_timing_cache(config: Any, path: Path, log: BuildLog) -> None:
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as err:
        raise InputError(
            f"--timing-cache {path} cannot be read", err.strerror or str(err), "check the file, or give another"
        ) from err
    log.warnings.clear()
    cache = config.create_timing_cache(content)
    is_set = cache is not None and config.set_timing_cache(cache, ignore_mismatch=False)
    warnings = [text for text in log.warnings if "timing cache" in text]
    if not is_set or warnings:
        raise InputError(
            f"--timing-cache {path} cannot be used",
            "; ".join(warnings) or "it was made on another GPU or by another release",
            "give a file of its own for each GPU model and release; one that does not exist is made",
        )


def read_timing_cache(config: Any, path: Path) -> bytes:
    """The timing cache after a build, together with what another build has saved in the meantime."""
    cache = config.get_timing_cache()
    with contextlib.suppress(OSError):  # there is none, or none that can be read
        saved = config.create_timing_cache(path.read_bytes())
        if saved is not None:
            cache.combine(saved, ignore_mismatch=False)
    return bytes(memoryview(cache.serialize()))
