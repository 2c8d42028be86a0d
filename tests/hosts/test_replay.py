"""A follower that makes the leader's calls ends up with the leader's cache, whatever was asked."""

from __future__ import annotations

import dataclasses
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine import Engine
from jaxinfer.errors import HostLostError
from jaxinfer.hosts import Follower, Leader, LeadingEngine, LeadingRunner, replay
from jaxinfer.model_runner import ModelRunner
from jaxinfer.request import Pooling
from jaxinfer.resolution import resolve, runner_config
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sharding import make_mesh
from tests.engines import SMALL, FewBuckets, Work, loaded, run_tokens

TIMEOUT_S = 60.0
SETTINGS = {**SMALL, "max_num_batched_tokens": 16, "num_decode_steps": 4, "max_num_seqs": 4}


def work() -> dict[str, Work]:
    """Requests that need every program there is."""
    prompts = [tuple(3 + (13 * i + 7 * j) % 300 for j in range(3 + 9 * i)) for i in range(4)]
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=5, temperature=0.7, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=5, temperature=0.0, repetition_penalty=1.3, logit_bias={7: 2.0}),
        SamplingParams(max_tokens=5, temperature=0.7, min_tokens=3, bad_words_token_ids=((9,),)),
    ]
    return {
        str(i): Work(prompt, p, seed=i)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
    }


@pytest.mark.timeout(200)
def test_a_follower_computes_what_the_leader_does() -> None:
    _, model_config, model, parameters = loaded("llama3")
    config = resolve(EngineConfig(**{**SETTINGS, "warmup": False}), model_config)
    shapes = runner_config(config, model_config)
    fields = {f.name: getattr(shapes, f.name) for f in dataclasses.fields(shapes)}
    shapes = FewBuckets(**fields, sizes=(16,))
    args = (model_config, model, parameters, make_mesh(), shapes)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as beside:
        where = (*listener.getsockname(), b"s" * 16, 1, TIMEOUT_S)
        joined = beside.submit(Follower, *where)
        leader = Leader(listener, b"s" * 16, 1, TIMEOUT_S)
        follower = joined.result()
    follower.listen()
    plain, following = ModelRunner(*args), ModelRunner(*args)
    leading = LeadingRunner(*args, channel=leader)
    # Compiled once: what differs is the cache.
    leading.programs = following.programs = plain.programs
    thread = threading.Thread(target=replay, args=(following, follower), daemon=True)
    thread.start()
    facts = {"vocab_size": model_config.vocab_size, "eos_token_ids": frozenset({2})}
    engine = LeadingEngine(config, leading, **facts)
    assert run_tokens(engine, work()) == run_tokens(Engine(config, plain, **facts), work())
    one = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add_request("vector", [5, 6, 7], one, pooling=Pooling.MEAN)
    while engine.has_unfinished():
        engine.step()
    words = {key[0] for key in leading.programs.compiled._compiled}
    assert words == {"backbone", "sampler", "decode", "rows", "score", "pool"}
    engine.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    for a, b in zip(
        jax.tree.leaves((leading._cache, leading._last_sampled)),
        jax.tree.leaves((following._cache, following._last_sampled)),
        strict=True,
    ):
        assert np.array_equal(jax.device_get(a), jax.device_get(b))
    with pytest.raises(HostLostError, match="host 0 has ended"):
        follower.receive()
    follower.close()
