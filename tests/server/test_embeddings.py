"""`/v1/embeddings` and `/v1/score`: vectors of texts, through the real client and raw."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse

from jaxinfer.server.options import ServerOptions
from tests.server.fakes import BOS, NAME, POISON, hidden_states
from tests.server.serving import RunningServer, running_server, wait_until
from tests.server.test_streaming import send

pytestmark = pytest.mark.timeout(60)
PATH = "/v1/embeddings"
TEXTS = ["Hi", "Grüße", "x" * 400]


def expected(text: str, pooling: str = "last") -> np.ndarray:
    states = hidden_states([BOS, *text.encode()])
    return states.mean(axis=0) if pooling == "mean" else states[-1]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def ask(server: RunningServer, **body) -> dict:
    response = server.post(PATH, {"input": "Hi", **body})
    assert response.status_code == 200, response.text
    if body.get("encoding_format") != "base64":  # of which the client's type does not know
        CreateEmbeddingResponse.model_validate(response.json())
    return response.json()


def vectors(answer: dict) -> list:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


def test_sync_and_async_clients_get_unit_vectors_in_order(server):
    answer = server.client.embeddings.create(model=NAME, input=TEXTS)
    for entry, text in zip(answer.data, TEXTS, strict=True):
        np.testing.assert_allclose(entry.embedding, unit(expected(text)), rtol=1e-6)
    assert answer.usage.prompt_tokens == sum(1 + len(text.encode()) for text in TEXTS)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens

    async def run() -> list:
        async with server.async_client() as client:
            calls = (client.embeddings.create(model=NAME, input=text) for text in TEXTS)
            return [entry.data[0].embedding for entry in await asyncio.gather(*calls)]

    assert asyncio.run(run()) == [entry.embedding for entry in answer.data]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooling_is_the_requests_and_long_prompts_are_pooled_over_all_chunks(server, pooling):
    # 400 tokens take two steps of 256.
    answer = ask(server, input=TEXTS, pooling=pooling, use_activation=False)
    for vector, text in zip(vectors(answer), TEXTS, strict=True):
        np.testing.assert_allclose(vector, expected(text, pooling), rtol=1e-6)


def test_the_servers_pooling_is_the_default():
    with running_server(ServerOptions(pooling="mean")) as server:
        server.load()
        [vector] = vectors(ask(server, input="Grüße", normalize=False))
        np.testing.assert_allclose(vector, expected("Grüße", "mean"), rtol=1e-6)


def test_base64_is_little_endian_float32(server):
    [text] = vectors(ask(server, encoding_format="base64"))
    [floats] = vectors(ask(server, encoding_format="float"))
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == np.float32(floats).tolist()


@pytest.mark.parametrize(
    ("form", "ids"),
    [([72, 105], [[72, 105]]), ([[72], [73, 74]], [[72], [73, 74]]), (["H"], [[BOS, 72]])],
)
def test_input_forms(server, form, ids):
    got = vectors(ask(server, input=form, use_activation=False))
    assert got == [hidden_states(tokens)[-1].tolist() for tokens in ids]


def test_special_tokens_and_truncation(server):
    body = {"use_activation": False, "pooling": "mean", "input": "abcdef"}
    [plain] = vectors(ask(server, add_special_tokens=False, **body))
    np.testing.assert_allclose(plain, hidden_states(list(b"abcdef")).mean(axis=0), rtol=1e-6)
    [cut] = vectors(ask(server, truncate_prompt_tokens=3, **body))
    np.testing.assert_allclose(cut, hidden_states([BOS, *b"ef"]).mean(axis=0), rtol=1e-6)
    answer = ask(server, input="x" * 5000, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 511


def test_the_models_own_size_is_the_only_dimension(server):
    assert len(vectors(ask(server, dimensions=4))[0]) == 4
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.embeddings.create(model=NAME, input="Hi", dimensions=2)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("added", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [260]}, "input"),
        ({"input": "a" * 600}, "input"),
        ({"input": [65] * 512}, "input"),
        ({"input": ["a", "b" * 600]}, "input"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"normalize": "yes"}, "normalize"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_bad_requests_name_the_field(server, added, param):
    response = server.post(PATH, {"input": "Hi", **added})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    server.assert_idle()


def test_a_vector_that_is_no_number_is_an_error(server):
    response = server.post(PATH, {"input": [65, POISON]})
    assert response.status_code == 500 and "NaN" not in response.text.split("message")[0]
    assert server.post(PATH, {"input": [[65], [65, POISON]]}).status_code == 500
    server.assert_idle()
    server.assert_works()


def test_a_batch_larger_than_the_queue_is_served(own_server):
    own_server.load(max_num_seqs=2, max_waiting=2)
    assert len(ask(own_server, input=["a"] * 50)["data"]) == 50


def test_a_client_that_leaves_ends_its_vectors(own_server):
    own_server.runner.step_s = 0.01
    own_server.load(max_num_seqs=4)
    connection = send(own_server, PATH, {"input": ["a" * 200] * 1000})
    wait_until(lambda: own_server.engine.stats.num_requests_running > 0)
    connection.close()
    own_server.assert_idle()
    finished = own_server.engine.stats.finished
    assert finished["abort"] >= 1 and sum(finished.values()) < 1000
    own_server.assert_works()


def test_vectors_produce_no_tokens(server):
    before = server.series()["vllm:generation_tokens_total"]
    ask(server, input=TEXTS)
    assert server.series()["vllm:generation_tokens_total"] == before


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score_is_the_cosine(server, names, path):
    left, right = names
    for ones, others in (("Hi", "Ho"), ("Hi", TEXTS), (TEXTS, TEXTS[::-1])):
        response = server.post(path, {left: ones, right: others, "pooling": "mean"})
        assert response.status_code == 200, response.text
        rights = [others] if isinstance(others, str) else others
        lefts = [ones] * len(rights) if isinstance(ones, str) else ones
        cosines = [
            float(unit(expected(a, "mean")) @ unit(expected(b, "mean")))
            for a, b in zip(lefts, rights, strict=True)
        ]
        data = response.json()["data"]
        assert [entry["object"] for entry in data] == ["score"] * len(rights)
        np.testing.assert_allclose([entry["score"] for entry in data], cosines, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": "a", "text_2": "b" * 600}, "text_2"),
        ({"queries": "a" * 600, "documents": "b"}, "queries"),
        ({"queries": [""], "documents": "b"}, "queries"),
        ({"text_1": 5, "text_2": "b"}, "text_1"),
        ({"text_1": {"content": []}, "text_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_bad_scores_name_the_field(server, body, param):
    response = server.post("/v1/score", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
