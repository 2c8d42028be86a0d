"""`/docs`: the interface as one page of HTML. No script, no outside resource: it works offline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape

from jaxinfer.server.endpoints import Endpoint
from jaxinfer.server.field_table import FATES
from jaxinfer.server.fields import Fate, Ignored, Refused
from jaxinfer.server.openapi import explain

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin: 2.5rem 0 0; font-size: 1.1rem; }
code { font: 0.9em ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 1rem 0.3rem 0; }
tr { border-top: 1px solid var(--line); }
th { font-weight: normal; }
details { margin: 0.5rem 0; }
summary { cursor: pointer; }
.dim { color: var(--dim); }
"""
_CODE = re.compile(r"`([^`]+)`")


def page(endpoints: Iterable[Endpoint], version: str) -> str:
    """Return the page."""
    sections = "\n".join(_section(endpoint) for endpoint in endpoints)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>jaxinfer: HTTP interface</title>\n<style>{_STYLE}</style>\n"
        f"<h1>jaxinfer {escape(version)}</h1>\n"
        "<p>The OpenAI API as vLLM and llama.cpp serve it, and Anthropic's. For programs: "
        '<a href="openapi.json">openapi.json</a>.</p>\n'
        f"{sections}\n</html>\n"
    )


def _section(endpoint: Endpoint) -> str:
    heading = f"{', '.join(endpoint.methods)} {endpoint.path}"
    parts = [f"<h2><code>{escape(heading)}</code></h2>", f"<p>{_html(endpoint.summary)}"]
    if endpoint.streams:
        parts.append("With <code>stream</code>, as server-sent events.")
    parts.append("</p>")
    if endpoint.call is not None:
        fates = FATES[endpoint.call.schema.endpoint]
        used = {n: f for n, f in fates.items() if not isinstance(f, Refused | Ignored)}
        rest = {n: f for n, f in fates.items() if n not in used}
        parts += [_table("Fields", used), _table("Fields that are refused or ignored", rest)]
    return "\n".join(parts)


def _table(label: str, fates: Mapping[str, Fate]) -> str:
    rows = "\n".join(
        f"<tr><th><code>{escape(name)}</code></th><td>{_html(explain(fate))}</td></tr>"
        for name, fate in fates.items()
    )
    return (
        f'<details><summary>{label} <span class="dim">({len(fates)})</span></summary>\n'
        f"<table>\n{rows}\n</table></details>"
    )


def _html(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", escape(text))
