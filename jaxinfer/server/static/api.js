/**
 * Talks to the server: JSON, event streams, errors in words. Knows nothing of the page.
 */

const KEY = "jaxinfer-key";

/** What went wrong, in words for a person. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {number} status HTTP's; 0 if there was no answer at all.
   * @param {?string} param The field at fault.
   */
  constructor(message, status, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** @param {string} key Kept in this tab only. */
export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** @returns {boolean} Whether one was given, right or wrong. */
export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/**
 * Ask for a path; it is relative to the page, so that a proxy may serve all of it under a prefix.
 * @param {string} path
 * @param {RequestInit} [init]
 * @returns {Promise<Response>} Always of status 200.
 * @throws {ApiError}
 */
export async function ask(path, init = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...init.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...init, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?", 0);
  }
  if (response.ok) return response;
  throw await refusal(response);
}

/**
 * Stream a chat completion.
 * @param {object} body With `stream: true`.
 * @param {AbortSignal} signal Ends the request, on the server too.
 * @returns {AsyncGenerator<object>} The chunks.
 * @throws {ApiError} Also in the middle of the stream.
 */
export async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw toError(chunk.error, response.status);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.", 0);
}

/** Yield the data of each server-sent event; comments, which keep the stream alive, are skipped. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data: "));
        if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(response) {
  const wait = response.headers.get("Retry-After");
  const hint = wait ? ` Try again in ${wait} s.` : "";
  try {
    return toError((await response.json()).error, response.status, hint);
  } catch {
    return new ApiError(`The server answered ${response.status}.${hint}`, response.status);
  }
}

function toError(error, status, hint = "") {
  const message = /[.!?…]$/.test(error.message) ? error.message : `${error.message}.`;
  return new ApiError(message + hint, status, error.param);
}
