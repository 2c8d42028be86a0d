"""Sockets: TLS, Unix sockets, header limits, and clients that stop sending or reading."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.run import serve
from tests.server.serving import TIMEOUT_S, RunningServer, running_server, wait_until

pytestmark = pytest.mark.timeout(60)
LONG = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def post(body: bytes, length: int | None = None) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % (len(body) if length is None else length)
    ) + body


def only_ours_is_open(server: RunningServer) -> bool:
    """Whether all clients are gone but the test's own, which is kept for its next request."""
    return len(server.server.server_state.connections) <= 1


def read_all(client: socket.socket) -> bytes:
    data = b""
    while chunk := client.recv(65536):
        data += chunk
    return data


@pytest.fixture(scope="module")
def hasty() -> Iterator[RunningServer]:
    """A server that waits half a second for a client."""
    options = ServerOptions(
        receive_timeout_s=0.5, send_timeout_s=0.5, keep_alive_timeout_s=5, max_header_bytes=4096
    )
    with running_server(options) as running:
        running.load()
        yield running


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        post(b'{"prompt": "H', length=100),
    ],
    ids=["nothing", "half a line", "half the headers", "half a body"],
)
def test_who_stops_sending_is_disconnected(hasty, sent):
    with connect(hasty) as client:
        client.sendall(sent)
        start = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
        assert time.monotonic() - start < 5
    wait_until(lambda: only_ours_is_open(hasty))
    hasty.assert_works()
    hasty.assert_idle()


def test_a_server_that_was_late_itself_reads_what_came_meanwhile(hasty):
    body = json.dumps({"prompt": "Hi", "max_tokens": 4, "temperature": 0}).encode()
    loop = hasty.server.servers[0].get_loop()
    with connect(hasty) as client:
        wait_until(lambda: len(hasty.server.server_state.connections) > 0)
        loop.call_soon_threadsafe(time.sleep, 1)  # longer than it waits for a request
        client.sendall(post(body))
        assert b" 200 OK" in client.recv(65536)


def test_a_body_that_comes_slowly_is_read_to_its_end(hasty):
    body = json.dumps({"prompt": "Hi", "max_tokens": 4, "temperature": 0}).encode()
    with connect(hasty) as client:
        request = post(body)
        cut = request.index(b"\r\n\r\n") + 4
        client.sendall(request[:cut])
        for i in range(cut, len(request), 10):  # longer in all than the limit for a part
            time.sleep(0.2)
            client.sendall(request[i : i + 10])
        assert b" 200 OK" in client.recv(65536)


def test_a_connection_is_kept_for_further_requests_while_they_come(hasty):
    with connect(hasty) as client:
        for _ in range(3):
            client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 OK" in client.recv(65536)
            time.sleep(0.6)  # idle for longer than a request may take to come


def test_who_does_not_read_is_disconnected(hasty):
    hasty.assert_works()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = hasty.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        # Answers of some 100 MB together: far more than the kernel's buffers hold.
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        wait_until(lambda: len(hasty.server.server_state.connections) > 1)
        wait_until(lambda: only_ours_is_open(hasty))
    hasty.assert_works()


def test_who_reads_slowly_gets_it_all(hasty):
    size = len(hasty.http.get("/openapi.json").content)
    count = 100
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(TIMEOUT_S)
        host, port = hasty.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * count)
        received, start = 0, time.monotonic()
        while received < count * size:
            part = client.recv(65536)
            assert part, f"closed after {received} of {count * size} bytes"
            received += len(part)
            # A while that is longer than the limit, in pieces that are not.
            if time.monotonic() - start < 2:
                time.sleep(0.02)


def test_headers_that_are_too_large_are_431(hasty):
    with connect(hasty) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 10_000)
        response = client.recv(65536)
    assert response.startswith(b"HTTP/1.1 431 ")
    body = json.loads(response.partition(b"\r\n\r\n")[2])
    assert body["error"]["code"] == 431 and "4096" in body["error"]["message"]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,  # TLS
        b"GET / HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_disconnected(hasty, garbage):
    with connect(hasty) as client:
        client.sendall(garbage)
        response = read_all(client)
    assert response.split(b" ")[1] in (b"400", b"404", b"501"), response
    hasty.assert_works()


def test_a_broken_body_in_the_middle_of_an_answer_closes_without_a_trace(hasty, caplog):
    head = post(b"", length=0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with connect(hasty) as client:
        client.sendall(head + b"5\r\nhello\r\nnot a length\r\n")
        read_all(client)
    wait_until(lambda: only_ours_is_open(hasty))
    hasty.assert_works()
    assert not [r for r in caplog.records if r.exc_info]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
        *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-keyout", str(key), "-out", str(cert)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("openssl, which makes the test's certificate, is not installed")
    return cert, key


def test_tls_serves_clients_that_trust_its_certificate(certificate):
    cert, key = certificate
    options = ServerOptions(ssl_certfile=str(cert), ssl_keyfile=str(key))
    with running_server(options) as server:
        server.load()
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        with httpx.Client(base_url=server.url, verify=trusting, timeout=TIMEOUT_S) as http:
            body = {"prompt": "Hi", "max_tokens": 4, "temperature": 0}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"] == "Grü"
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
                assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", timeout=TIMEOUT_S)  # trusts no such authority
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=TIMEOUT_S)


def test_clients_without_a_certificate_are_turned_away_if_one_is_asked_for(certificate):
    cert, key = certificate
    options = ServerOptions(ssl_certfile=str(cert), ssl_keyfile=str(key), ssl_ca_certs=str(cert))
    with running_server(options) as server:
        known = ssl.create_default_context(cafile=str(cert))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/version", verify=known, timeout=TIMEOUT_S)
        known.load_cert_chain(cert, key)
        response = httpx.get(f"{server.url}/version", verify=known, timeout=TIMEOUT_S)
        assert response.status_code == 200


def test_unix_socket_serves_and_one_left_behind_is_replaced(tmp_path):
    path = tmp_path / "jaxinfer.sock"
    with socket.socket(socket.AF_UNIX) as dead:  # its process ended and left the file
        dead.bind(str(path))
    options = ServerOptions(uds=str(path))
    with running_server(options) as server:
        server.load()
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost") as http:
            assert http.get("/health").json() == {"status": "ok"}
            body = {"prompt": "Hi", "max_tokens": 4, "temperature": 0}
            assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("kind", ["in use", "a file"])
def test_a_unix_socket_that_is_in_use_is_left_alone(tmp_path, capsys, kind):
    path = tmp_path / "jaxinfer.sock"
    with socket.socket(socket.AF_UNIX) as other:
        if kind == "in use":
            other.bind(str(path))
            other.listen()
        else:
            path.write_text("precious")
        with pytest.raises(SystemExit) as caught:
            serve(EngineConfig(), ServerOptions(uds=str(path)))
    assert caught.value.code == 2 and "Choose another --uds" in capsys.readouterr().err
    assert path.exists()


def test_files_for_tls_that_cannot_be_read_end_the_start_with_code_2(tmp_path, capsys):
    missing = str(tmp_path / "cert.pem")
    with pytest.raises(SystemExit) as caught:
        serve(EngineConfig(), ServerOptions(port=0, ssl_certfile=missing))
    assert caught.value.code == 2 and missing in capsys.readouterr().err
