"""Prometheus queries over Triton's metrics.

Requests are counted at the models that clients call: a text model counts its requests, and each length bucket that it
calls counts them again. Times in queues are summed over all models, since a request waits in each that it passes.
"""

from __future__ import annotations

from collections.abc import Sequence

SUCCESS = "nv_inference_request_success"
FAILURE = "nv_inference_request_failure"
INFERENCES = "nv_inference_count"
EXECUTIONS = "nv_inference_exec_count"
REQUEST_TIME = "nv_inference_request_duration_us"
REQUEST_QUANTILES = "nv_inference_request_summary_us"
QUEUE_TIME = "nv_inference_queue_duration_us"
INPUT_TIME = "nv_inference_compute_input_duration_us"
INFER_TIME = "nv_inference_compute_infer_duration_us"
OUTPUT_TIME = "nv_inference_compute_output_duration_us"
PENDING = "nv_inference_pending_request_count"
CPU_USE = "nv_cpu_utilization"
CPU_MEMORY = "nv_cpu_memory_used_bytes"
CACHE_HITS = "nv_cache_num_hits_per_model"
CACHE_MISSES = "nv_cache_num_misses_per_model"
# Of the text models that trtforge packages.
TOKENS = "trtforge_text_tokens_total"
# Triton reports these where it sees a GPU.
GPU_USE = "nv_gpu_utilization"
GPU_MEMORY = "nv_gpu_memory_used_bytes"
GPU_MEMORY_TOTAL = "nv_gpu_memory_total_bytes"
GPU_POWER = "nv_gpu_power_usage"

# Requests per second below which a mean over requests is not meant; it also keeps a division by zero away.
_QUIET = 0.001


def model_matcher(names: Sequence[str]) -> str:
    """A label matcher for some models; their names hold no character that a regular expression reads."""
    return f'model=~"{"|".join(names)}"'


def rate(metric: str, matchers: str, window: str, by: str) -> str:
    """Sum of the increases per second."""
    return f"sum(rate({metric}{{{matchers}}}[{window}])) by ({by})"


def offered_requests(matchers: str, window: str, by: str) -> str:
    """Requests per second, answered or not: a server that rejects requests under load needs help all the more."""
    return f"{rate(SUCCESS, matchers, window, by)} + {rate(FAILURE, matchers, window, by)}"


def mean_ms(time_metric: str, matchers: str, entry_matchers: str, window: str, by: str) -> str:
    """Milliseconds per successful request, 0 where there is none."""
    time = rate(time_metric, matchers, window, by)
    return f"{time} / clamp_min({rate(SUCCESS, entry_matchers, window, by)}, {_QUIET}) / 1000"


def mean_batch(matchers: str, window: str, by: str) -> str:
    """Inferences per execution of the model."""
    return f"{rate(INFERENCES, matchers, window, by)} / {rate(EXECUTIONS, matchers, window, by)}"
