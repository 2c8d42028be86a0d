"""Settings of every test: strict types and shapes, repeatable examples, skips that are counted.

The import hook below has to run before the first import of the packages it names, which is why
it stands at module level: pytest imports this file before any test.
"""

from __future__ import annotations

import gc
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import pytest

# float32 + int32 arrays, or [T] + [B, T], are errors unless the code says what it means.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# `Float[Array, "T N H"]` is checked at each call, and T is the same T in all arguments.
jaxtyping.install_import_hook(
    ["jaxinfer.nn", "jaxinfer.models", "jaxinfer.sampler", "pallas_kernels"], "beartype.beartype"
)

# The same examples in each run, so that a failure is found by the change that causes it. No
# deadline: the first example of a JAX test includes a compile.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("repeatable")

# A shell that starts the tests in the background lets them ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent

# Folders whose slow tests run only when they are asked for. Slow tests elsewhere always run.
ON_REQUEST = {
    "equivalence": "more models on more devices",
    "golden": "all ways of the engine with each checkpoint",
    "kernels": "all combinations, and models in full depth",
    "real": "the full matrix on the real model",
    "research": "all notebooks, and more models and kernels",
}

# Folders of tiny models, where most of the time is XLA's, on programs that run for milliseconds.
# Slow tests, and the real model's everywhere, run what users run.
COMPILED_IN_A_HURRY = ("equivalence", "golden", "research", "unit", "kernels")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the slow tests of `ON_REQUEST` unless `-m` names them."""
    if "slow" in (config.option.markexpr or ""):
        return
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in ON_REQUEST and item.get_closest_marker("slow"):
            reason = f"{ON_REQUEST[folder]}: pytest tests/{folder} -m slow"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def no_programs_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop what a module compiled: a process may map 65,530 regions, and XLA crashes beyond."""
    folder = request.path.relative_to(TESTS).parts[0]
    hurry = folder in COMPILED_IN_A_HURRY and "slow" not in (request.config.option.markexpr or "")
    jax.config.update("jax_disable_most_optimizations", hurry)
    yield
    jax.clear_caches()
    gc.collect()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not tested, and why, even when everything passed."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
    )
    if not reasons:
        return
    terminalreporter.section(f"{sum(reasons.values())} skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:4} {reason}")
