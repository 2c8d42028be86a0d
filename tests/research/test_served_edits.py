"""Models changed by edits are served: by the asynchronous engine, and over HTTP by their names."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from jaxinfer import edits
from jaxinfer.async_engine import AsyncEngine
from jaxinfer.edit_files import load_edits, save_edits
from jaxinfer.errors import ConfigError, InvalidRequestError
from jaxinfer.server.options import ServerOptions
from tests.research.models import GREEDY, loaded_of, prompt_of, tokens
from tests.server.serving import running_server

D = 64
STEER = edits.add("layers.1.resid_post", np.linspace(-9, 9, D), coefficient=4.0)
# What depends on the prompt's length, and several at once.
MIXED = [
    edits.scale("embed", 1.5, where="generated"),
    edits.patch("layers.0.resid_post", np.ones((1, D)), [-1]),
    edits.ablate("layers.0.attn_heads", [0, 3], where=(1, 4)),
    edits.clamp("layers.1.mlp_out", -0.1, 0.1, where="prompt"),
]


@pytest.fixture(scope="module")
def expected(llama):
    """Tokens of one prompt: plain, steered, and under all kinds of edits."""
    ids = prompt_of("llama3", "short")
    found = tokens(llama.generate([ids] * 3, GREEDY, edits=[None, STEER, MIXED]))
    assert len(set(map(tuple, found))) == 3
    return ids, found


def test_edits_come_back_from_a_file_as_they_were(tmp_path, llama, expected):
    ids, (_, steered, mixed) = expected
    for several, wanted in ((STEER, steered), (MIXED, mixed)):
        save_edits(tmp_path / "some.npz", several)
        again = load_edits(tmp_path / "some.npz")
        assert tokens(llama.generate([ids], GREEDY, edits=[again])) == [wanted]
    for what in ([], "embed", [STEER, "embed"]):
        with pytest.raises(InvalidRequestError, match="expected edits"):
            save_edits(tmp_path / "some.npz", what)
    (tmp_path / "bad.npz").write_text("no npz")
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    for name in ("bad.npz", "other.npz", "missing.npz"):
        with pytest.raises(InvalidRequestError, match="holds no edits"):
            load_edits(tmp_path / name)
    np.savez(tmp_path / "old.npz", edits=np.array('{"version": 0, "edits": []}'))
    with pytest.raises(InvalidRequestError, match=r"^\S*old.npz was written by another version"):
        load_edits(tmp_path / "old.npz")


def test_the_asynchronous_engine_captures_and_edits_as_the_offline_one(llama, expected):
    ids, (plain, steered, mixed) = expected
    (offline,) = llama.generate([ids], GREEDY, capture="final", positions="prompt", edits=STEER)
    engine = AsyncEngine(loaded_of("llama3"))

    async def last(**hooks):
        stream = engine.generate(ids, GREEDY, final_only=True, hooks=hooks or None)
        return [output async for output in stream][-1]

    async def refused():
        with pytest.raises(InvalidRequestError, match="nothing is named"):
            await last(capture="layers.9.q")

    async def together():
        look = {"capture": "final", "positions": "prompt"}
        return await asyncio.gather(
            last(), last(edits=STEER, **look), last(edits=MIXED), last(edits=STEER), refused()
        )

    try:
        *outputs, _ = asyncio.run(asyncio.wait_for(together(), 120))
    finally:
        engine.shutdown()
    assert tokens(outputs) == [plain, steered, mixed, steered]
    seen = outputs[1].captures["final"]
    np.testing.assert_allclose(seen, offline.captures["final"], atol=1e-4)
    assert outputs[0].captures is None


def test_an_edited_model_has_a_name_of_its_own_over_http(tmp_path, expected):
    ids, (plain, steered, mixed) = expected
    save_edits(tmp_path / "a.npz", STEER)
    save_edits(tmp_path / "b.npz", MIXED)
    options = ServerOptions(edit=(f"steered={tmp_path}/a.npz", f"mixed={tmp_path}/b.npz"))
    body = {"prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    with running_server(options) as server:
        server.state.serve(loaded_of("llama3"))
        cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
        assert cards.keys() == {"llama3", "steered", "mixed"}
        assert cards["steered"]["parent"] == "llama3" == cards["mixed"]["root"]
        assert server.http.get("/v1/models/steered").json()["id"] == "steered"
        for name, wanted in (("llama3", plain), ("steered", steered), ("mixed", mixed)):
            answer = server.post("/v1/completions", {**body, "model": name}).json()
            assert answer["model"] == name
            assert answer["choices"][0]["token_ids"] == wanted
        vectors = [
            server.post("/v1/embeddings", {"model": name, "input": ids}).json()
            for name in ("llama3", "steered")
        ]
        one, other = (np.array(v["data"][0]["embedding"]) for v in vectors)
        assert np.abs(one - other).max() > 0.1
        missing = server.post("/v1/completions", {**body, "model": "other"})
    assert missing.status_code == 404
    assert "'llama3', 'steered', 'mixed'" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("steered", "NAME=FILE"),
        ("llama3={a}", "already"),
        ("steered={a}x", "holds no edits"),
        ("steered={wrong}", r"broadcast to \[64\]"),
    ],
)
def test_edits_that_cannot_be_served_are_refused_at_start(tmp_path, edit, words):
    save_edits(tmp_path / "a.npz", STEER)
    save_edits(tmp_path / "wrong.npz", edits.add("embed", np.ones(3)))
    edit = edit.format(a=tmp_path / "a.npz", wrong=tmp_path / "wrong.npz")
    with running_server(ServerOptions(edit=(edit,))) as server:
        with pytest.raises(ConfigError, match=words):
            server.state.serve(loaded_of("llama3"))
        assert server.http.get("/health").status_code == 503
