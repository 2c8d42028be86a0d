/**
 * The engine panel: asks `/metrics` every second and draws what it says.
 */

import { ask } from "./api.js";
import { $, element, svg } from "./dom.js";

const INTERVAL_MS = 1000;
const NUM_SAMPLES = 60;
const WIDTH = 120;
const HEIGHT = 28;
const SHARE = "kv_cache_usage_perc";

/**
 * @typedef {Map<string, number>} Series By name, without prefix; the values of all labels summed,
 *   shares averaged.
 * @typedef {{label: string, unit: string, meaning: string, top?: number,
 *   value: (now: Series, rate: (name: string) => number) => number}} Gauge
 */

/** @type {Gauge[]} */
const GAUGES = [
  { label: "Running", unit: "", meaning: "Sequences that hold KV pages.",
    value: (now) => now.get("num_requests_running") },
  { label: "Queue", unit: "", meaning: "Sequences that wait for their turn.",
    value: (now) => now.get("num_requests_waiting") },
  { label: "KV use", unit: "%", top: 100, meaning: "Share of the KV pages that sequences hold.",
    value: (now) => 100 * now.get(SHARE) },
  { label: "Cache hits", unit: "%", top: 100,
    meaning: "Prompt tokens found in the prefix cache, of all since the start.",
    value: (now) =>
      100 * now.get("prefix_cache_hits_total") / (now.get("prefix_cache_queries_total") || 1) },
  { label: "Output", unit: "tok/s", meaning: "Tokens produced per second, of all requests.",
    value: (now, rate) => rate("generation_tokens_total") },
  { label: "Steps", unit: "/s", meaning: "Steps of the engine per second.",
    value: (now, rate) => rate("jaxinfer_steps_total") },
];

/**
 * Read Prometheus' text format. The prefix of the names is an operator's choice and is dropped.
 * @param {string} text
 * @returns {Series}
 */
export function parseMetrics(text) {
  const series = new Map();
  let numShares = 0; // one of each replica
  for (const line of text.split("\n")) {
    if (line === "" || line.startsWith("#")) continue;
    const name = line.slice(0, line.search(/[{ ]/)).replace(/^(vllm|jaxinfer):/, "");
    const value = Number(line.slice(line.lastIndexOf(" ") + 1));
    series.set(name, (series.get(name) ?? 0) + value);
    if (name === SHARE) numShares += 1;
  }
  if (numShares) series.set(SHARE, series.get(SHARE) / numShares);
  return series;
}

/** Start the panel. It rests while nobody sees it. */
export function startPanel() {
  const rows = GAUGES.map(row);
  $("gauges").append(...rows.map((r) => r.node));
  let before = null;

  async function tick() {
    if (document.hidden || !$("engine").open) {
      before = null;
      return;
    }
    try {
      const series = parseMetrics(await (await ask("metrics")).text());
      const now = { at: performance.now(), series };
      if (before) draw(rows, before, now);
      $("engine-state").textContent = state(series);
      before = now;
    } catch (error) {
      $("engine-state").textContent = error.message;
      before = null;
    }
  }

  async function loop() {
    await tick();
    setTimeout(loop, INTERVAL_MS);
  }
  loop();
}

function state(series) {
  if (!series.has("num_requests_running")) return "The model is loading.";
  if (series.get("jaxinfer_engine_alive") === 0) return "The engine has stopped.";
  const late = series.get("jaxinfer_compilations_after_warmup_total");
  return late ? `${late} graphs were compiled while serving: answers waited for them.` : "";
}

function draw(rows, before, now) {
  if (!now.series.has("num_requests_running")) return;
  const seconds = (now.at - before.at) / 1000;
  const rate = (name) => {
    const grown = now.series.get(name) - (before.series.get(name) ?? now.series.get(name));
    return Math.max(0, grown) / seconds; // a restart begins at 0 again
  };
  for (const { gauge, samples, output, line, area, plot } of rows) {
    const value = gauge.value(now.series, rate);
    samples.push(Number.isFinite(value) ? value : 0);
    if (samples.length > NUM_SAMPLES) samples.shift();
    const most = Math.max(...samples);
    output.textContent = shown(samples.at(-1));
    plot.setAttribute("aria-label", `${gauge.label}: at most ${shown(most)} in the last minute`);
    const points = path(samples, gauge.top ?? Math.max(1, most));
    line.setAttribute("d", points);
    area.setAttribute("d", `${points}V${HEIGHT}H${x(NUM_SAMPLES - samples.length)}Z`);
  }
}

function shown(value) {
  return value >= 10 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);
}

/** @param {number} index 0 for a minute ago. */
function x(index) {
  return (index * WIDTH) / (NUM_SAMPLES - 1);
}

function path(samples, top) {
  const first = NUM_SAMPLES - samples.length;
  const y = (value) => HEIGHT - 1 - (value / top) * (HEIGHT - 3);
  const points = samples.map((value, i) => `${x(first + i).toFixed(1)} ${y(value).toFixed(1)}`);
  return `M${points.join("L")}`;
}

/** @param {Gauge} gauge */
function row(gauge) {
  const plot = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", preserveAspectRatio: "none",
    "aria-label": gauge.label,
  });
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line" });
  plot.append(area, line);
  const output = element("output", { textContent: "–" });
  output.ariaLabel = gauge.label;
  output.ariaLive = "off"; // sixty announcements a minute help nobody
  const node = element("div", { className: "gauge", title: gauge.meaning }, [
    element("span", { className: "name", textContent: gauge.label }),
    element("span", { className: "value" }, [
      output, element("span", { className: "unit", textContent: gauge.unit }),
    ]),
    plot,
  ]);
  return { gauge, node, output, plot, area, line, samples: [] };
}
