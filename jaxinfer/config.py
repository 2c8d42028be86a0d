"""Settings of an engine: one frozen record whose fields are also the flags of `jaxinfer serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from jaxinfer.errors import ConfigError
from jaxinfer.logits_processor import LogitsProcessor

DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "fp8_e4m3")
QUANTIZATIONS = ("int8",)
KERNELS = ("auto", "xla", "cpu")
SCHEDULING_POLICIES = ("fcfs", "priority")
ATTENTION_IMPLS = ("auto", "xla", "pallas", "triton", "mosaic", "interpret")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user asked for; "auto" and None are resolved once, by `jaxinfer.loading`.

    Attributes:
        model: A GGUF or safetensors file, a folder, a hub id, or None for the embedded default.
        tokenizer: Where the tokenizer comes from, if not from the model.
        dtype: Of weights and activations. "auto" is bfloat16, but float32 on a CPU without our
            kernels.
        kv_cache_dtype: Of keys and values in KV pages. "auto" is `dtype`. "int8" and "fp8_e4m3"
            take about half the memory of bfloat16: each token's keys and values of a head share a
            scale.
        quantization: Of the weights: "int8" keeps them in int8, the LM head included, and makes
            activations int8 for each product. None: weights are in `dtype`.
        kernels: "cpu" runs C++ kernels, which are compiled once, on first use; "xla" runs none.
            "auto" is "cpu" where that can be, on one CPU device with a compiler, else "xla".
        max_model_len: Longest prompt + output, tokens. None: the model's, or what the pages hold.
        max_num_seqs: Most sequences in one step.
        max_num_batched_tokens: Most tokens in one step; longer prompts are computed in chunks.
        max_num_mixed_tokens: Most tokens in a step in which sequences decode: beside them prompts
            are computed in smaller chunks, so that nobody's next token waits for a whole prompt.
            `max_num_batched_tokens` holds for these steps too.
            None: `max_num_batched_tokens`, but for servers on a CPU 128 (or twice `max_num_seqs`).
        num_decode_steps: While no request waits, up to so many tokens of each are computed in one
            dispatch, as many as take about 50 ms. 1: one at a time.
        page_size: Tokens per page of KV memory, a power of two.
        num_pages: Pages of KV memory. None: from `kv_cache_memory_bytes`.
        num_window_pages: Pages for the layers of each sliding window. None: what `max_num_seqs`
            need, within half of the memory.
        kv_cache_memory_bytes: Memory for the pages. None: a share of what the device has free.
        enable_prefix_caching: Share the pages of equal prefixes.
        scheduling_policy: "fcfs", or "priority" (lower `priority` first, then arrival).
        overlap: Dispatch a step before the tokens of the previous one reach the host.
        deterministic: A request's logits are bitwise the same alone, in any batch, in chunks, from
            the prefix cache and after preemption: every step computes the same number of tokens,
            `max_num_seqs` but at least 32, each with an attention of its own. Slower.
        warmup: Compile every bucket before serving. Off: compile on first use (tests, scripts).
        attention_impl: "auto" takes our kernels on GPUs that have them and XLA elsewhere; "pallas"
            insists on kernels, "triton" on the portable ones, "mosaic" on those for Hopper, "xla"
            on none; "interpret" runs the portable ones step by step on any device, for tests.
        tensor_parallel_size: Devices that share each layer.
        data_parallel_size: Replicas of the model, each on devices of its own, behind one server. A
            request goes to the one that has computed most of its prompt before.
        num_hosts: Processes, each with devices of its own, that hold the model together. The same
            command is given on each, with another `host_rank`.
        host_rank: This process's number, from 0. Number 0 serves, the others follow.
        coordinator_address: HOST:PORT at which number 0 is found by the others.
        host_timeout_s: A host that gives no answer for so long is given up, and the engine with it.
        expert_parallel: Of the devices that share a mixture of experts, so many divide the experts
            among them; the others of them divide each expert.
        seed: Makes the seeds of unseeded requests reproducible. None: random per process.
        max_logprobs: Most alternatives per token a request may ask for.
        logits_processors: Compiled at start, so that their first use is no surprise: names of
            built-in ones, or `module:name` of a `LogitsProcessor` or of a function that makes one.
        max_waiting: Most requests in the waiting queue; None for no limit.
        served_model_name: Name in the API; None takes the model's.
        compilation_cache_dir: Persistent XLA cache. None: the user's cache folder; "" turns it off.
    """

    model: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    kernels: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_num_mixed_tokens: int | None = None
    num_decode_steps: int = 8
    page_size: int = 16
    num_pages: int | None = None
    num_window_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    overlap: bool = True
    deterministic: bool = False
    warmup: bool = True
    attention_impl: str = "auto"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    num_hosts: int = 1
    host_rank: int = 0
    coordinator_address: str | None = None
    host_timeout_s: float = 20.0
    expert_parallel: int = 1
    seed: int | None = None
    max_logprobs: int = 20
    logits_processors: tuple[str | LogitsProcessor, ...] = ()
    max_waiting: int | None = None
    served_model_name: str | None = None
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _one_of("attention_impl", self.attention_impl, ATTENTION_IMPLS)
        _one_of("kernels", self.kernels, KERNELS)
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_mixed_tokens",
            "num_decode_steps",
            "page_size",
            "num_pages",
            "num_window_pages",
            "kv_cache_memory_bytes",
            "tensor_parallel_size",
            "data_parallel_size",
            "num_hosts",
            "expert_parallel",
            "max_waiting",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number ≥ 1, got {value!r}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size must be a power of two, got {self.page_size}")
        if self.max_logprobs < 0:
            raise ConfigError(f"max_logprobs must be ≥ 0, got {self.max_logprobs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or running sequences would starve"
            )
        mixed = self.max_num_mixed_tokens
        if mixed is not None and mixed < self.max_num_seqs:
            raise ConfigError(
                f"max_num_mixed_tokens ({mixed}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or running sequences would starve"
            )
        if not isinstance(self.host_rank, int) or self.host_rank < 0:
            raise ConfigError(f"host_rank must be a whole number ≥ 0, got {self.host_rank!r}")
        if not 0 < self.host_timeout_s < math.inf:
            raise ConfigError(f"host_timeout_s must be > 0 and finite, got {self.host_timeout_s}")

    def for_throughput(self) -> EngineConfig:
        """Return these settings for a face whose callers wait for whole batches, not for tokens."""
        mixed = self.max_num_mixed_tokens or self.max_num_batched_tokens
        return replace(self, max_num_mixed_tokens=mixed)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The settings, in the order in which help texts list them."""
        return tuple(f.name for f in fields(cls))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
