"""A process that starts, gives one token, and says how long each part took: one JSON line.

    python -m jaxinfer.bench.first_token '{"started": 0.0, "settings": {}, "prompt": "Hello"}'

Run by `jaxinfer.bench.startup`; what it imports is part of what is measured.
"""

from __future__ import annotations

import json
import sys
import time


def main(asked: dict) -> None:
    """Do it, and print."""
    begun = time.time()
    from jaxinfer import LLM, SamplingParams

    imported = time.time()
    llm = LLM(**asked["settings"])
    loaded = time.time()
    llm.generate(asked["prompt"], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    first = time.time()
    stats = llm.stats
    parts = {
        "python_s": begun - asked["started"],
        "import_s": imported - begun,
        "load_s": loaded - imported,
        "generate_s": first - loaded,
        "first_token_s": first - asked["started"],
        "cpu_s": time.process_time(),
        "programs": stats.compilations_total,
        "pending": stats.compilations_pending,
        "surprises": stats.compilations_after_warmup,
    }
    sys.stdout.write(json.dumps(parts) + "\n")
    sys.stdout.flush()
    if asked["finish"]:
        llm.finish_warmup()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
