"""lm-eval's harness on jaxinfer: `simple_evaluate(model="jaxinfer", …)` once this is imported.

lm-eval finds models by name in a registry that packages cannot add to from outside, so importing
this module registers one, and running it is lm-eval's own command line with `--model jaxinfer`:

    python -m jaxinfer.lm_eval_adapter --model jaxinfer --model_args pretrained=… --tasks arc_easy

Needs the extra `lm-eval`. Knows `LLM` and lm-eval's `LM`; counts as its Hugging Face model does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.errors import ConfigError, InvalidRequestError
from jaxinfer.llm import LLM
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.scoring import windows

try:
    from lm_eval.api.model import LM  # pyrefly: ignore
    from lm_eval.api.registry import register_model  # pyrefly: ignore
except ImportError as error:
    raise ImportError(
        "lm-eval is not installed; install it with: pip install 'jaxinfer[lm-eval]'"
    ) from error

# What tasks may say of generation, besides the stop strings, their number and `do_sample`.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


@register_model("jaxinfer")
class JaxinferLM(LM):
    """A model served by jaxinfer, for lm-eval.

    Args:
        pretrained: As `LLM`'s model; None for the embedded default.
        llm: One that is loaded already, instead of a name and settings.
        max_gen_toks: Tokens to generate where a task does not say.
        batch_size: Not used: the engine batches all requests of a task by itself.
        max_batch_size: As `batch_size`.
        device: Not used: the device is JAX's, and lm-eval names one ("cuda:0") on any machine.
        settings: Fields of `EngineConfig`.

    Raises:
        ConfigError: As for `LLM`, or both an `llm` and settings of one are given.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        llm: LLM | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ):
        super().__init__()
        if llm is not None and (settings or pretrained is not None):
            raise ConfigError("give a loaded llm, or the name and settings of one, not both")
        self.llm = llm if llm is not None else LLM(pretrained, **settings)
        self.max_gen_toks = max_gen_toks

    @property
    def max_length(self) -> int:
        """Most tokens that a prediction sees, as lm-eval counts."""
        return self.llm.max_scored_tokens - 1

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval keeps templated requests."""
        return self.llm.model_name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the model's template, for the record of a run."""
        return str(self.llm.tokenizer.tokenizer_config().get("chat_template", ""))

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text."""
        return self.llm.tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy) of each (context, continuation).

        Of a pair that is too long the start of the context is left out.
        """
        pairs = []
        for context, continuation in (request.args for request in requests):
            ids, rest = self.llm.encode_pair(context, continuation)
            room = self.max_length + 1 - len(rest)
            if room < 1:
                raise InvalidRequestError(
                    f"a continuation of {len(rest)} tokens does not fit the context of "
                    f"{self.max_length}; raise max_model_len"
                )
            pairs.append((self._without_second_bos(ids)[-room:], rest))
        results = []
        for request, score in zip(
            requests, self.llm.score_all(pairs, use_tqdm=not disable_tqdm), strict=True
        ):
            results.append((score.logprob, score.is_greedy))
            self.cache_hook.add_partial("loglikelihood", request.args, results[-1])
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each whole text, behind BOS or the end token.

        A long text is cut as lm-eval cuts it: each window predicts as many tokens as it can.
        """
        parts, owners = [], []
        for index, request in enumerate(requests):
            (text,) = request.args
            ids = self.llm.tokenizer.encode(text, add_special_tokens=False)
            whole = [self.llm.prefix_token_id, *ids]
            for part in windows(whole, self.max_length + 1, self.max_length) if ids else ():
                parts.append(part)
                owners.append(index)
        sums: list[list[float]] = [[] for _ in requests]
        scores = self.llm.score_all(parts, use_tqdm=not disable_tqdm)
        for owner, score in zip(owners, scores, strict=True):
            sums[owner].append(score.logprob)
        totals = [math.fsum(logprobs) for logprobs in sums]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes behind each context, up to a stop string.

        Of a context that is too long the start is left out.

        Raises:
            InvalidRequestError: A task asks for what the sampler cannot do; it is named.
        """
        prompts, params = [], []
        for context, options in (request.args for request in requests):
            asked = self._params(options)
            room = self.max_length + 1 - (asked.max_tokens or 0)
            if room < 1:
                raise InvalidRequestError(
                    f"max_gen_toks={asked.max_tokens} leaves no room for a context in "
                    f"{self.max_length} tokens",
                    "max_gen_toks",
                )
            ids = self._without_second_bos(self.llm.tokenizer.encode(context))
            prompts.append({"prompt_token_ids": ids[-room:] or [self.llm.prefix_token_id]})
            params.append(asked)
        texts = []
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm) if prompts else []
        for request, output in zip(requests, outputs, strict=True):
            texts.append(output.outputs[0].text)
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _params(self, options: Mapping[str, Any]) -> SamplingParams:
        options = dict(options)
        until = options.pop("until", None)
        max_tokens = options.pop("max_gen_toks", self.max_gen_toks)
        sampled = options.pop("do_sample", options.get("temperature", 0) > 0)
        values = {name: options.pop(name) for name in _SAMPLING if name in options}
        if options:
            raise InvalidRequestError(
                f"a task asks for {', '.join(sorted(options))}, which jaxinfer does not have;"
                f" it has until, max_gen_toks, do_sample, {', '.join(_SAMPLING)}",
                min(options),
            )
        values["temperature"] = values.get("temperature", 1.0) if sampled else 0.0
        return SamplingParams(stop=until, max_tokens=max_tokens, **values)

    def _without_second_bos(self, ids: list[int]) -> list[int]:
        """Drop the BOS that the tokenizer put before one that a chat template wrote."""
        bos = self.llm.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyrefly: ignore

    cli_evaluate()
