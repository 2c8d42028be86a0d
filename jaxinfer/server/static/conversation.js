/**
 * The conversation: what was said, as data for the next request and as elements of the page.
 */

import { $, element } from "./dom.js";
import { TokenView } from "./tokens.js";

/** Everything said so far. */
export class Conversation {
  constructor() {
    /** @type {{role: string, content: string}[]} */
    this.turns = [];
  }

  /** @param {string} text */
  addUser(text) {
    this.turns.push({ role: "user", content: text });
    $("empty").hidden = true;
    const said = element("div", { className: "text", textContent: text });
    this.#append(element("article", { className: "user" }, [heading("You"), said]));
  }

  /**
   * @param {boolean} coloured Whether the answer comes with log-probabilities.
   * @returns {Answer} Fill it; then `keep` or `dropLast`.
   */
  addAnswer(coloured) {
    const answer = new Answer(coloured, this.turns.length);
    this.#append(answer.node);
    return answer;
  }

  /** @param {Answer} answer Complete, or as far as it came. */
  keep(answer) {
    this.turns.push({ role: "assistant", content: answer.text });
  }

  /** Forget a question that got no answer, with all that the page shows of it. */
  dropLast() {
    this.turns.pop();
    for (let i = 0; i < 2; i++) $("log").lastElementChild.remove();
    $("empty").hidden = this.turns.length > 0;
  }

  clear() {
    this.turns = [];
    $("log").replaceChildren($("empty"));
    $("empty").hidden = false;
  }

  /** @param {() => void} change Grows the log. Who reads further up is left alone. */
  static followed(change) {
    const box = scroller();
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    change();
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  #append(node) {
    $("log").append(node);
    const box = scroller();
    box.scrollTop = box.scrollHeight;
  }
}

/** One answer while it comes: text or tokens, and how fast. */
export class Answer {
  /**
   * @param {boolean} coloured
   * @param {number} index Of the turn.
   */
  constructor(coloured, index) {
    this.text = "";
    this.started = performance.now();
    this.first = null;
    this.last = null;
    this.usage = null;
    this.timings = null;
    this.reason = null;
    this.tokens = coloured ? new TokenView("Tokens of the answer", `answer-${index}`) : null;
    this.shown = document.createTextNode("");
    this.stats = element("p", { className: "stats", textContent: "waiting…" });
    const body = this.tokens?.node ?? element("div", { className: "text" }, [this.shown]);
    this.node = element("article", { className: "assistant" }, [
      heading("Model"), body, this.stats,
    ]);
    this.node.ariaBusy = "true"; // or a screen reader would read out every piece
  }

  /** @param {object} chunk Of the stream. */
  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.timings ?? this.timings;
    const progress = chunk.prompt_progress;
    if (progress) this.stats.textContent = `reading ${progress.processed} of ${progress.total}…`;
    for (const { delta, logprobs, finish_reason } of chunk.choices) {
      const tokens = logprobs?.content ?? [];
      this.reason = finish_reason ?? this.reason;
      if (!delta.content && !tokens.length) continue;
      this.last = performance.now();
      this.first ??= { at: this.last, tokens: this.usage?.completion_tokens ?? 1 };
      Conversation.followed(() => this.#show(delta.content ?? "", tokens));
    }
    if (this.first) this.stats.textContent = this.#speed();
  }

  #show(text, tokens) {
    this.text += text;
    if (this.tokens) this.tokens.push(tokens);
    else this.shown.appendData(text);
  }

  /** @param {string} [ending] Why it ended, if the server did not say. */
  finish(ending) {
    this.tokens?.finish(this.text);
    this.node.ariaBusy = "false";
    const reasons = { stop: "complete", length: "cut at max tokens or the end of the context" };
    const why = ending ?? reasons[this.reason] ?? this.reason;
    Conversation.followed(() => {
      this.stats.textContent = [this.#speed(), why].filter(Boolean).join(" · ");
      if (this.timings) this.stats.append(" ", details(this.timings));
    });
  }

  /** Return time to first token and tokens per second, as this page saw them. */
  #speed() {
    if (!this.first) return "";
    const parts = [`TTFT ${milliseconds(this.first.at - this.started)}`];
    const count = this.usage?.completion_tokens;
    const seconds = (this.last - this.first.at) / 1000;
    if (count > this.first.tokens && seconds > 0) {
      parts.push(`${((count - this.first.tokens) / seconds).toFixed(1)} tokens/s`);
    }
    if (count) parts.push(`${count} ${count === 1 ? "token" : "tokens"}`);
    return parts.join(" · ");
  }
}

/** Return what scrolls: the log, or on a narrow screen the page. */
function scroller() {
  const log = $("log");
  return getComputedStyle(log).overflowY === "visible" ? document.scrollingElement : log;
}

function heading(who) {
  return element("h2", { textContent: who });
}

/** Return where the server says that the time went. */
function details(timings) {
  const rate = timings.predicted_per_second.toFixed(1);
  const words = [
    `queue ${milliseconds(timings.queue_ms)}`,
    `prompt ${milliseconds(timings.prompt_ms)} for ${timings.prompt_n} tokens`,
    `${timings.cache_n} from the cache`,
    `output ${milliseconds(timings.predicted_ms)}, ${rate} tokens/s`,
  ];
  return element("details", {}, [
    element("summary", { textContent: "on the server" }), words.join(" · "),
  ]);
}

function milliseconds(ms) {
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
