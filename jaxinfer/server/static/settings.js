/**
 * The controls of a request, and from them its body. An empty control is not sent: the server then
 * takes the model's own default.
 */

import { ApiError } from "./api.js";
import { $, element } from "./dom.js";

/** @typedef {{name: string, label: string, meaning: string, step: string}} Setting */

/** @type {Setting[]} */
const SETTINGS = [
  { name: "temperature", label: "Temperature", step: "0.1",
    meaning: "How adventurous: 0 takes the likeliest token, above 1 flattens the odds." },
  { name: "max_tokens", label: "Max tokens", step: "1",
    meaning: "The longest answer. Empty: what the context holds." },
  { name: "seed", label: "Seed", step: "1",
    meaning: "The same seed gives the same answer again. Empty: a new one each time." },
  { name: "top_p", label: "Top p", step: "0.05",
    meaning: "Keep the smallest set of likeliest tokens whose probability reaches this." },
  { name: "top_k", label: "Top k", step: "1",
    meaning: "Keep so many of the likeliest tokens; 0 keeps all." },
  { name: "min_p", label: "Min p", step: "0.01",
    meaning: "Keep tokens at least this fraction as likely as the likeliest." },
  { name: "repetition_penalty", label: "Repetition penalty", step: "0.05",
    meaning: "Above 1 discourages every token seen in prompt or answer." },
  { name: "presence_penalty", label: "Presence penalty", step: "0.1",
    meaning: "Subtracted once from tokens the answer already holds; −2 to 2." },
  { name: "frequency_penalty", label: "Frequency penalty", step: "0.1",
    meaning: "Subtracted per occurrence in the answer; −2 to 2." },
];
const NUM_ALTERNATIVES = 5;

/** Build the number fields. */
export function buildSettings() {
  $("sampling").append(...SETTINGS.map(field));
}

/**
 * Return the settings that are filled in, as fields of a request. The server judges them.
 * @returns {object}
 * @throws {ApiError} What stands in a field is no number: a browser gives it out as empty.
 */
export function readSettings() {
  const body = {};
  for (const { name, label } of SETTINGS) {
    const { value, validity } = $(name);
    if (validity.badInput) throw new ApiError(`${label} must be a number.`, 0, name);
    if (value !== "") body[name] = Number(value);
  }
  const stop = $("stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  if ($("colour").checked) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  return body;
}

/**
 * Return the conversation as the server gets it.
 * @param {{role: string, content: string}[]} turns
 */
export function withSystem(turns) {
  const system = $("system").value.trim();
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

/**
 * Mark the control at fault, if there is one, and take the mark off all others.
 * @param {?string} param
 */
export function markInvalid(param) {
  for (const control of $("settings-form").querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
  }
  const control = param && $("settings-form").querySelector(`#${CSS.escape(param)}`);
  if (!control) return;
  control.setAttribute("aria-invalid", "true");
  control.closest("details").open = true;
  control.scrollIntoView({ block: "nearest" });
}

/** @param {Setting} setting */
function field({ name, label, meaning, step }) {
  const box = element("div", { className: "field" });
  const input = element("input", {
    id: name, type: "number", step, placeholder: "default", inputMode: "decimal",
  });
  input.setAttribute("aria-describedby", `${name}-help`);
  box.append(
    element("label", { htmlFor: name, textContent: label }),
    input,
    element("p", { id: `${name}-help`, className: "help", textContent: meaning }),
  );
  return box;
}
