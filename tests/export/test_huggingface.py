"""Folders of tiny models with random weights, loaded in the test's own process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the export extra is not installed")
transformers = pytest.importorskip("transformers", reason="the export extra is not installed")

from trtforge.errors import InputError  # noqa: E402
from trtforge.export.folder import check_folder  # noqa: E402
from trtforge.export.huggingface import load_from_folder  # noqa: E402
from trtforge.export.torch_model import TorchModel  # noqa: E402
from trtforge.export.trace import trace  # noqa: E402
from trtforge.export.write import dim_ranges, write_onnx  # noqa: E402

TINY = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
Maker = Callable[[], Any]
BERT: Maker = lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, num_labels=3))  # noqa: E731


def save(folder: Path, make: Maker) -> Path:
    """A model as save_pretrained writes it."""
    torch.manual_seed(0)
    make().save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> TorchModel:
    """The folder as the export loads it."""
    trust = options.pop("trust_remote_code", False)
    found = check_folder(folder, trust)
    defaults: dict[str, Any] = {"layout": None, "input_names": None}
    return load_from_folder(
        found.path, found.architecture, pooling=found.pooling, trust_remote_code=trust, **defaults | options
    )


def dims(model: TorchModel) -> dict[str, tuple[int | str, ...]]:
    """The dims of every input."""
    return {item.name: item.dims for item in model.inputs}


@pytest.mark.parametrize(
    ("make", "inputs", "outputs"),
    [
        (
            BERT,
            dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ("batch", "seq")),
            ["logits"],
        ),
        (
            lambda: transformers.RobertaForQuestionAnswering(
                transformers.RobertaConfig(**TINY, type_vocab_size=1, pad_token_id=1)
            ),
            dict.fromkeys(("input_ids", "attention_mask"), ("batch", "seq")),
            ["start_logits", "end_logits"],
        ),
        (
            lambda: transformers.ViTModel(
                transformers.ViTConfig(
                    hidden_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    intermediate_size=32,
                    image_size=[16, 24],
                    patch_size=8,
                )
            ),
            {"pixel_values": ("batch", 3, 16, 24)},
            ["last_hidden_state", "pooler_output"],
        ),
        (
            lambda: transformers.WhisperForConditionalGeneration(
                transformers.WhisperConfig(
                    vocab_size=60,
                    d_model=16,
                    encoder_layers=1,
                    decoder_layers=1,
                    encoder_attention_heads=2,
                    decoder_attention_heads=2,
                    encoder_ffn_dim=32,
                    decoder_ffn_dim=32,
                    num_mel_bins=8,
                    max_source_positions=20,
                    pad_token_id=0,
                    bos_token_id=1,
                    eos_token_id=2,
                    decoder_start_token_id=1,
                )
            ),
            {"input_features": ("batch", 8, 40)},
            ["last_hidden_state"],
        ),
    ],
)
def test_inputs_and_outputs_follow_the_architecture(
    tmp_path: Path, make: Maker, inputs: dict[str, Any], outputs: list[str]
) -> None:
    model = load(save(tmp_path / "m", make))
    assert (dims(model), model.output_names) == (inputs, outputs)
    for sizes in (model.sizes, *model.other_sizes):
        assert len(model.run(model.inputs_at(sizes, 1))) == len(outputs)
    if "input_features" in inputs:
        assert "the encoder of WhisperForConditionalGeneration was exported; its decoder was not" in model.notes


def test_a_causal_model_is_a_prefill_of_any_length_that_its_positions_allow(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=40)
    model = load(save(tmp_path / "m", lambda: transformers.GPT2LMHeadModel(config)))
    assert dims(model) == dict.fromkeys(("input_ids", "attention_mask"), ("batch", "seq"))
    program, fixed = trace(model)
    ranges = dim_ranges(model, program)
    assert (fixed, ranges["seq"].max, ranges["batch"].max) == ([], 40, None)
    layout = dict.fromkeys(("input_ids", "attention_mask"), ("rows", "length"))
    assert load(tmp_path / "m", layout=layout).caps == {"length": 40}
    assert load(tmp_path / "m", layout=dict.fromkeys(layout, ("rows", 8))).caps == {}
    write_onnx(model, program, tmp_path / "m.onnx", 23)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for sizes in ({"batch": 1, "seq": 1}, {"batch": 3, "seq": 40}):
        inputs = model.inputs_at(sizes, 1)
        feeds = {item.name: value.numpy() for item, value in zip(model.inputs, inputs, strict=True)}
        np.testing.assert_allclose(session.run(None, feeds)[0], model.run(inputs)[0].numpy(), atol=1e-5)


def test_samples_are_padded_rows(tmp_path: Path) -> None:
    model = load(save(tmp_path / "m", BERT))
    ids, mask, segments = model.inputs_at({"batch": 2, "seq": 8}, 0)
    assert mask.sum(dim=1).tolist() == [8, 6]
    assert (ids[mask == 0] == 0).all()
    assert (ids[mask == 1] >= 5).all()
    assert segments[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_inputs_that_neither_profile_nor_data_knows_are_left_out(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", BERT)
    assert list(dims(load(folder, input_names=["input_ids", "attention_mask", "labels"]))) == [
        "input_ids",
        "attention_mask",
    ]
    assert len(dims(load(folder, input_names=["ids"]))) == 3
    layout = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ("b", 12))
    assert dims(load(folder, layout=layout)) == layout
    with pytest.raises(InputError, match="cannot be run on") as caught:
        load(folder, layout={"input_ids": ("b", 12)})
    assert "input_ids [2, 12], attention_mask [2, 16]" in caught.value.what
    with pytest.raises(InputError, match="gives input 'input_ids' 1 dims"):
        load(folder, layout={"input_ids": ("b",)})


def test_a_sentence_folder_gives_one_vector_per_sentence(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", lambda: transformers.BertModel(transformers.BertConfig(**TINY)))
    (folder / "modules.json").write_text("[]")
    (folder / "1_Pooling").mkdir()
    for mode in ("mean", "cls"):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
        model = load(folder)
        assert model.output_names == ["last_hidden_state", "sentence_embedding"]
        inputs = model.inputs_at({"batch": 2, "seq": 8}, 0)
        hidden, pooled = model.run(inputs)
        kept = int(inputs[1][1].sum())
        expected = hidden[1, :kept].mean(dim=0) if mode == "mean" else hidden[1, 0]
        assert torch.allclose(pooled[1], expected, atol=1e-6)


def test_weights_that_the_checkpoint_lacks_are_never_made_up(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", lambda: transformers.BertModel(transformers.BertConfig(**TINY)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(InputError, match="lacks weights of BertForSequenceClassification") as caught:
        load(folder)
    assert "classifier" in caught.value.why


def test_a_pooler_without_weights_is_left_out(tmp_path: Path) -> None:
    make = lambda: transformers.BertModel(transformers.BertConfig(**TINY), add_pooling_layer=False)  # noqa: E731
    assert load(save(tmp_path / "m", make)).output_names == ["last_hidden_state"]


def test_weights_that_the_class_has_no_place_for_are_told(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", BERT)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    assert "2 tensors of the checkpoint are not used, the first: classifier.bias" in load(folder).notes


def test_an_image_size_comes_from_config_preprocessor_or_profile(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    folder = save(tmp_path / "m", lambda: transformers.ResNetModel(config))
    with pytest.raises(InputError, match="how large the images are") as caught:
        load(folder)
    assert "pixel_values: [batch, 3, 224, 224]" in caught.value.fix
    layout = {"pixel_values": ("batch", 3, 32, 64)}
    assert dims(load(folder, layout=layout)) == layout
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 32}}))
    assert dims(load(folder)) == {"pixel_values": ("batch", 3, 32, 32)}


def test_classes_that_are_not_supported_say_what_is(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", BERT)
    config = json.loads((folder / "config.json").read_text())
    for name, what in (("NoSuchModel", "has no architecture 'NoSuchModel'"), ("Trainer", "has no architecture")):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(InputError, match=what) as caught:
            load(folder)
        assert "pixel_values" in caught.value.why
    bart = transformers.BartConfig(
        vocab_size=60,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    with pytest.raises(InputError, match="runs a decoder as well"):
        load(save(tmp_path / "b", lambda: transformers.BartForSequenceClassification(bart)))


def test_code_of_a_folder_runs_only_where_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "m", lambda: transformers.BertModel(transformers.BertConfig(**TINY)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["OwnModel"], "auto_map": {"AutoModel": "own_code.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "ran"
    (folder / "own_code.py").write_text(
        f"from pathlib import Path\nfrom transformers import BertModel\nPath({str(mark)!r}).touch()\n"
        "class OwnModel(BertModel):\n    pass\n"
    )
    with pytest.raises(InputError, match="is code of the folder") as caught:
        load(folder)
    assert "--trust-remote-code" in caught.value.fix
    assert not mark.exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert load(folder, trust_remote_code=True).output_names == ["last_hidden_state", "pooler_output"]
    assert mark.exists()


def test_a_known_class_is_transformers_own_whatever_the_auto_map_says(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", BERT)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "own_code.Config", "AutoModelForSequenceClassification": "own_code.BertForX"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    mark = tmp_path / "ran"
    (folder / "own_code.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
    assert load(folder).output_names == ["logits"]
    assert not mark.exists()
