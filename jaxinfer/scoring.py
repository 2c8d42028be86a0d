"""What a model thinks of given text: log-probabilities, perplexity, choices, vectors.

Everything here is prompts of `LLM.generate` and arithmetic on what they bring back. The logits stay
on the device: of each position come the log-probability and the rank of the token that stands
there, 8 bytes whatever the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from jaxinfer.errors import InvalidRequestError
from jaxinfer.input_processor import Prompt
from jaxinfer.outputs import RequestOutput
from jaxinfer.request import Pooling
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.tokenizer import Tokenizer

type Text = str | Sequence[int]
type Progress = bool | Literal["always"]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Log-probabilities of a continuation, each given all that stands before it.

    Attributes:
        token_ids: The continuation.
        logprobs: One per token, natural logarithm, of the raw distribution.
        ranks: One per token, 1 for the likeliest of the vocabulary.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]

    @cached_property
    def logprob(self) -> float:
        """Of the whole continuation: the sum."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have produced it. Ties count as produced."""
        return all(rank == 1 for rank in self.ranks)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Which of several continuations the model finds likeliest, counted as lm-eval counts.

    Attributes:
        scores: One per choice.
        num_chars: Characters of each choice, by which `best_normalized` divides.
    """

    scores: tuple[Score, ...]
    num_chars: tuple[int, ...]

    @property
    def best(self) -> int:
        """Index of the choice with the highest log-probability: lm-eval's `acc`."""
        return int(np.argmax([score.logprob for score in self.scores]))

    @property
    def best_normalized(self) -> int:
        """Index of the highest log-probability per character: lm-eval's `acc_norm`."""
        per_char = [s.logprob / n for s, n in zip(self.scores, self.num_chars, strict=True)]
        return int(np.argmax(per_char))


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How well the model predicts a text.

    Attributes:
        logprob: Sum over the tokens that were scored, natural logarithm.
        num_tokens: How many those are.
        num_bytes: Bytes of the text in UTF-8; 0 if it came as token ids.
        num_windows: Prompts that were run for it.
    """

    logprob: float
    num_tokens: int
    num_bytes: int
    num_windows: int

    @property
    def perplexity(self) -> float:
        """Of the scored tokens: exp(-logprob / num_tokens), inf beyond what a float holds."""
        with np.errstate(over="ignore"):
            return float(np.exp(np.float64(-self.logprob / self.num_tokens)))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers; nan without a text."""
        return -self.logprob / math.log(2) / self.num_bytes if self.num_bytes else math.nan


class Scoring:
    """The methods of `jaxinfer.LLM` that score text instead of writing it."""

    tokenizer: Tokenizer

    def score(self, prompt: Text, continuation: Text) -> Score:
        """Return the log-probabilities of `continuation` behind `prompt`.

        See `score_all`, of which this is one pair.
        """
        (score,) = self.score_all([(prompt, continuation)])
        return score

    def score_all(
        self, pairs: Iterable[tuple[Text, Text]], *, use_tqdm: Progress = True
    ) -> list[Score]:
        """Return the log-probabilities of each pair's second part behind its first, batched.

        Prompts that begin alike are computed once, from the prefix cache.

        Args:
            pairs: (prompt, continuation), each text or token ids. Two texts are encoded together
                and cut where the prompt's own tokens end, spaces at its end being counted to the
                continuation, as lm-eval does. An empty prompt is the BOS token, or the end token of
                a model without one.
            use_tqdm: As for `generate`.

        Raises:
            InvalidRequestError: A continuation has no tokens, or a pair does not fit the context.
            EngineDeadError: As `generate`.
        """
        encoded = []
        for i, pair in enumerate(pairs):
            try:
                if isinstance(pair, str) or len(pair) != 2:
                    raise InvalidRequestError(
                        f"expected (prompt, continuation), got {pair!r:.80}", "pairs"
                    )
                encoded.append(self.encode_pair(*pair))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"pair {i}: {error}", error.param) from error
        return self._score_ids(encoded, use_tqdm)

    def rank_choices(
        self, prompt: Text, choices: Sequence[str], *, use_tqdm: Progress = True
    ) -> Ranking:
        """Return which of the `choices` the model finds likeliest behind `prompt`.

        Raises:
            InvalidRequestError: As `score_all`; or there is no choice, or an empty one.
        """
        texts = not isinstance(choices, str) and all(isinstance(c, str) and c for c in choices)
        if not texts or not choices:
            raise InvalidRequestError(
                f"choices must be a list of texts, none empty, got {choices!r:.80}", "choices"
            )
        scores = self.score_all([(prompt, choice) for choice in choices], use_tqdm=use_tqdm)
        return Ranking(scores=tuple(scores), num_chars=tuple(map(len, choices)))

    def perplexity(
        self,
        text: Text,
        *,
        window: int | None = None,
        stride: int | None = None,
        use_tqdm: Progress = True,
    ) -> Perplexity:
        """Return how well the model predicts a text of any length.

        A text longer than the window is cut into overlapping ones; each token is scored once, in
        the first window that holds it, so it sees at least `window - stride` tokens before it.
        The first token is scored behind BOS, if the tokenizer has one, else not at all.

        Args:
            text: A text, or its token ids.
            window: Tokens in a window; None for all that the context holds.
            stride: Tokens by which the windows move on, at most `window - 1`; None for half of it.
                Less costs more and gives each token more context.
            use_tqdm: As for `generate`.

        Raises:
            InvalidRequestError: The text has nothing to predict, or the sizes make no sense.
            EngineDeadError: As `generate`.
        """
        longest = self.max_scored_tokens
        window = longest if window is None else window
        stride = max(window // 2, 1) if stride is None else stride
        for name, size in (("window", window), ("stride", stride)):
            if not isinstance(size, int) or isinstance(size, bool):
                raise InvalidRequestError(f"{name} must be a whole number, got {size!r}", name)
        if not 2 <= window <= longest:
            raise InvalidRequestError(f"window must be in [2, {longest}], got {window}", "window")
        if not 1 <= stride < window:
            raise InvalidRequestError(
                f"stride must be in [1, {window - 1}], got {stride}", "stride"
            )
        ids = self._ids(text, "text")
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if len(ids) < 2:
            raise InvalidRequestError("text has no token to predict", "text")
        pairs = list(windows(ids, window, stride))
        scores = self._score_ids(pairs, use_tqdm)
        return Perplexity(
            logprob=math.fsum(score.logprob for score in scores),
            num_tokens=len(ids) - 1,
            num_bytes=len(text.encode()) if isinstance(text, str) else 0,
            num_windows=len(pairs),
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | str = Pooling.LAST,
        *,
        normalize: bool = False,
        use_tqdm: Progress = True,
    ) -> np.ndarray:
        """Return the model's last hidden states, pooled: float32 [D] of one prompt, [n, D] of n.

        They are what the head turns into logits: after the final norm.

        Args:
            prompts: As for `generate`.
            pooling: "last" for the state of the last token, "mean" for the mean over all.
            normalize: Scale each vector to length 1.
            use_tqdm: As for `generate`.

        Raises:
            InvalidRequestError: A prompt cannot be served, or there is no such pooling.
            EngineDeadError: As `generate`, or a prompt's states held a NaN.
        """
        if pooling not in tuple(Pooling):
            raise InvalidRequestError(
                f'pooling must be "last" or "mean", got {pooling!r}', "pooling"
            )
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        single, outputs = self._outputs_of(prompts, params, use_tqdm, Pooling(pooling))
        failed = [o.outputs[0].error for o in outputs if o.embedding is None]
        if failed:
            raise InvalidRequestError(f"a prompt has no vector: {failed[0]}", "prompts")
        vectors = np.array([o.embedding for o in outputs], np.float32)
        if normalize:
            lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return vectors[0] if single else vectors

    def _outputs_of(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams,
        use_tqdm: Progress,
        pooling: Pooling | None = None,
    ) -> tuple[bool, list[RequestOutput]]:
        """Run prompts; also return whether it was a single one."""
        raise NotImplementedError

    @property
    def max_scored_tokens(self) -> int:
        """Most tokens of a prompt and its continuation: the engine samples one more behind them."""
        raise NotImplementedError

    def _score_ids(self, pairs: Sequence[tuple[list[int], list[int]]], use_tqdm: Progress):
        prompts, params = [], []
        for context, continuation in pairs:
            prompts.append({"prompt_token_ids": context + continuation})
            params.append(
                SamplingParams(
                    max_tokens=1,
                    temperature=0.0,
                    detokenize=False,
                    prompt_logprobs=0,
                    prompt_logprobs_start=len(context),
                )
            )
        _, outputs = self._outputs_of(prompts, cast("Any", params), use_tqdm)
        return [_score(c, o) for (_, c), o in zip(pairs, outputs, strict=True)]

    def encode_pair(self, prompt: Text, continuation: Text) -> tuple[list[int], list[int]]:
        """Return the token ids of both parts, neither empty, as `score_all` says.

        Raises:
            InvalidRequestError: The continuation adds no token.
        """
        if isinstance(prompt, str) and isinstance(continuation, str) and prompt:
            bare = prompt.rstrip()
            context = self._ids(bare or prompt)
            rest = self._ids(prompt + continuation)[len(context) :]
        else:
            context = self._ids(prompt)
            rest = (
                self.tokenizer.encode(continuation, add_special_tokens=False)
                if isinstance(continuation, str)
                else self._ids(continuation, "continuation")
            )
        if not rest:
            raise InvalidRequestError(
                "the continuation adds no token to the prompt", "continuation"
            )
        return context or [self.prefix_token_id], rest

    def _ids(self, text: Text, name: str = "prompt") -> list[int]:
        if isinstance(text, str):
            return self.tokenizer.encode(text)
        several: Any = text.tolist() if hasattr(text, "tolist") else text
        if not isinstance(several, list | tuple | range):
            raise InvalidRequestError(f"expected a text or token ids, got {text!r:.80}", name)
        return list(several)  # that they are ids is checked where all prompts' are

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        bos = self.tokenizer.bos_token_id
        ends = self.tokenizer.eos_token_ids
        if bos is None and not ends:
            raise InvalidRequestError("prompt must not be empty: the model has no BOS", "prompt")
        return min(ends) if bos is None else bos


def windows(
    token_ids: Sequence[int], window: int, stride: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (context, scored tokens) so that each token but the first is scored exactly once."""
    end, scored = min(window, len(token_ids)), 1
    while True:
        start = max(end - window, 0)
        yield list(token_ids[start:scored]), list(token_ids[scored:end])
        if end == len(token_ids):
            return
        scored, end = end, min(end + stride, len(token_ids))


def _score(token_ids: Sequence[int], output: RequestOutput) -> Score:
    assert output.prompt_logprobs is not None, "asked for"
    entries = output.prompt_logprobs[-len(token_ids) :]
    found = [entry[i] for i, entry in zip(token_ids, entries, strict=True) if entry is not None]
    return Score(
        token_ids=tuple(token_ids),
        logprobs=tuple(lp.logprob for lp in found),
        ranks=tuple(lp.rank or 0 for lp in found),
    )
