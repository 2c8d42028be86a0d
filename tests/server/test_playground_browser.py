"""The playground in a real browser, against a real server with a model that recites."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout

import pytest
from playwright.sync_api import Browser, expect

from jaxinfer.server.options import ServerOptions
from tests.server.browser import REFUSED, Playground, chromium, playground, stepped_server
from tests.server.fakes import REPLY
from tests.server.serving import RunningServer, events_of, wait_until

KEY = "sk-playground"
CONTROLS = {"button", "textbox", "spinbutton", "checkbox", "link", "listbox", "option"}
CONTROLS |= {"DisclosureTriangle", "dialog", "log", "image"}
STREAMED = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_progress": True,
}
DESKTOP = {"viewport": {"width": 1280, "height": 860}}
LOOKS = {
    "light": {**DESKTOP, "color_scheme": "light"},
    "dark": {**DESKTOP, "color_scheme": "dark"},
    "phone": {
        "viewport": {"width": 390, "height": 844},
        "is_mobile": True,
        "has_touch": True,
        "color_scheme": "light",
    },
}
# Of text against what is behind it, as WCAG defines it.
CONTRAST = """(node) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  let behind = node;
  while (rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const light = (colour) => rgb(colour).slice(0, 3)
    .map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0.05);
  const a = light(getComputedStyle(node).color);
  const b = light(getComputedStyle(behind).backgroundColor);
  return Math.max(a, b) / Math.min(a, b);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with stepped_server() as running:
        yield running


@pytest.fixture
def server(shared: RunningServer) -> Iterator[RunningServer]:
    shared.runner.reply = REPLY.encode()
    yield shared
    shared.runner.permit()
    shared.assert_idle()


@pytest.fixture
def at(browser: Browser, server: RunningServer) -> Iterator[Playground]:
    """The page; a test that ends well leaves nothing in the console."""
    with playground(browser, server, **DESKTOP) as opened:
        expect(opened.page.locator("#model")).to_contain_text("tiny")
        opened.page.get_by_label("Temperature").fill("0")
        yield opened
        assert opened.complaints == []


def test_an_answer_comes_in_pieces_and_says_how_fast_it_was(at, server):
    server.runner.hold()
    at.say("Hi")
    server.runner.permit(8)
    expect(at.text).to_contain_text("Grü")
    expect(at.answer).to_have_attribute("aria-busy", "true")
    expect(at.answer.locator(".stats")).to_contain_text(re.compile(r"TTFT \d"))
    assert REPLY not in at.text.text_content()
    server.runner.permit()
    expect(at.text).to_have_text(REPLY)
    expect(at.answer.locator(".stats")).to_contain_text(
        re.compile(r"TTFT .*s · [\d.]+ tokens/s · 40 tokens · complete")
    )
    at.ask("And again")
    assert [m["role"] for m in at.sent[1]["messages"]] == ["user", "assistant", "user"]
    assert at.sent[1]["messages"][1]["content"] == REPLY
    at.page.get_by_role("button", name="New chat").click()
    expect(at.page.locator("article")).to_have_count(0)
    at.ask("From the start")
    assert len(at.sent[2]["messages"]) == 1


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_stop_ends_the_request_on_the_server(at, server, how):
    # Longer than the context: an answer that is not stopped is not complete, however late the stop.
    server.runner.reply = b"Gr" + b"." * server.loaded.config.max_model_len
    server.runner.hold()
    ended = server.series()["vllm:request_success_total/abort"]
    at.say("Hi")
    server.runner.permit(6)
    expect(at.text).to_contain_text("Gr")
    if how == "button":
        at.page.get_by_role("button", name="Stop").click()
    elif how == "escape":
        at.page.keyboard.press("Escape")
    else:
        at.page.get_by_role("button", name="New chat").click()
    expect(at.page.get_by_role("button", name="Send")).to_be_enabled()
    # The model waits until the server has seen that nobody listens; then it is in one step.
    wait_until(lambda: server.state.streams.num_open == 0)
    num_steps = server.runner.num_steps
    server.runner.permit()
    server.assert_idle()
    assert server.series()["vllm:request_success_total/abort"] == ended + 1
    assert server.runner.num_steps <= num_steps + 1
    if how == "new chat":
        expect(at.page.locator("article")).to_have_count(0)
    else:
        expect(at.answer.locator(".stats")).to_contain_text("stopped")
        expect(at.text).to_have_text(re.compile(r"^Gr\.*$"))
    assert at.focused() == "prompt"


def test_a_filled_control_is_sent_and_an_empty_one_is_not(at):
    at.ask("Hi")
    plain = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **STREAMED}
    assert at.sent == [{**plain, "temperature": 0}]
    numbers = {"Temperature": 0.5, "Max tokens": 6, "Seed": 8, "Top p": 0.9, "Top k": 40}
    numbers |= {"Min p": 0.05, "Repetition penalty": 1.1, "Presence penalty": -1}
    numbers |= {"Frequency penalty": 2}
    for label, value in numbers.items():
        at.page.get_by_label(label, exact=True).fill(str(value))
    at.page.get_by_label("System prompt").fill("Be brief.")
    at.page.get_by_label("Stop strings").fill("END\n\n ###")
    at.page.get_by_label("Colour tokens").check()
    at.ask("Again")
    body = at.sent[1]
    system, *_, last = body.pop("messages")
    assert system == {"role": "system", "content": "Be brief."} and last["content"] == "Again"
    sampling = {label.lower().replace(" ", "_"): value for label, value in numbers.items()}
    chosen = {"stop": ["END", " ###"], "logprobs": True, "top_logprobs": 5}
    assert body == {"model": "tiny", **STREAMED, **sampling, **chosen}
    expect(at.answer.locator(".stats")).to_contain_text("6 tokens · cut at max tokens")
    at.page.get_by_role("button", name="Back to the model's defaults").click()
    at.page.get_by_label("Colour tokens").uncheck()
    at.page.get_by_role("button", name="New chat").click()
    at.ask("Hi")
    assert at.sent[2] == plain


@pytest.mark.parametrize("prefix", ["vllm", "jaxinfer"])
def test_the_panel_shows_what_the_engine_does(browser, prefix):
    options = ServerOptions(metrics_prefix=prefix)
    with stepped_server(options) as server, playground(browser, server) as at:
        expect(at.gauge("Running")).to_have_text("0")
        server.runner.hold()
        at.say("A question that fills more than one page of keys and values.")
        expect(at.gauge("Running")).to_have_text("1")
        expect(at.gauge("KV use")).not_to_have_text("0")
        server.runner.permit()
        expect(at.gauge("Running")).to_have_text("0")
        expect(at.gauge("Steps")).not_to_have_text("0")
        at.ask("The first question is in the cache by now.")
        expect(at.gauge("Cache hits")).to_have_text(re.compile("[1-9]"))
        running = at.page.get_by_role("img", name="Running: at most 1")
        assert running.locator(".line").get_attribute("d").count("L") >= 2
        at.screenshot(f"panel-{prefix}")
        assert at.complaints == []


def test_a_refusal_is_shown_in_words_at_its_control(at, server):
    at.page.get_by_label("Max tokens").fill("-3")
    at.say("Keep this")
    expect(at.error).to_contain_text("max_tokens")
    expect(at.page.get_by_label("Max tokens")).to_have_attribute("aria-invalid", "true")
    expect(at.message).to_have_value("Keep this")
    expect(at.page.locator("article")).to_have_count(0)
    at.page.get_by_label("Max tokens").fill("")
    at.message.press("Enter")
    expect(at.text).to_have_text(REPLY)
    expect(at.error).to_be_hidden()
    expect(at.page.locator("[aria-invalid]")).to_have_count(0)
    at.page.route("**/v1/chat/completions", lambda route: route.abort())
    at.say("Is anybody there?")
    expect(at.error).to_contain_text("does not answer")
    assert all(text.startswith(REFUSED) for text in at.complaints)
    at.complaints.clear()


def test_an_error_in_the_middle_keeps_what_came(browser):
    with stepped_server() as server, playground(browser, server) as at:
        at.page.get_by_label("Temperature").fill("0")
        server.runner.hold()
        at.say("Hi")
        server.runner.permit(8)
        expect(at.text).to_contain_text("Grü")
        server.runner.error = RuntimeError("the device is gone")
        server.runner.permit()
        expect(at.error).to_contain_text("The engine has stopped")
        expect(at.text).to_contain_text("Grü")
        expect(at.answer.locator(".stats")).to_contain_text("failed")


def test_a_key_is_asked_for_only_where_one_is_needed(browser, at):
    expect(at.page.get_by_label("API key")).to_be_hidden()
    options = ServerOptions(api_key=(KEY,))
    with stepped_server(options) as server, playground(browser, server) as closed:
        field = closed.page.get_by_label("API key")
        expect(field).to_be_focused()
        expect(closed.error).to_be_hidden()
        field.fill("sk-wrong")
        field.press("Enter")
        expect(closed.error).to_contain_text("Incorrect API key")
        closed.screenshot("key")
        field.fill(KEY)
        field.press("Enter")
        expect(closed.page.locator("#model")).to_contain_text("tiny")
        expect(field).to_be_hidden()
        expect(closed.error).to_be_hidden()
        closed.ask("Hi")
        for name in ("curl", "Python"):
            closed.page.get_by_role("button", name=f"Copy as {name}").click()
            code = closed.page.get_by_label("Code of the request").input_value()
            assert "JAXINFER_KEY" in code and KEY not in code
            closed.page.get_by_role("button", name="Close").click()
        assert all(text.startswith(REFUSED) for text in closed.complaints)


def test_what_a_model_writes_is_text_and_nothing_else(at, server):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b> &amp;"
    server.runner.reply = evil.encode()
    at.ask(evil)
    expect(at.text).to_have_text(evil)
    at.page.get_by_label("Colour tokens").check()
    at.ask(evil)
    assert at.text.text_content().startswith(evil)
    assert at.page.locator("#log").locator("img, script, b").count() == 0


def test_tokens_show_their_alternatives_to_pointer_and_keyboard(at):
    at.page.get_by_label("Colour tokens").check()
    at.ask("Hi")
    tokens = at.page.get_by_role("listbox")
    options = tokens.get_by_role("option")
    # Two bytes are one character and so one thing to point at; the end of sequence is none of it.
    assert "".join(options.all_text_contents()) == f"{REPLY}<257>"
    expect(options.last).to_have_class("rest")
    shown = {options.nth(i).get_attribute("class") for i in range(8)}
    assert len(shown) >= 3
    alternatives = at.page.get_by_role("tooltip")
    expect(alternatives).to_be_hidden()
    options.nth(4).hover()
    expect(alternatives).to_contain_text("%")
    at.message.hover()
    expect(alternatives).to_be_hidden()
    tokens.focus()
    at.page.keyboard.press("Home")
    expect(options.nth(0)).to_have_attribute("aria-selected", "true")
    expect(alternatives.locator(".taken")).to_have_text(re.compile("^G"))
    at.page.keyboard.press("ArrowRight")
    at.page.keyboard.press("ArrowRight")
    expect(options.nth(2)).to_have_text("ü")
    expect(options.nth(2)).to_have_attribute("aria-selected", "true")
    expect(alternatives.locator(".taken")).to_have_text([re.compile("c3"), re.compile("bc")])
    at.screenshot("tokens")


def test_a_copied_request_does_the_same_elsewhere(browser, at):
    at.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    at.page.get_by_label("Top k").fill("5")
    at.page.get_by_label("Stop strings").fill("Wör")
    at.message.fill('it\'s "quoted" $HOME \\n\nand more')
    at.page.get_by_role("button", name="Copy as Python").click()
    at.page.get_by_role("button", name="Copy", exact=True).click()
    expect(at.page.get_by_text("Copied.")).to_be_visible()
    code = at.page.evaluate("() => navigator.clipboard.readText()")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == REPLY.partition("Wör")[0]
    at.page.keyboard.press("Escape")
    at.page.get_by_role("button", name="Copy as curl").click()
    code = at.page.get_by_label("Code of the request").input_value()
    if shutil.which("curl"):
        ran = subprocess.run(["sh", "-c", code], capture_output=True, text=True, timeout=20)
        *chunks, (_, done) = events_of(ran.stdout)
        choices = [choice for _, data in chunks for choice in json.loads(data)["choices"]]
        assert done == "[DONE]"
        assert "".join(c["delta"].get("content", "") for c in choices) == printed.getvalue()


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(at):
    assert at.focused() == "temperature"  # where the fixture has left it
    at.page.reload()
    expect(at.message).to_be_focused()
    at.page.keyboard.type("one")
    at.page.keyboard.press("Shift+Enter")
    at.page.keyboard.type("two")
    expect(at.message).to_have_value("one\ntwo")
    assert at.sent == []
    at.page.keyboard.press("Enter")
    expect(at.answer).to_have_attribute("aria-busy", "false")
    assert at.sent[0]["messages"][0]["content"] == "one\ntwo"
    at.page.evaluate("() => { document.activeElement.blur(); getSelection().removeAllRanges(); }")
    at.page.locator("h1").click()
    reached = []
    while "send" not in reached:
        at.page.keyboard.press("Tab")
        reached.append(at.focused())
        assert len(reached) < 40, reached
    links, rest = reached[:2], reached[2:]
    assert links == ["HTTP interface", "Metrics"]
    ids = "system temperature max_tokens seed top_p top_k min_p repetition_penalty"
    ids += " presence_penalty frequency_penalty stop colour copy-curl copy-python clear log"
    assert [i for i in rest if re.fullmatch("[a-z_-]+", i)] == [*ids.split(), "prompt", "send"]


@pytest.mark.parametrize("look", LOOKS)
def test_it_can_be_read_by_everyone(browser, server, look):
    server.runner.reply = (
        b"An engine keeps the keys and values of every token in pages, so that no request has to "
        b"reserve room for the longest answer it might give.\n\nTwo requests that begin alike "
        b"share the pages of their beginning."
    )
    with playground(browser, server, **LOOKS[look]) as at:
        page = at.page
        page.get_by_label("Colour tokens").check()
        if look == "phone":
            assert not page.get_by_label("Temperature").is_visible()
            page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Temperature").fill("0")
        if look == "phone":
            page.get_by_text("Settings", exact=True).click()
        at.ask("What are pages for?")
        page.get_by_role("listbox").get_by_role("option").nth(30).hover()
        expect(at.gauge("Output") if look != "phone" else at.text).not_to_have_text("–")
        at.screenshot(look)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        dim = page.evaluate(CONTRAST.join(("() => (", ")(document.body)")))
        assert dim > 7
        for selector in (
            *("#model", "nav a", "label", ".help", ".stats", "article h2", ".user .text", "#send"),
            *(".legend", ".tokens .p9", ".tokens .p6", ".tokens .p3", ".tokens .p1", ".taken"),
        ):
            node = page.locator(selector).first
            ratio = node.evaluate(CONTRAST)
            assert ratio >= 4.5, f"{selector} has a contrast of {ratio:.1f}"
        page.get_by_role("button", name="Copy as curl").click()
        at.screenshot(f"{look}-snippet")
        page.evaluate(
            "() => { for (const hidden of ['key-form', 'error']) "
            "document.getElementById(hidden).hidden = false;"
            "document.querySelectorAll('details').forEach((d) => { d.open = true; });"
            "document.getElementById('snippet').close();"
            "document.getElementById('snippet').show(); }"
        )
        nodes = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
        controls = [n for n in nodes if not n["ignored"] and n["role"]["value"] in CONTROLS]
        assert len(controls) > 60
        assert [n for n in controls if not n.get("name", {}).get("value", "").strip()] == []
        assert at.complaints == []
