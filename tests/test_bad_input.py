"""Files that are not what they say, or that want something: exit 2, one error that names it, nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import onnx.parser
import pytest
from command_checks import Watch
from support import save_onnx, zip_of

BODY = "g (float[2,4] x) => (float[2,8] y) { [product] y = MatMul(x, w) }"
WEIGHT = np.ones((4, 8), np.float32)
HEADER = json.dumps({"w": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(16)


def save(model: onnx.ModelProto) -> None:
    Path("model.onnx").write_bytes(model.SerializeToString())


def parse(text: str, domains: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 20{domains}]>\n{text}')


def external(location: str, **entries: int) -> None:
    """A model whose weight lies in another file."""
    model = parse(BODY)
    weight = onnx.TensorProto(name="w", dims=WEIGHT.shape, data_type=onnx.TensorProto.FLOAT)
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=str(value))
    model.graph.initializer.append(weight)
    save(model)


def outside() -> None:
    Path("../w.bin").write_bytes(WEIGHT.tobytes())
    external("../w.bin")


def outside_and_back() -> None:
    Path("w.bin").write_bytes(WEIGHT.tobytes())
    external(f"../{Path.cwd().name}/w.bin")


def absolute() -> None:
    Path("w.bin").write_bytes(WEIGHT.tobytes())
    external(str(Path("w.bin").absolute()))


def link_out() -> None:
    Path("../w.bin").write_bytes(WEIGHT.tobytes())
    Path("w.bin").symlink_to("../w.bin")
    external("w.bin")


def link_to_device() -> None:
    Path("w.bin").symlink_to("/dev/zero")
    external("w.bin")


def linked_folder() -> None:
    Path("../other").mkdir()
    Path("../other/w.bin").write_bytes(WEIGHT.tobytes())
    Path("data").symlink_to("../other")
    external("data/w.bin")


def pipe() -> None:
    os.mkfifo("w.bin")
    external("w.bin")


def folder() -> None:
    Path("w.bin").mkdir()
    external("w.bin")


def short_data() -> None:
    Path("w.bin").write_bytes(WEIGHT.tobytes()[:-4])
    external("w.bin")


def offset_beyond() -> None:
    Path("w.bin").write_bytes(WEIGHT.tobytes())
    external("w.bin", offset=64, length=128)


def model_pipe() -> None:
    os.mkfifo("model.onnx")


def with_weight(**changes: object) -> None:
    model = parse(BODY)
    weight = onnx.numpy_helper.from_array(WEIGHT, "w")
    for name, value in changes.items():
        if name == "dims":
            del weight.dims[:]
            weight.dims.extend(value)  # type: ignore[arg-type]
        else:
            setattr(weight, name, value)
    model.graph.initializer.append(weight)
    save(model)


def duplicate_initializer() -> None:
    model = parse(BODY)
    model.graph.initializer.extend([onnx.numpy_helper.from_array(WEIGHT * k, "w") for k in (1, 2)])
    save(model)


def recursive_function() -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = local.f(x) }", ', "local": 1')
    node = oh.make_node("f", ["a"], ["b"], domain="local")
    imports = [oh.make_opsetid("", 20), oh.make_opsetid("local", 1)]
    model.functions.append(oh.make_function("local", "f", ["a"], ["b"], [node], imports))
    save(model)


def text_model(text: str, domains: str = "") -> Callable[[], None]:
    return lambda: save(parse(text, domains))


MODELS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "data outside": (outside, ("'../w.bin'",)),
    "data that goes out and comes back": (outside_and_back, ("../here/w.bin",)),
    "data at an absolute path": (absolute, ("outside the model's folder", "'w'")),
    "a link that leads out": (link_out, ("'w.bin'", "outside")),
    "a link to a device": (link_to_device, ("'w.bin'",)),
    "a link to another folder": (linked_folder, ("'data/w.bin'", "outside")),
    "a pipe in the place of data": (pipe, ("'w.bin'",)),
    "a folder in the place of data": (folder, ("'w.bin'",)),
    "data that is too short": (short_data, ("'w.bin'", "124")),
    "an offset beyond the data": (offset_beyond, ("'w.bin'", "128")),
    "a pipe in the place of the model": (model_pipe, ("model.onnx",)),
    "sizes beyond the file": (lambda: with_weight(dims=[4, 8000]), ("initializer 'w'", "128 bytes")),
    "sizes beyond memory": (lambda: with_weight(dims=[2**40, 8]), ("initializer 'w'",)),
    "sizes whose product overflows": (lambda: with_weight(dims=[2**33, 2**31]), ("initializer 'w'",)),
    "a negative size": (lambda: with_weight(dims=[-4, 8]), ("initializer 'w'", "-4")),
    "a cycle": (
        text_model("g (float[2] x) => (float[2] y) { y = Exp(b) [first] a = Add(x, b) [second] b = Relu(a) }"),
        ("the graph has a cycle: 'first' (Add) -> 'second' (Relu) -> 'first' (Add)",),
    ),
    "a node that needs itself": (
        text_model("g (float[2] x) => (float[2] y) { [self] a = Add(x, a) y = Exp(a) }"),
        ("the graph has a cycle: 'self' (Add) -> 'self' (Add)",),
    ),
    "a tensor made twice": (
        text_model("g (float[2] x) => (float[2] y) { a = Relu(x) a = Neg(x) y = Exp(a) }"),
        ("tensor 'a' is produced twice",),
    ),
    "two inputs of one name": (text_model("g (float[2] x, float[3] x) => (float[2] y) { y = Exp(x) }"), ("'x'",)),
    "two initializers of one name": (duplicate_initializer, ("'w'",)),
    "a tensor that nothing makes": (
        text_model("g (float[2] x) => (float[2] y) { [sum] y = Add(x, nothing) }"),
        ("'nothing'", "'sum'"),
    ),
    "a function that nobody defines": (
        text_model("g (float[2] x) => (float[2] y) { [call] y = local.f(x) }", ', "local": 1'),
        ("'call'", "local.f"),
    ),
    "a domain that nobody declares": (
        text_model("g (float[2] x) => (float[2] y) { [call] y = com.example.F(x) }"),
        ("'call'", "com.example.F, which nothing defines"),
    ),
    "a function that calls itself": (recursive_function, ("local functions cannot be inlined", "local::f -> local::f")),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, watch: Watch) -> None:
    write, says = MODELS[name]
    write()
    error = watch.refusal(["build", "model.onnx"])
    for text in says:
        assert text in error


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch ran",)


def checkpoint(name: str) -> None:
    Path(name).write_bytes(pickle.dumps(Evil()))


def zipped(name: str) -> None:
    zip_of(Path(name), {"archive/data.pkl": pickle.dumps(Evil()), "archive/version": b"3"})


def old_program(name: str) -> None:
    zip_of(Path(name), {"serialized_exported_program.json": b"{}", "serialized_state_dict.pt": pickle.dumps(Evil())})


def program_with_pickle(name: str) -> None:
    members = {
        "m/archive_format": b"pt2",
        "m/models/model.json": b"{}",
        "m/data/weights/model.pt": pickle.dumps(Evil()),
    }
    zip_of(Path(name), members, zipfile.ZIP_STORED)


def hf_folder(name: str, weights: str, **config: object) -> None:
    Path(name).mkdir()
    whole = {"architectures": ["BertModel"], "model_type": "bert"} | config
    Path(name, "config.json").write_text(json.dumps(whole))
    if weights:
        Path(name, weights).write_bytes(pickle.dumps(Evil()))


CHECKPOINTS: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
    "w.pth": (checkpoint, ("would have to be unpickled", "torch.export.save")),
    "w.pt": (zipped, ("would have to be unpickled", "torch.export.save")),
    "w.bin": (zipped, ("would have to be unpickled", "torch.export.save")),
    "w.ckpt": (checkpoint, ("would have to be unpickled", "torch.export.save")),
    "old.pt2": (old_program, ("older .pt2 format", "torch.export.save(torch.export.load(old), new)")),
    "new.pt2": (program_with_pickle, ("'data/weights/model.pt', which would have to be unpickled or run",)),
    "renamed.onnx": (checkpoint, ("renamed.onnx",)),
    "bert": (lambda name: hf_folder(name, "pytorch_model.bin"), ("pytorch_model.bin", "safetensors")),
    "no-weights": (lambda name: hf_folder(name, ""), ("no-weights",)),
    "no-config": (lambda name: Path(name).mkdir(), ("no-config",)),
}


@pytest.mark.parametrize("command", ["build", "export"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_nothing_is_unpickled(name: str, command: str, watch: Watch) -> None:
    write, says = CHECKPOINTS[name]
    write(name)
    error = watch.refusal([command, name])
    if not (command == "export" and name.endswith(".onnx")):
        for text in says:
            assert text in error


@pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("torch", "transformers")),
    reason="the export extra is not installed",
)
def test_code_of_a_folder_is_not_run(watch: Watch) -> None:
    folder = watch.folder / "own"
    folder.mkdir()
    config = {"architectures": ["OwnModel"], "model_type": "bert", "auto_map": {"AutoModel": "own_code.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(SAFETENSORS)
    (folder / "own_code.py").write_text("open('ran', 'w').close()\nfrom transformers import BertModel as OwnModel\n")
    error = watch.refusal(["build", "own", "--fp16"])
    assert "OwnModel is code of the folder" in error
    assert "--trust-remote-code" in error
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "own_code.py"]


PROFILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "no YAML": ("inputs: [x", ("p.yaml is not valid YAML",)),
    "a list": ("- x", ("p.yaml", "mapping")),
    "an object to make": (
        "!!python/object/apply:os.system ['touch ran']",
        ("p.yaml is not valid YAML", "tags (!name) are not allowed"),
    ),
    "an unknown key": ("inputs: {x: [2, 4]}\nshapes: {}", ("unknown key 'shapes'",)),
    "text in the place of a size": ("inputs: {x: [two, 4]}", ("two",)),
    "an input left out": ("inputs: {}", ("x",)),
    "a dim without a range": ("inputs: {x: [rows, 4]}", ("rows",)),
    "twice the same profile": (
        "inputs: {x: [2, 4]}\nprofiles: [{name: a}, {name: a}]",
        ("repeats a profile name",),
    ),
    "two sizes for a fixed axis": (
        "dims: {c: {min: 1, opt: 4, max: 8}}\ninputs: {x: [2, c]}",
        ("axis 1 of input 'x'", "fixes it to 4"),
    ),
    "values for an input of floats": (
        "inputs: {x: [2, 4]}\nvalues: {x: {min: [1], opt: [1], max: [1]}}",
        ("values for 'x'", "integer inputs that hold a shape; this one is float32"),
    ),
    "a size beyond what TensorRT counts": ("inputs: {x: [99999999999, 4]}", ("99999999999",)),
}


@pytest.mark.parametrize("name", PROFILES)
def test_profiles(name: str, watch: Watch) -> None:
    text, says = PROFILES[name]
    save_onnx(Path("model.onnx"), BODY.replace("[2,4]", "[b,4]").replace("[2,8]", "[b,8]"), w=WEIGHT)
    Path("p.yaml").write_text(text)
    error = watch.refusal(["build", "model.onnx", "--profile", "p.yaml"])
    for piece in says:
        assert piece in error
