"""A checked Hugging Face folder as a model that can be traced; in the child process only, never from the network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtforge.errors import InputError, missing_extra
from trtforge.export.huggingface_inputs import InputPlan, plan_inputs
from trtforge.export.torch_model import Dims, ModelInput, TorchModel, reason_of
from trtforge.user_code import USER_ERRORS

SUPPORTED = (
    "text models by input_ids (bare, sequence and token classification, question answering, masked language models, "
    "and causal ones as prefill without a cache), vision models by pixel_values, audio models by input_values or "
    "input_features, and the encoders of encoder-decoder models"
)
# Fields of a model's answer that are no result of it.
_NOT_RESULTS = {"loss", "past_key_values", "hidden_states", "attentions", "cross_attentions"}


class _Head(nn.Module):
    """A transformers model called by position, whose answer is the tuple of its tensors.

    Args:
        model: the model.
        input_names: of its keyword arguments, in order.
        pooling: "mean" or "cls" adds one vector per sequence, made of the last hidden state.
    """

    def __init__(self, model: nn.Module, input_names: tuple[str, ...], pooling: str | None) -> None:
        super().__init__()
        self.module = model
        self._input_names = input_names
        self._pooling = pooling

    def results(self, *xs: Tensor) -> dict[str, Tensor]:
        """The answer's tensors by name."""
        feeds = dict(zip(self._input_names, xs, strict=True))
        answer = self.module(**feeds, return_dict=True)
        found = {key: value for key, value in answer.items() if isinstance(value, Tensor) and key not in _NOT_RESULTS}
        if self._pooling is None:
            return found
        hidden = answer["last_hidden_state"]
        return {"last_hidden_state": hidden, "sentence_embedding": self._pool(hidden, feeds["attention_mask"])}

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Call the model."""
        return tuple(self.results(*xs).values())

    def _pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """`[batch, seq, width]` to `[batch, width]`; a row without a token gives zeros."""
        if self._pooling == "cls":
            return hidden[:, 0]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)


def load_from_folder(
    folder: Path,
    architecture: str,
    *,
    pooling: str | None,
    trust_remote_code: bool,
    layout: Mapping[str, Dims] | None,
    input_names: Iterable[str] | None,
) -> TorchModel:
    """Load the model that config.json names, in fp32.

    Args:
        folder: holds config.json and safetensors files; see folder.py for what was checked.
        architecture: the class.
        pooling: see `ModelFolder`.
        trust_remote_code: run the code of the folder where transformers does not have the class.
        layout: the dims of each input that the profile file gives.
        input_names: inputs that the profile or the data knows; optional ones outside of them are left out.

    Raises:
        InputError: an architecture that is not supported, or weights that do not fit it.
    """
    try:
        import transformers
    except ImportError as err:
        raise missing_extra("transformers", "export") from err
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, notes = _load(transformers, folder, architecture, trust_remote_code)
    config = model.config
    encoder, encoder_notes = _encoder_of(model, architecture)
    plan = plan_inputs(encoder, config, folder, layout, input_names, SUPPORTED)
    if pooling is not None and "attention_mask" not in plan.names:
        pooling = None
    head = _Head(encoder.eval(), plan.names, pooling)
    result = _as_torch_model(head, plan, architecture, [*notes, *encoder_notes])
    result.notes += [f"sentence_embedding is the {pooling} pooling, not normalised"] if pooling else []
    return result


def _as_torch_model(head: _Head, plan: InputPlan, architecture: str, notes: list[str]) -> TorchModel:
    model = TorchModel(
        module=head,
        inputs=list(plan.inputs),
        sample=plan.sample,
        sizes=dict(plan.sizes),
        other_sizes=[dict(plan.other_sizes)] if plan.sizes else [],
        fixed_sizes={},
        output_names=None,
        architecture=architecture,
        caps=_position_caps(head.module, plan.inputs),
        notes=notes,
    )
    try:
        with torch.inference_mode():
            model.output_names = list(head.results(*model.inputs_at(model.sizes, 0)))
    except USER_ERRORS as err:
        shapes = ", ".join(f"{item.name} {list(item.shape(model.sizes))}" for item in model.inputs)
        raise InputError(
            f"{architecture} cannot be run on {shapes}",
            reason_of(err),
            "give the shapes that it takes with --profile, or wrap the model in package.module:function",
        ) from err
    if not model.output_names:
        raise InputError(f"{architecture} returns no tensor", f"supported are {SUPPORTED}", "wrap it in a function")
    return model


def _position_caps(model: nn.Module, inputs: Iterable[ModelInput]) -> dict[str, int]:
    """The longest sequence by the tables of learned positions, without the places that they keep for padding.

    By the name of the dim that holds the sequence: the profile file may call it as it likes.
    """
    sizes = [
        module.num_embeddings
        - (0 if module.padding_idx is None else module.padding_idx + 1)
        - getattr(module, "offset", 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    lengths = {item.dims[1] for item in inputs if item.name == "input_ids"}
    return {length: min(sizes) for length in lengths if isinstance(length, str) and sizes}


def _load(transformers: Any, folder: Path, architecture: str, trust_remote_code: bool) -> tuple[Any, list[str]]:
    """The model, and what of the checkpoint it does not use."""
    options = {
        "local_files_only": True,
        "use_safetensors": True,
        "dtype": torch.float32,
        # MatMul, Softmax, MatMul: the builder fuses that, mask included, in fewer kernels than `Attention`.
        "attn_implementation": "eager",
        "output_loading_info": True,
    }
    cls: Any = getattr(transformers, architecture, None)
    is_known = isinstance(cls, type) and issubclass(cls, nn.Module)
    if not is_known and not trust_remote_code:
        raise _unknown(folder, architecture)
    try:
        if is_known:
            # The class is transformers' own, so no code of the folder runs, whatever its auto_map says.
            options["config"] = cls.config_class.from_pretrained(folder, local_files_only=True)
        else:
            cls, options["trust_remote_code"] = _auto_class(transformers, folder, architecture), True
        loaded = cls.from_pretrained(folder, **options)
    except InputError:
        raise
    except USER_ERRORS as err:
        raise InputError(
            f"{architecture} cannot be loaded from {folder}",
            reason_of(err),
            "check that the folder loads with transformers' from_pretrained(folder)",
        ) from err
    model, info = loaded
    missing = sorted(str(name) for name in info["missing_keys"])
    drops_pooler = [name for name in missing if name.startswith(("pooler.", f"{model.base_model_prefix}.pooler."))]
    if drops_pooler == missing and missing and hasattr(model, "pooler"):
        model.pooler = None
    elif missing:
        raise InputError(
            f"{folder} lacks weights of {architecture}",
            f"{len(missing)} tensors would be made up at random, the first: {', '.join(missing[:3])}",
            "give the folder of a model that was trained for this task",
        )
    for name in ("use_cache", "output_hidden_states", "output_attentions"):
        if getattr(model.config, name, None):
            setattr(model.config, name, False)
    unused = sorted(str(name) for name in info["unexpected_keys"])
    notes = [f"{len(unused)} tensors of the checkpoint are not used, the first: {unused[0]}"] if unused else []
    return model, notes


def _auto_class(transformers: Any, folder: Path, architecture: str) -> Any:
    """The Auto class that the folder's `auto_map` maps to its own code."""
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=True)
    auto_map = getattr(config, "auto_map", None) or {}
    names = [key for key, value in auto_map.items() if str(value).rpartition(".")[2] == architecture]
    cls = getattr(transformers, names[0], None) if names else None
    if cls is None:
        raise _unknown(folder, architecture)
    return cls


def _unknown(folder: Path, architecture: str) -> InputError:
    has_code = any(folder.glob("*.py"))
    if has_code:
        return InputError(
            f"{architecture} is code of the folder {folder}, not of transformers",
            "code that comes with a model is not run unless you say so",
            "read it, then give --trust-remote-code; or give a model that transformers has",
        )
    return InputError(
        f"transformers has no architecture {architecture!r}",
        f"supported are {SUPPORTED}",
        "install the transformers that the model needs, or wrap it in package.module:function",
    )


def _encoder_of(model: Any, architecture: str) -> tuple[Any, list[str]]:
    """The part that is exported: the whole model, or the encoder of an encoder-decoder."""
    if not getattr(model.config, "is_encoder_decoder", False) or architecture.endswith("EncoderModel"):
        return model, []
    if not architecture.endswith(("Model", "ForConditionalGeneration")):
        raise InputError(
            f"{architecture} runs a decoder as well",
            f"supported are {SUPPORTED}",
            "wrap the model in package.module:function with the inputs that you need",
        )
    return model.get_encoder(), [f"the encoder of {architecture} was exported; its decoder was not"]
