"""A real browser, driven over its own protocol, and a model whose steps a test lets happen."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from jaxinfer.batch import StepPlan, StepResult
from jaxinfer.server.options import ServerOptions
from tests.server.fakes import RecitingRunner
from tests.server.serving import TIMEOUT_S, RunningServer, running_server

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
PLENTY = 100_000
# Chromium's own words for a status above 399; no page can keep them out of the console.
REFUSED = "Failed to load resource"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run a headless Chromium; skip the test where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        pytest.skip("needs a Chromium; .ci/install-chromium says how to get one")
    expect.set_options(timeout=1e3 * TIMEOUT_S)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable)
        try:
            yield browser
        finally:
            browser.close()


class SteppedRunner(RecitingRunner):
    """Takes a step only if it is permitted; the likelihood of a token depends on which it is.

    Attributes:
        num_steps: Taken so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self._permits = threading.Semaphore(PLENTY)

    def hold(self) -> None:
        """From now on, wait for each step."""
        self._permits = threading.Semaphore(0)

    def permit(self, num_steps: int = PLENTY) -> None:
        """Let so many steps happen."""
        self._permits.release(num_steps)

    def forward(self, plan: StepPlan) -> StepPlan:
        permitted = self._permits.acquire(timeout=TIMEOUT_S)
        assert permitted, "the test has forgotten to permit a step"
        self.num_steps += 1
        return super().forward(plan)

    def sample(self, plan: StepPlan, hidden: StepPlan) -> StepResult:
        step = super().sample(plan, hidden)
        varied = [
            entries
            and tuple(
                replace(entry, logprob=-0.3 * (token % 9))
                for token, entry in zip(tokens, entries, strict=True)
            )
            for tokens, entries in zip(step.token_ids, step.logprobs, strict=True)
        ]
        return replace(step, logprobs=tuple(varied))


class Playground:
    """The page, and what a person does with it.

    Attributes:
        page: Playwright's.
        sent: The bodies of the chat requests so far.
        complaints: What the console got: errors, warnings and exceptions.
    """

    def __init__(self, page: Page, url: str):
        self.page = page
        self.sent: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        page.on("request", self._on_request)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._on_console)
        page.goto(url)

    def _on_request(self, request: Any) -> None:
        if request.url.endswith("/chat/completions"):
            self.sent.append(request.post_data_json)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    @property
    def message(self) -> Any:
        return self.page.get_by_label("Message")

    @property
    def answer(self) -> Any:
        """The latest."""
        return self.page.locator("article.assistant").last

    @property
    def text(self) -> Any:
        return self.answer.locator(".text")

    @property
    def error(self) -> Any:
        return self.page.get_by_role("alert")

    def say(self, text: str) -> None:
        self.message.fill(text)
        self.message.press("Enter")

    def ask(self, text: str) -> None:
        """Say something and wait for the whole answer."""
        self.say(text)
        expect(self.answer).to_have_attribute("aria-busy", "false")

    def gauge(self, name: str) -> Any:
        return self.page.get_by_role("status", name=name, exact=True)

    def focused(self) -> str:
        """Return the id of what has the focus, or its text."""
        return self.page.evaluate(
            "() => document.activeElement.id || document.activeElement.textContent.trim()"
        )

    def screenshot(self, name: str) -> None:
        """Keep how it looks, for people."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@contextmanager
def playground(browser: Browser, server: RunningServer, **context: Any) -> Iterator[Playground]:
    """Open the page as a new visitor, who leaves at the end."""
    visitor = browser.new_context(**context)
    try:
        yield Playground(visitor.new_page(), server.url)
    finally:
        visitor.close()


@contextmanager
def stepped_server(options: ServerOptions | None = None) -> Iterator[RunningServer]:
    """Run a server whose model is a `SteppedRunner`."""
    with running_server(options) as running:
        running.runner = runner = SteppedRunner()
        running.load()
        try:
            yield running
        finally:
            runner.permit()
