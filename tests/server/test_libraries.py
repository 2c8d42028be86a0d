"""Libraries that people put in front of a server: LiteLLM and LangChain, if they are installed.

They are no development dependency, for they bring a hundred packages: `pip install '.[clients]'`.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.server.fakes import NAME, REPLY
from tests.server.serving import TIMEOUT_S

pytestmark = [
    pytest.mark.timeout(120),
    # Their own affair.
    pytest.mark.filterwarnings("ignore"),
]
MESSAGES = [{"role": "user", "content": "Hi"}]
NEEDS = "pip install '.[clients]' runs the libraries that people put in front"


def test_litellm_asks_whole_streamed_and_for_vectors(server):
    litellm = pytest.importorskip("litellm", reason=NEEDS)
    options = {"api_base": f"{server.url}/v1", "api_key": "none", "timeout": TIMEOUT_S}
    chat = {"model": f"openai/{NAME}", "messages": MESSAGES, "temperature": 0, **options}
    whole = litellm.completion(**chat)
    assert whole.choices[0].message.content == REPLY
    assert whole.choices[0].finish_reason == "stop"
    parts = litellm.completion(**chat, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == REPLY
    hosted = litellm.completion(**{**chat, "model": f"hosted_vllm/{NAME}"})
    assert hosted.choices[0].message.content == REPLY
    text = litellm.text_completion(
        model=f"text-completion-openai/{NAME}",
        prompt="Hi",
        temperature=0,
        max_tokens=100,
        **options,
    )
    assert text.choices[0].text == REPLY
    vectors = litellm.embedding(
        model=f"openai/{NAME}", input=["a", "b"], encoding_format="float", **options
    )
    assert [len(entry["embedding"]) for entry in vectors.data] == [4, 4]
    claude = litellm.completion(
        **{**chat, "model": f"anthropic/{NAME}", "api_base": server.url, "max_tokens": 100}
    )
    assert claude.choices[0].message.content == REPLY
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**chat, "temperature": -1})

    async def run() -> str:
        return (await litellm.acompletion(**chat)).choices[0].message.content

    assert asyncio.run(run()) == REPLY


def test_langchain_asks_whole_streamed_and_for_vectors(server):
    langchain_openai = pytest.importorskip("langchain_openai", reason=NEEDS)
    options = {"model": NAME, "base_url": f"{server.url}/v1", "api_key": "none"}
    chats = [
        langchain_openai.ChatOpenAI(temperature=0, max_retries=0, **options, **more)
        for more in ({}, {"use_responses_api": True})
    ]
    for chat in chats:
        answer = chat.invoke("Hi")
        assert answer.text == REPLY and answer.usage_metadata["output_tokens"] > 0
        assert "".join(part.text for part in chat.stream("Hi")) == REPLY

    async def run() -> list[str]:
        answers = await asyncio.gather(*(chat.ainvoke("Hi") for chat in chats))
        return [answer.text for answer in answers]

    assert asyncio.run(run()) == [REPLY] * 2
    vectors = langchain_openai.OpenAIEmbeddings(check_embedding_ctx_length=False, **options)
    assert [len(v) for v in vectors.embed_documents(["a", "b"])] == [4, 4]


def test_langchain_speaks_anthropics_dialect(server):
    langchain_anthropic = pytest.importorskip("langchain_anthropic", reason=NEEDS)
    chat = langchain_anthropic.ChatAnthropic(
        model=NAME, base_url=server.url, api_key="none", max_tokens=100, max_retries=0
    )
    assert chat.invoke("Hi", temperature=0).text == REPLY
    assert "".join(part.text for part in chat.stream("Hi", temperature=0)) == REPLY
