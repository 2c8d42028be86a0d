"""The files of the playground: what is served, to whom, and what they must not contain."""

from __future__ import annotations

import re

import pytest

from jaxinfer.server.field_table import FATES
from jaxinfer.server.fields import Implemented
from jaxinfer.server.options import ServerOptions
from jaxinfer.server.playground import STATIC, paths
from tests.server.serving import running_server

FILES = {file.name: file.read_text(encoding="utf-8") for file in STATIC.iterdir()}


def test_every_file_is_served_under_a_strict_policy(server):
    assert "/" in paths() and len(paths()) == len(FILES)
    for path in sorted(paths()):
        response = server.http.get(path)
        assert response.status_code == 200, path
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        again = server.http.get(path, headers={"If-None-Match": response.headers["ETag"]})
        assert again.status_code == 304 and again.content == b""
        assert server.http.head(path).status_code == 200
    assert server.http.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert server.http.get("/static/app.js").headers["content-type"].startswith("text/javascript")
    for path in ("/static/", "/static/nothing.js", "/static/../app.py", "/static/%2e%2e/app.py"):
        assert server.http.get(path).status_code == 404, path


def test_what_a_file_names_is_served_too(server):
    named = set(re.findall(r'(?:src|href)="(static/[^"]+)"', FILES["index.html"]))
    for name, text in FILES.items():
        if name.endswith(".js"):
            named |= {f"static/{other}" for other in re.findall(r'from "\./([^"]+)"', text)}
    assert {f"/{path}" for path in named} | {"/"} == paths()


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_reaches_outside_or_makes_markup_of_text(name):
    text = FILES[name].replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z]+\.|@import|\burl\(", text)
    assert not re.search(r"(inner|outer)HTML|insertAdjacent|document\.write|\beval\b", text)
    assert not re.search(r"\bstyle=|\bon[a-z]+=", text)


def test_it_serves_without_a_key_and_can_be_switched_off():
    with running_server(ServerOptions(api_key=("secret",))) as closed:
        assert all(closed.http.get(path).status_code == 200 for path in paths())
        assert closed.http.get("/static/nothing.js").status_code == 401
    with running_server(ServerOptions(playground=False)) as without:
        assert all(without.http.get(path).status_code == 404 for path in paths())
    with running_server(ServerOptions(playground=False, api_key=("secret",))) as both:
        assert both.http.get("/").status_code == 401


def test_its_controls_are_fields_of_a_chat_request():
    names = set(re.findall(r'name: "(\w+)"', FILES["settings.js"]))
    assert {"temperature", "top_p", "seed", "max_tokens"} < names
    assert all(isinstance(FATES["chat"][name], Implemented) for name in names)
