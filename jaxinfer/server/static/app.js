/**
 * The page: wires its controls to the server, the conversation and the engine panel.
 */

import { ApiError, ask, hasKey, setKey, streamChat } from "./api.js";
import { Conversation } from "./conversation.js";
import { $ } from "./dom.js";
import { startPanel } from "./engine.js";
import { buildSettings, markInvalid, readSettings, withSystem } from "./settings.js";
import { asCurl, asPython } from "./snippets.js";

const RETRY_MS = 2000;
const NARROW = window.matchMedia("(max-width: 52rem)");

const conversation = new Conversation();
let model = null;
let keyed = false;
/** @type {?AbortController} Of the answer that is coming. */
let running = null;
/** Settled when it is complete. */
let answered = Promise.resolve();

/** Ask for the model until there is one. */
async function connect() {
  try {
    const { data } = await (await ask("v1/models")).json();
    model = data[0].id;
    keyed ||= hasKey();
    $("model").textContent = `${model} · ${data[0].max_model_len} tokens of context`;
    $("key-form").hidden = true;
    $("key").value = "";
    showError(null);
  } catch (error) {
    $("model").textContent = error.status === 401 ? "wants a key" : error.message;
    if (error.status === 401) wantKey(error);
    else setTimeout(connect, RETRY_MS);
  }
}

function wantKey(error) {
  keyed = true;
  // The first refusal is only the question; the next one is about a key that was given.
  if (hasKey()) showError(error);
  $("key-form").hidden = false;
  $("key").focus();
}

function request(turns) {
  return {
    ...(model && { model }),
    messages: withSystem(turns),
    ...readSettings(),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
  };
}

function submit() {
  if (!running && $("prompt").value.trim() !== "") answered = send($("prompt").value);
}

/** @param {string} text */
async function send(text) {
  showError(null);
  let body;
  try {
    body = request([...conversation.turns, { role: "user", content: text }]);
  } catch (error) {
    showError(error);
    return;
  }
  $("prompt").value = "";
  conversation.addUser(text);
  const answer = conversation.addAnswer(Boolean(body.logprobs));
  setRunning(new AbortController());
  let ending;
  try {
    for await (const chunk of streamChat(body, running.signal)) answer.take(chunk);
  } catch (error) {
    if (error.name === "AbortError") ending = "stopped";
    else {
      ending = "failed";
      report(error);
    }
  }
  setRunning(null);
  answer.finish(ending);
  if (ending && answer.first === null) {
    // Nothing came: the question goes back to where it can be changed and sent again.
    conversation.dropLast();
    $("prompt").value ||= text;
  } else {
    conversation.keep(answer);
  }
  // On a phone the focus would bring up the keyboard over the answer.
  if ($("key-form").hidden && !NARROW.matches) $("prompt").focus();
}

function report(error) {
  if (error.status === 401) wantKey(error);
  showError(error);
}

function setRunning(controller) {
  running = controller;
  $("send").disabled = controller !== null;
  $("stop-button").disabled = controller === null;
}

/** @param {?Error} error In words, beside where one types; at its control too, if it has one. */
function showError(error) {
  if (error && !(error instanceof ApiError)) console.error(error);
  $("error").hidden = error === null;
  $("error").textContent = error?.message ?? "";
  markInvalid(error?.param ?? null);
}

function showSnippet(title, write) {
  const text = $("prompt").value.trim();
  const turns = text ? [...conversation.turns, { role: "user", content: text }] : conversation.turns;
  const asked = turns.at(-1)?.role === "assistant" ? turns.slice(0, -1) : turns;
  try {
    const { return_progress, ...body } = request(
      asked.length ? asked : [{ role: "user", content: "Hello!" }],
    );
    $("snippet-text").value = write(body, new URL("v1", document.baseURI).href, keyed);
  } catch (error) {
    showError(error);
    return;
  }
  $("snippet-title").textContent = title;
  $("snippet-state").textContent = keyed ? "The key is read from JAXINFER_KEY." : "";
  $("snippet").showModal();
}

async function copySnippet() {
  $("snippet-text").select();
  try {
    await navigator.clipboard.writeText($("snippet-text").value);
    $("snippet-state").textContent = "Copied.";
  } catch {
    // Browsers give the clipboard only to pages from this machine or over TLS.
    $("snippet-state").textContent = "Press Ctrl+C: the browser does not let this page copy.";
  }
}

function wire() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("prompt").addEventListener("keydown", (event) => {
    // While an input method composes, Enter only accepts what it offers.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("snippet").open) running?.abort();
  });
  $("stop-button").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", async () => {
    running?.abort();
    await answered;
    conversation.clear();
    showError(null);
    $("prompt").focus();
  });
  $("colour").addEventListener("change", () => {
    $("colour-help").hidden = !$("colour").checked;
  });
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey($("key").value.trim());
    connect();
  });
  $("settings-form").addEventListener("submit", (event) => event.preventDefault());
  $("settings-form").addEventListener("reset", () => showError(null));
  $("copy-curl").addEventListener("click", () => showSnippet("Request as curl", asCurl));
  $("copy-python").addEventListener("click", () => showSnippet("Request as Python", asPython));
  $("snippet-copy").addEventListener("click", copySnippet);
  $("snippet-close").addEventListener("click", () => $("snippet").close());
}

buildSettings();
wire();
if (NARROW.matches) for (const id of ["engine", "settings"]) $(id).open = false;
else $("prompt").focus();
startPanel();
connect();
