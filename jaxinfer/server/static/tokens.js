/**
 * An answer as tokens, coloured by their probability, with alternatives on hover and on focus.
 *
 * A token may end inside a character, and one half of a character cannot be shown. So tokens are
 * collected until their bytes make whole characters, and such a run is one thing to point at.
 */

import { $, element } from "./dom.js";

// Lower bounds of the probability, for the classes of `app.css`.
const CLASSES = [[0.9, "p9"], [0.6, "p6"], [0.3, "p3"], [0.1, "p1"], [0, "p0"]];

/** @typedef {{token: string, logprob: number, bytes: number[], top_logprobs: object[]}} Token */

/** The tokens of one answer. One stop for the tab key; the arrow keys move inside. */
export class TokenView {
  /**
   * @param {string} label The accessible name.
   * @param {string} id Of the element.
   */
  constructor(label, id) {
    this.node = element("div", { className: "text tokens", role: "listbox", tabIndex: 0, id });
    this.node.ariaLabel = label;
    this.node.ariaOrientation = "horizontal";
    /** @type {{node: HTMLElement, text: string, tokens: Token[]}[]} */
    this.runs = [];
    this.open = [];
    this.current = -1;
    this.node.addEventListener("keydown", (event) => this.#onKey(event));
    this.node.addEventListener("focus", () => this.#show(Math.max(0, this.current)));
    this.node.addEventListener("blur", () => this.#hide());
    this.node.addEventListener("pointerover", (event) => this.#onPointer(event));
    this.node.addEventListener("pointerleave", () => this.#hide());
    this.node.addEventListener("pointerdown", (event) => this.#onPointer(event));
  }

  /** @param {Token[]} tokens What is new. */
  push(tokens) {
    for (const token of tokens) {
      this.open.push(token);
      const bytes = this.open.flatMap((t) => t.bytes ?? [...new TextEncoder().encode(t.token)]);
      if (!endsInsideCharacter(bytes)) this.#close(bytes);
    }
  }

  /**
   * Mark what is not part of the answer's text: an end-of-sequence token, or a stop string.
   * @param {string} text The whole answer.
   */
  finish(text) {
    let at = 0;
    for (const run of this.runs) {
      // Tokenizers with a space in front of each word leave out the first.
      const shown = text.startsWith(run.text, at) ? run.text : run.text.replace(/^ /, "");
      if (text.startsWith(shown, at)) at += shown.length;
      else run.node.className = "rest";
    }
  }

  #close(bytes) {
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    const tokens = this.open;
    this.open = [];
    // The least likely of a run is what a reader wants to find.
    const p = Math.min(...tokens.map((t) => Math.exp(t.logprob)));
    const [, name] = CLASSES.find(([least]) => p >= least);
    const node = element("span", { className: name, textContent: text, role: "option" });
    node.id = `${this.node.id}-${this.runs.length}`;
    node.ariaLabel = `${spell(text)}, ${percent(Math.log(p))}`;
    node.ariaSelected = "false";
    node.dataset.index = String(this.runs.length);
    this.runs.push({ node, text, tokens });
    this.node.append(node);
  }

  #onKey(event) {
    const last = this.runs.length - 1;
    const to = {
      ArrowRight: this.current + 1, ArrowLeft: this.current - 1,
      ArrowDown: this.current + 10, ArrowUp: this.current - 10, Home: 0, End: last,
    }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.#show(Math.min(last, Math.max(0, to)));
  }

  #onPointer(event) {
    const index = event.target.dataset.index;
    if (index !== undefined) this.#show(Number(index));
  }

  #show(index) {
    const run = this.runs[index];
    if (!run) return;
    this.#hide();
    this.current = index;
    run.node.ariaSelected = "true";
    this.node.setAttribute("aria-activedescendant", run.node.id);
    this.node.setAttribute("aria-describedby", "alternatives");
    const box = $("alternatives");
    box.replaceChildren(...run.tokens.map(table));
    box.hidden = false;
    place(box, run.node);
  }

  #hide() {
    $("alternatives").hidden = true;
    const run = this.runs[this.current];
    if (run) run.node.ariaSelected = "false";
    this.node.removeAttribute("aria-activedescendant");
    this.node.removeAttribute("aria-describedby");
  }
}

/** @param {number[]} bytes UTF-8. */
function endsInsideCharacter(bytes) {
  for (let back = 1; back <= Math.min(4, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if (byte < 0x80) return false;
    if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2);
  }
  return false;
}

/** Return one token with its alternatives, the likeliest first. */
function table(token) {
  const rows = [...token.top_logprobs];
  if (!rows.some((row) => same(row, token))) rows.push(token);
  rows.sort((a, b) => b.logprob - a.logprob);
  const list = element("ol");
  for (const row of rows) {
    const meter = element("meter", { value: Math.exp(row.logprob), max: 1 });
    meter.ariaHidden = "true";
    const name = element("code", { textContent: spellToken(row) });
    const item = element("li", {}, [name, meter, percent(row.logprob)]);
    if (same(row, token)) item.className = "taken";
    list.append(item);
  }
  return list;
}

function same(a, b) {
  return a.token === b.token && String(a.bytes) === String(b.bytes);
}

/** Return a token's text, or its bytes where they are no text. */
function spellToken({ token, bytes }) {
  if (!bytes || !token.includes("\ufffd")) return spell(token);
  return bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
}

/** Return text with what cannot be seen spelled out. */
function spell(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(nothing)";
}

function percent(logprob) {
  const p = 100 * Math.exp(logprob);
  return `${p >= 0.1 || p === 0 ? p.toFixed(1) : p.toExponential(0)} %`;
}

/** Put a box below something, or above it where there is no room. */
function place(box, anchor) {
  const at = anchor.getClientRects()[0];
  if (!at) return;
  const left = Math.min(at.left, window.innerWidth - box.offsetWidth - 8);
  const below = at.bottom + 6;
  const fits = below + box.offsetHeight < window.innerHeight;
  box.style.left = `${Math.max(8, left)}px`;
  box.style.top = `${fits ? below : at.top - 6 - box.offsetHeight}px`;
}
