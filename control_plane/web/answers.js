// One answer: asks, streams, stops, measures, and fetches the explanation afterwards.

import { Store } from "./lib.js";
import { call, json } from "./session.js";
import { eventsOf } from "./sse.js";

const FRAME_MS = 40;
const EXPLAIN_PAUSES_MS = [150, 400, 1000, 2500];

const NOTHING = {
  phase: "idle", // idle, asking, streaming, done, stopped, failed
  text: "",
  thinking: "",
  calls: [],
  finish: "",
  error: "",
  requestId: "",
  ttftMs: null,
  tokensPerSecond: null,
  usage: null,
  explanation: null,
  explanationState: "none", // none, waiting, ready, missing
};

export const isBusy = (answer) => answer.phase === "asking" || answer.phase === "streaming";

/** Runs one request at a time; its store has the newest answer. */
export class Answers {
  #controller = null;
  #number = 0;

  constructor() {
    this.store = new Store(NOTHING);
  }

  clear() {
    this.stop();
    this.#number += 1;
    this.store.set(NOTHING);
  }

  stop() {
    this.#controller?.abort();
  }

  /** Ask, and return the answer once it has ended in whatever way. */
  async ask(path, body) {
    this.stop();
    this.#number += 1;
    const run = new Run(this.store, this.#number, () => this.#number);
    this.#controller = new AbortController();
    await run.ask(path, body, this.#controller.signal);
    run.explain(); // not awaited: the answer is complete without it
    return run.answer;
  }
}

class Run {
  #timer = 0;
  #startedAt = performance.now();
  #firstAt = 0;
  #lastAt = 0;

  constructor(store, number, current) {
    this.store = store;
    this.isCurrent = () => number === current();
    this.answer = { ...NOTHING, phase: "asking" };
    store.set(this.answer);
  }

  async ask(path, body, signal) {
    try {
      const response = await call(path, { method: "POST", body, signal });
      this.#change({ requestId: response.headers.get("x-request-id") ?? "" });
      for await (const { data } of eventsOf(response)) {
        if (data !== "[DONE]") this.#take(JSON.parse(data));
      }
      this.#end(this.answer.error ? "failed" : "done");
    } catch (error) {
      if (signal.aborted) this.#end("stopped");
      else this.#end("failed", error.message);
    }
  }

  #take(chunk) {
    if (chunk.error) {
      this.#change({ error: chunk.error.message });
      return;
    }
    if (chunk.usage) this.answer = { ...this.answer, usage: chunk.usage };
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    const calls = delta.tool_calls ? joined(this.answer.calls, delta.tool_calls) : this.answer.calls;
    const says = delta.content || delta.reasoning_content || delta.tool_calls;
    if (says) {
      this.#lastAt = performance.now();
      this.#firstAt ||= this.#lastAt;
    }
    this.#change({
      phase: "streaming",
      ttftMs: this.#firstAt ? this.#firstAt - this.#startedAt : null,
      text: this.answer.text + (delta.content ?? ""),
      thinking: this.answer.thinking + (delta.reasoning_content ?? ""),
      calls,
      finish: choice.finish_reason ?? this.answer.finish,
    });
  }

  #end(phase, error = "") {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    const tokens = this.answer.usage?.completion_tokens ?? 0;
    this.answer = {
      ...this.answer,
      phase,
      error: error || this.answer.error,
      tokensPerSecond: tokens > 1 && seconds > 0.05 ? // a network that joins tokens has no rate
        (tokens - 1) / seconds : null,
    };
    this.#show();
  }

  /** Change the answer; the page follows 25 times a second at most. */
  #change(changes) {
    this.answer = { ...this.answer, ...changes };
    this.#timer ||= setTimeout(() => {
      this.#timer = 0;
      this.#show();
    }, FRAME_MS);
  }

  #show() {
    if (this.isCurrent()) this.store.set(this.answer);
  }

  /** Fetch the explanation: the gateway writes it a moment after the last token. */
  async explain() {
    const { requestId } = this.answer;
    if (!requestId) return;
    const set = (changes) => {
      this.answer = { ...this.answer, ...changes };
      this.#show();
    };
    set({ explanationState: "waiting" });
    for (const pause of EXPLAIN_PAUSES_MS) {
      await new Promise((resolve) => setTimeout(resolve, pause));
      if (!this.isCurrent()) return;
      try {
        set({ explanation: await json(`/v1/requests/${encodeURIComponent(requestId)}/explain`), explanationState: "ready" });
        return;
      } catch (error) {
        if (error.status !== 404) break;
      }
    }
    set({ explanationState: "missing" });
  }
}

/** Join the parts of tool calls by their index. */
function joined(calls, deltas) {
  const all = calls.map((each) => ({ ...each }));
  for (const { index, id, function: part } of deltas) {
    all[index] ??= { id: "", name: "", arguments: "" };
    all[index].id ||= id ?? "";
    all[index].name += part?.name ?? "";
    all[index].arguments += part?.arguments ?? "";
  }
  return all;
}
