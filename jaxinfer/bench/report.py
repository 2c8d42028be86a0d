"""Results as one HTML page with plots, which needs no network: the plotting code is inside.

Needs plotly (the extra `bench`).
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.bench.offline import offline_table
from jaxinfer.bench.scheduler import scheduler_table
from jaxinfer.bench.serve import LATENCIES, serve_table
from jaxinfer.bench.startup import PARTS, startup_table
from jaxinfer.errors import ConfigError

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left }
pre { overflow: auto; background: #f6f6f6; padding: 1rem }
"""


def write_report(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the results of benchmarks to an HTML file.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly import graph_objects, offline
    except ImportError as error:
        raise ConfigError(
            'the page needs plotly: pip install "jaxinfer[bench]"; or leave out --html'
        ) from error
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>jaxinfer bench</title>",
        f"<style>{_STYLE}</style><script>{offline.get_plotlyjs()}</script>",
    ]
    for result in results:
        table, plots = _VIEWS[result["benchmark"]]
        parts.append(f"<h1>{html.escape(result['benchmark'])}</h1>")
        parts.append(_markdown(table(dict(result))))
        for title, unit, series in plots(result):
            figure = graph_objects.Figure(
                [graph_objects.Bar(name=name, x=x, y=y) for name, (x, y) in series.items()],
                graph_objects.Layout(
                    title=title,
                    barmode="group",
                    height=380,
                    yaxis_title=unit,
                    xaxis_type="category",
                ),
            )
            parts.append(figure.to_html(full_html=False, include_plotlyjs=False))
        data = html.escape(json.dumps(result, indent=2))
        parts.append(f"<details><summary>all figures</summary><pre>{data}</pre></details>")
    path.write_text("\n".join(parts))


Series = dict[str, tuple[list[Any], list[float]]]
Plot = tuple[str, str, Series]


def _offline_plots(result: Mapping[str, Any]) -> list[Plot]:
    points = result["points"]
    batches = [str(p["batch"]) for p in points]

    def by_batch(*names: str) -> Series:
        labels = {name: name.replace("_tok_s", "").replace("_", " ") for name in names}
        values = {name: [p[name] for p in points] for name in names}
        return {
            labels[name]: (batches, [v["median"] if isinstance(v, dict) else v for v in column])
            for name, column in values.items()
        }

    shares = ("prefill_of_product_rate", "decode_of_product_rate", "decode_of_read_rate")
    return [
        ("decode by batch", "tokens/s", by_batch("decode_tok_s")),
        ("prefill by batch", "tokens/s", by_batch("prefill_tok_s")),
        ("share of what the machine can do", "share", by_batch(*shares)),
    ]


def _serve_plots(result: Mapping[str, Any]) -> list[Plot]:
    servers = result["servers"]
    latencies = {
        server["name"]: (
            [f"{name.removesuffix('_ms')} {p}" for name in LATENCIES for p in server[name]],
            [value for name in LATENCIES for value in server[name].values()],
        )
        for server in servers
    }
    names = [server["name"] for server in servers]
    rates: Series = {"output": (names, [server["output_tok_s"] for server in servers])}
    return [("latency", "ms", latencies), ("output", "tokens/s", rates)]


def _startup_plots(result: Mapping[str, Any]) -> list[Plot]:
    series = {
        point["start"]: (
            [part.removesuffix("_s").replace("_", " ") for part in PARTS],
            [point[part] for part in PARTS],
        )
        for point in result["points"]
    }
    return [("start-up", "s", series)]


def _scheduler_plots(result: Mapping[str, Any]) -> list[Plot]:
    parts = {**result["parts"], **result.get("dispatch", {})}
    names = list(parts)
    kinds = ("wall_us", "cpu_us")
    series = {kind: (names, [parts[name][kind] for name in names]) for kind in kinds}
    return [("host time of a step", "µs", series)]


_VIEWS: dict[str, tuple[Callable[[Any], str], Callable[[Mapping[str, Any]], list[Plot]]]] = {
    "offline": (offline_table, _offline_plots),
    "serve": (serve_table, _serve_plots),
    "startup": (startup_table, _startup_plots),
    "scheduler": (scheduler_table, _scheduler_plots),
}


def _markdown(text: str) -> str:
    """Turn lines and one kind of table into HTML; our own tables need no more."""
    parts: list[str] = []
    rows: list[str] = []
    for line in [*text.splitlines(), ""]:
        cells = [html.escape(cell.strip()) for cell in line.strip("|").split("|")]
        if line.startswith("| ---"):
            continue
        if line.startswith("|"):
            kind = "td" if rows else "th"
            rows.append("<tr>" + "".join(f"<{kind}>{c}</{kind}>" for c in cells) + "</tr>")
            continue
        if rows:
            parts.append(f"<table>{''.join(rows)}</table>")
            rows = []
        if line:
            parts.append(f"<p>{html.escape(line)}</p>")
    return "\n".join(parts)
