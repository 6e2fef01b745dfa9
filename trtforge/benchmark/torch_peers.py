"""The same block in PyTorch: what a user has without the plugin.

All take the operands in T; of an int8 block the weights that its codes stand for, in fp16.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.implementations import Mode
from trtforge.benchmark.operands import EPSILON, ROLES, Operands, softmax_scale
from trtforge.benchmark.reference import K_RMS_OF_PEERS

# By name, in the order of a report; the slow one to prepare last.
TORCH_PEERS = {
    "eager": "PyTorch eager, attention unfused (matmul, add, softmax, matmul); linears as torch chooses",
    "sdpa": "PyTorch eager with scaled_dot_product_attention",
    "cublaslt": "PyTorch eager, attention unfused, every product by cuBLASLt where torch can (preferred BLAS library); "
    "torch fuses the bias into a linear's product there, not the activation",
    "compile": "torch.compile (fullgraph, static shapes) of the same with scaled_dot_product_attention",
}


class TorchBlock:
    """One way in which PyTorch computes a block.

    Args:
        name: of `TORCH_PEERS`.
        device: "cuda", or "cpu" for tests of the arithmetic.
        stream: a cudaStream_t to launch on; None for torch's own.
    """

    is_quantized = False
    rms_limit = K_RMS_OF_PEERS

    def __init__(
        self, name: str, case: BlockCase, operands: Operands, device: str = "cuda", stream: int | None = None
    ) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.name = name
        self.case = case
        self.device = device
        self.stream = None if stream is None else self.torch.cuda.ExternalStream(stream)
        self.type = self.torch.bfloat16 if case.element_type == "bf16" else self.torch.float16
        names = [
            key for key in operands.values if not key.startswith("w_") and key not in ("lengths", "attention_bias")
        ]
        self.values = {key: self._tensor(operands.values[key]) for key in names}
        # torch's linear keeps a weight as [columns, K].
        self.weights = {role: self._tensor(np.ascontiguousarray(operands.weight(role).T)) for role in ROLES}
        self.mask = self._mask(operands)
        self.y: Any = None
        self._compute_compiled: Callable[[Any], Any] | None = None  # takes many seconds, so once for both modes

    def prepare(self, mode: Mode) -> Callable[[], None]:
        """A call that computes the block on the stream."""
        if self.name == "compile" and self._compute_compiled is None:
            self._compute_compiled = self._compiled()
        compute = self._compute_compiled or self._compute
        x = self.values["x"]

        def run() -> None:
            with self._on_stream():
                self.y = compute(x)

        if mode == "call":
            return run
        run()  # libraries allocate and choose kernels in a first call, which cannot be captured
        run()
        graph = self.torch.cuda.CUDAGraph()
        with self._on_stream():
            self.torch.cuda.synchronize()
            with self.torch.cuda.graph(graph, stream=self.stream):
                self.y = compute(x)

        def replay() -> None:
            with self._on_stream():
                graph.replay()

        return replay

    def output(self) -> Any:
        """What the last call gave. It computes padding too, which is no part of the result: it is made zero here."""
        y = self.y
        if self.case.mask == "lengths":
            y = y.clone()
            for sample, length in enumerate(self.case.lengths):
                y[sample, length:] = 0
        return y

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """No gradients, this stream, and the BLAS library of the peer, which is a setting of the whole process."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.torch.inference_mode())
            if self.stream is not None:
                stack.enter_context(self.torch.cuda.stream(self.stream))
            if self.name == "cublaslt" and self.device == "cuda":
                before = self.torch.backends.cuda.preferred_blas_library()
                self.torch.backends.cuda.preferred_blas_library("cublaslt")
                stack.callback(self.torch.backends.cuda.preferred_blas_library, before)
            yield

    def _compiled(self) -> Callable[[Any], Any]:
        # Without this, dynamo gives up after a few shapes and runs eagerly, without a word.
        self.torch._dynamo.reset()
        compiled: Callable[[Any], Any] = self.torch.compile(self._compute, fullgraph=True, dynamic=False)
        return compiled

    def _tensor(self, values: Any) -> Any:
        return self.torch.as_tensor(values, device=self.device).to(self.type)

    def _mask(self, operands: Operands) -> Any:
        """What is added to the scores, or None; of a causal block only where attention is not told so."""
        case, torch = self.case, self.torch
        if case.mask == "bias":
            return self._tensor(operands.values["attention_bias"])
        if case.mask == "lengths":
            lengths = torch.as_tensor(operands.values["lengths"], device=self.device)
            is_key = torch.arange(case.sequence, device=self.device)[None] < lengths[:, None]
            return torch.where(is_key, 0.0, -math.inf).to(self.type)[:, None, None, :]
        if case.mask == "causal" and not self._is_fused:
            hidden = torch.full((case.sequence, case.sequence), -math.inf, device=self.device)
            return torch.triu(hidden, diagonal=1).to(self.type)
        return None

    @property
    def _is_fused(self) -> bool:
        return self.name in ("sdpa", "compile")

    def _compute(self, x: Any) -> Any:
        if self.case.order == "pre":
            h = x + self._attention(self._norm(x, "ln1"))
            return h + self._ffn(self._norm(h, "ln2"))
        h = self._norm(x + self._attention(x), "ln1")
        return self._norm(h + self._ffn(h), "ln2")

    def _linear(self, x: Any, role: str) -> Any:
        return self.torch.nn.functional.linear(x, self.weights[role], self.values[f"b_{role}"])

    def _norm(self, x: Any, name: str) -> Any:
        gamma, beta = self.values[f"{name}_gamma"], self.values[f"{name}_beta"]
        return self.torch.nn.functional.layer_norm(x, (self.case.width,), gamma, beta, EPSILON)

    def _attention(self, x: Any) -> Any:
        case = self.case
        packed = self._linear(x, "qkv").view(case.batch, case.sequence, 3, case.num_heads, case.head_size)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        scale = softmax_scale(case)
        if self._is_fused:
            attend = self.torch.nn.functional.scaled_dot_product_attention
            context = attend(q, k, v, attn_mask=self.mask, is_causal=case.mask == "causal", scale=scale)
        else:
            scores = (q @ k.transpose(-1, -2)) * scale
            scores = scores if self.mask is None else scores + self.mask
            context = scores.softmax(-1) @ v
        return self._linear(context.transpose(1, 2).reshape(x.shape), "out")

    def _ffn(self, x: Any) -> Any:
        functional = self.torch.nn.functional
        up = self._linear(x, "up")
        activated = {
            "gelu": functional.gelu,
            "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
            "relu": functional.relu,
            "silu": functional.silu,
        }[self.case.activation](up)
        return self._linear(activated, "down")
