/**
 * A request as code that can be run elsewhere. The key is never part of it.
 */

// What OpenAI's Python client takes by name; the rest goes through `extra_body`.
const OPENAI = new Set([
  "model", "messages", "temperature", "max_tokens", "seed", "top_p", "presence_penalty",
  "frequency_penalty", "stop", "logprobs", "top_logprobs",
]);

/**
 * @param {object} body
 * @param {string} base URL of the API, without a slash at its end.
 * @param {boolean} keyed Whether the server wants a key.
 */
export function asCurl(body, base, keyed) {
  const header = keyed ? ` -H "Authorization: Bearer $JAXINFER_KEY"` : "";
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return (
    `curl -N ${quoted(`${base}/chat/completions`)}${header} \\\n` +
    `  -H 'Content-Type: application/json' -d '${json}'\n`
  );
}

/** The same for Python; parameters as in `asCurl`. */
export function asPython(body, base, keyed) {
  const { stream, stream_options, ...fields } = body;
  const names = Object.keys(fields);
  const lines = names.filter((n) => OPENAI.has(n)).map((n) => `    ${n}=${python(fields[n])},\n`);
  const extra = names.filter((n) => !OPENAI.has(n)).map((n) => [n, fields[n]]);
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra))},\n`);
  const key = keyed ? 'os.environ["JAXINFER_KEY"]' : '"none"';
  return (
    `${keyed ? "import os\n\n" : ""}from openai import OpenAI\n\n` +
    `client = OpenAI(base_url=${python(base)}, api_key=${key})\n` +
    `stream = client.chat.completions.create(\n${lines.join("")}    stream=True,\n)\n` +
    "for chunk in stream:\n" +
    '    print(chunk.choices[0].delta.content or "", end="", flush=True)\n'
  );
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Return a JSON value as Python spells it. Its strings are also Python's. */
function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    const items = Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${python(v)}`);
    return `{${items.join(", ")}}`;
  }
  return JSON.stringify(value);
}
