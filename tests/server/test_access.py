"""Who gets in: API keys, CORS, limits; and what the refusals look like."""

from __future__ import annotations

import hashlib
import hmac
import threading

import anthropic
import httpx
import openai
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.server.auth import Auth
from jaxinfer.server.envelope import open_paths
from jaxinfer.server.options import ServerOptions
from tests.server.serving import TIMEOUT_S, RunningServer, running_server, wait_until

pytestmark = pytest.mark.timeout(60)
KEYS = ("sk-first", "sk-second")
BODY = {"prompt": "Hi", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def closed(tmp_path_factory) -> RunningServer:
    """A server with a key as a flag and two in a file."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text("# of the team\nsk-second\n\n  sk-third # Ann's\n")
    with running_server(ServerOptions(api_key=("sk-first",), api_key_file=str(file))) as running:
        running.load()
        yield running


@pytest.mark.parametrize("key", [*KEYS, "sk-third"])
def test_each_key_opens_in_each_clients_way(closed, key):
    for headers in ({"Authorization": f"Bearer {key}"}, {"X-Api-Key": key}):
        response = closed.http.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == 200, response.text
    client = openai.OpenAI(base_url=f"{closed.url}/v1", api_key=key, max_retries=0)
    assert client.completions.create(model="tiny", **BODY).choices[0].text == "Grü"
    claude = anthropic.Anthropic(base_url=closed.url, api_key=key, max_retries=0)
    message = {"role": "user", "content": "Hi"}
    assert claude.messages.create(model="tiny", max_tokens=4, messages=[message]).content


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer sk-firs"},
        {"Authorization": "Bearer sk-first2"},
        {"Authorization": "Basic sk-first"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer Ann's"},
        {"X-Api-Key": ""},
        {"Authorization": b"Bearer \xff"},
    ],
)
def test_anything_else_is_401_in_openais_words(closed, headers):
    response = closed.http.post("/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 401
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_api_key",
        None,
    )
    assert "API key" in error["message"] and "sk-" not in response.text
    assert response.headers["WWW-Authenticate"] == "Bearer" and response.headers["X-Request-Id"]


def test_clients_raise_their_authentication_error(closed):
    client = openai.OpenAI(base_url=f"{closed.url}/v1", api_key="no", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    claude = anthropic.Anthropic(base_url=closed.url, api_key="no", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        claude.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_only_what_the_server_says_of_itself_is_open(closed):
    for path in ("/health", "/ping", "/version", "/metrics", "/metrics/", "/openapi.json", "/docs"):
        assert path in open_paths()
        assert closed.http.get(path).status_code == 200, path
    for path in (
        *("/v1/models", "/v1/models/tiny", "/health/generate", "/v1/completions", "/tokenize"),
        *("/v1/nothing", "/nothing", "/%2fhealth", "/health/", "/%2e%2e/health", "/HEALTH"),
    ):
        assert closed.http.get(path).status_code == 401, path
    for path in ("/tokenize", "/detokenize", "/score", "/v1/embeddings"):
        assert closed.http.post(path, json={}).status_code == 401, path


def test_every_key_is_compared_in_constant_time(monkeypatch):
    """Whatever is given, every key is compared, as digests of one length, by `compare_digest`."""
    compared = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    auth = Auth(None, KEYS, ())
    for given, valid in (("sk-first", True), ("sk-second", True), ("x", False)):
        compared.clear()
        assert auth._is_valid(given) == valid
        digest = hashlib.sha256(given.encode()).digest()
        assert compared == [(digest, hashlib.sha256(key.encode()).digest()) for key in KEYS]


def test_a_key_file_that_holds_nothing_does_not_open_the_server(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for path, words in ((empty, "holds no key"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            ServerOptions(api_key_file=str(path)).keys()
    for key in ("", "two words", "nötig", "tab\t"):
        with pytest.raises(ConfigError, match="printable ASCII"):
            ServerOptions(api_key=(key,))


def test_keys_are_in_no_repr():
    assert "sk-first" not in repr(ServerOptions(api_key=KEYS))


def preflight(server: RunningServer, origin: str) -> httpx.Response:
    return server.http.options(
        "/v1/chat/completions",
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )


def test_a_browser_may_ask_from_anywhere_by_default_and_before_it_has_a_key(closed):
    response = preflight(closed, "https://any.example")
    assert response.status_code == 200
    assert response.headers["Access-Control-Allow-Origin"] in ("*", "https://any.example")
    refused = closed.http.get("/v1/models", headers={"Origin": "https://any.example"})
    assert refused.status_code == 401 and refused.headers["Access-Control-Allow-Origin"] == "*"
    assert "X-Request-Id" in refused.headers["Access-Control-Expose-Headers"]


def test_only_named_origins_may_ask():
    options = ServerOptions(
        allowed_origins=("https://ours.example",),
        allowed_methods=("GET", "POST"),
        allow_credentials=True,
    )
    with running_server(options) as server:
        server.load()
        assert preflight(server, "https://ours.example").status_code == 200
        assert preflight(server, "https://other.example").status_code == 400
        for origin, allowed in (("https://ours.example", True), ("https://other.example", False)):
            response = server.http.get("/v1/models", headers={"Origin": origin})
            assert response.status_code == 200
            assert ("Access-Control-Allow-Origin" in response.headers) == allowed
    with pytest.raises(ConfigError, match="named"):
        ServerOptions(allow_credentials=True)


def test_a_stream_too_many_is_429_and_a_slot_is_free_again_afterwards():
    with running_server(ServerOptions(max_concurrent_streams=2)) as server:
        server.load()
        server.runner.step_s = 0.005
        streams, readers = [], []
        try:
            for _ in range(2):
                stream = server.http.stream("POST", "/v1/completions", json=LONG)
                readers.append(stream.__enter__().iter_lines())  # dropping it would close it
                streams.append(stream)
                next(readers[-1])
            response = server.post("/v1/completions", LONG)
            assert response.status_code == 429 and response.headers["Retry-After"]
            assert response.json()["error"]["type"] == "RateLimitError"
            with pytest.raises(openai.RateLimitError):
                server.client.completions.create(model="tiny", prompt="Hi", stream=True)
            server.assert_works()  # what is no stream is not limited
        finally:
            for stream in streams:
                stream.__exit__(None, None, None)
        wait_until(lambda: server.state.streams.num_open == 0)
        # Neither errors, nor clients that leave, keep a slot.
        for body in ({**LONG, "n": 0}, {**LONG, "prompt": "x" * 10_000}, {**LONG, "max_tokens": 2}):
            for _ in range(3):
                server.post("/v1/completions", body)
        wait_until(lambda: server.state.streams.num_open == 0)
        server.assert_idle()


def test_a_full_queue_is_503_with_retry_after(own_server):
    own_server.load(max_num_seqs=1, max_waiting=1)
    own_server.runner.step_s = 0.005
    body = {**LONG, "stream": False}
    threads = [
        threading.Thread(target=own_server.post, args=("/v1/completions", body)) for _ in range(2)
    ]
    threads[0].start()
    wait_until(lambda: own_server.engine.stats.num_requests_running == 1)
    threads[1].start()
    wait_until(lambda: own_server.engine.stats.num_requests_waiting == 1)
    response = own_server.post("/v1/completions", body)
    assert response.status_code == 503 and response.headers["Retry-After"]
    own_server.runner.step_s = 0.0
    for thread in threads:
        thread.join(TIMEOUT_S)


def test_out_of_time_is_504_or_an_error_event_and_the_engine_is_free():
    with running_server(ServerOptions(request_timeout_s=0.4)) as server:
        server.load()
        server.runner.step_s = 0.02
        response = server.post("/v1/completions", {**LONG, "stream": False})
        assert response.status_code == 504
        assert response.headers["X-Should-Retry"] == "false"
        assert "0.4 s" in response.json()["error"]["message"]
        *_, error, done = server.events("/v1/completions", LONG)
        assert '"code":504' in error.replace(" ", "") and done == "[DONE]"
        server.assert_idle()
        server.runner.step_s = 0.0
        server.assert_works()
