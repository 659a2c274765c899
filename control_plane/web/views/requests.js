// The requests of this gateway: a live list, and why one of them took what it took.

import { count, milliseconds, percent, plural, rate, shortId, timeOfDay } from "../format.js";
import { phaseRows, segmentRows } from "../explanation.js";
import { html, Store, useEffect, useState, useStore } from "../lib.js";
import { fleet, live, requests } from "../live.js";
import { Bar, CopyButton, Empty, Loading, Stat, State, Waterfall } from "../parts.js";
import { json, session } from "../session.js";
import { NoAnswer, NoView } from "./no_view.js";

const EVERY_MS = 2000;
const RUNNING_MS = 1000;
const STATES = ["queued", "running", "finished", "failed", "cancelled", "aborted"];
const OPERATIONS = { chat: "Chat", text_completion: "Completion", embeddings: "Embeddings", rerank: "Ranking", text_classification: "Classes" };

const choice = new Store({ search: "", state: "all", isHeld: false });

/** Return what the reader calls a worker: its name, if the fleet is known. */
const nameOf = (workerId) => fleet.value.workers.get(workerId)?.name ?? workerId;

export function Requests({ rest }) {
  const [id] = rest;
  return id ? html`<${OneRequest} key=${id} id=${id} />` : html`<${RequestList} />`;
}

// ------------------------------------------------------------------------------------------------------------- list

/** The rows: all of this gateway from the stream; the reader's own where only those may be seen. */
function useRows() {
  const { watch, run } = useStore(session);
  const streamed = useStore(requests);
  const [own, setOwn] = useState({ isKnown: false, data: [], problem: "" });
  const isOwn = watch !== "yes" && run === "yes" && ["refused", "token"].includes(watch);
  useEffect(() => {
    if (!isOwn) return undefined;
    const ask = async () => {
      if (document.hidden) return;
      try {
        const { data } = await json("/v1/requests?limit=100");
        setOwn({ isKnown: true, data, problem: "" });
      } catch (error) {
        setOwn({ isKnown: true, data: [], problem: error.message });
      }
    };
    ask();
    const timer = setInterval(ask, EVERY_MS);
    return () => clearInterval(timer);
  }, [isOwn]);
  return isOwn ? { ...own, isOwn } : { ...streamed, problem: "", isOwn };
}

function RequestList() {
  const { state } = useStore(live);
  const { run } = useStore(session);
  useStore(fleet); // for the names of workers
  const chosen = useStore(choice);
  const rows = useRows();
  const [held, setHeld] = useState(null);
  useEffect(() => setHeld(chosen.isHeld ? rows.data : null), [chosen.isHeld]);
  if ((state === "token" || state === "refused") && run !== "yes") return html`<h1>Requests</h1><${NoView} what="requests" state=${state} />`;
  if (!rows.isKnown)
    return html`<h1>Requests</h1>${state === "broken" ? html`<${NoAnswer} />` : html`<${Loading}>Waiting for the list of requests…<//>`}`;
  const data = held ?? rows.data;
  const found = data.filter((row) => isShown(row, chosen));
  return html`
    <h1>Requests</h1>
    <p class="lead">${rows.isOwn ? "Your account's requests at this gateway." : "Requests of this gateway, running ones first, then the newest 100."}
      ${" "}Open one to see where its time went and why it went where it went.</p>
    ${rows.problem && html`<p class="problem" role="alert">${rows.problem}</p>`}
    <${Filters} chosen=${chosen} numFound=${found.length} numAll=${data.length} />
    ${data.length === 0
      ? html`<${Empty} title="No request yet">Ask something in the <a href="#/playground">playground</a>, and it appears here.<//>`
      : found.length === 0
        ? html`<${Empty} title="No request matches"><${ById} id=${chosen.search.trim()} /><//>`
        : html`<${Table} rows=${found} hasAccounts=${!rows.isOwn} />`}`;
}

function isShown(row, { search, state }) {
  if (state !== "all" && row.state !== state) return false;
  const words = search.trim().toLowerCase();
  const texts = [row.id, row.model, row.account, row.operation, row.error, nameOf(row.prefill), nameOf(row.decode)];
  return !words || texts.some((text) => text.toLowerCase().includes(words));
}

/** A request that is not in the list may still be explained: by its id. */
function ById({ id }) {
  if (!/^[\w-]{8,64}$/.test(id)) return "Change the search or the state.";
  return html`Requests of earlier hours are not in the list. <a href="#/requests/${encodeURIComponent(id)}">Look for the request ${id}</a>.`;
}

function Filters({ chosen, numFound, numAll }) {
  const change = (name) => (event) => choice.update({ [name]: event.currentTarget.value });
  return html`<div class="filters" role="search">
    <label class="search">Search <input type="search" value=${chosen.search} onInput=${change("search")} placeholder="Id, model, worker or account" /></label>
    <label>State <select value=${chosen.state} onChange=${change("state")}>
      <option value="all">all states</option>${STATES.map((state) => html`<option key=${state} value=${state}>${state}</option>`)}</select></label>
    <label class="check"><input type="checkbox" checked=${chosen.isHeld} onChange=${(event) => choice.update({ isHeld: event.currentTarget.checked })} /> Hold the list</label>
    <span class="end">${numFound === numAll ? plural(numAll, "request") : `${count(numFound)} of ${plural(numAll, "request")}`}</span>
  </div>`;
}

function Table({ rows, hasAccounts }) {
  return html`<div class="wide" tabindex="0" role="region" aria-label="List of requests"><table class="stacked" role="table">
    <thead role="rowgroup"><tr role="row">
      <th role="columnheader" scope="col">Request</th><th role="columnheader" scope="col">State</th><th role="columnheader" scope="col">Model</th>
      <th role="columnheader" scope="col" class="number">First token</th><th role="columnheader" scope="col" class="number">Total</th>
      <th role="columnheader" scope="col" class="number">Prompt</th><th role="columnheader" scope="col" class="number">Answer</th>
      <th role="columnheader" scope="col" class="number">Tokens/s</th><th role="columnheader" scope="col">Workers</th></tr></thead>
    <tbody role="rowgroup">${rows.map((row) => html`<${Row} key=${row.id} row=${row} hasAccounts=${hasAccounts} />`)}</tbody>
  </table></div>`;
}

function Row({ row, hasAccounts }) {
  const workers = [row.prefill, row.decode].filter(Boolean).map(nameOf);
  const account = hasAccounts && row.account && row.account !== "default" ? ` · ${row.account}` : "";
  return html`<tr role="row">
    <th role="rowheader" scope="row" class="most"><a href="#/requests/${encodeURIComponent(row.id)}"><code>${shortId(row.id)}</code></a>
      <small>${timeOfDay(row.started_ms)} · ${OPERATIONS[row.operation] ?? row.operation}${account}</small></th>
    <td role="cell" class="end"><${State} state=${row.state} />${row.error && html`<small class="problem">${row.error}</small>`}</td>
    <td role="cell" class=${row.model ? "full" : "none"}>${row.model}</td>
    <td role="cell" class="number" data-name="First token">${milliseconds(row.ttft_ms)}</td>
    <td role="cell" class="number" data-name="Total">${milliseconds(row.duration_ms)}</td>
    <td role="cell" class="number" data-name="Prompt">${count(row.prompt_tokens)}${row.cached_tokens > 0 && html`<small>${percent(row.cached_tokens / row.prompt_tokens)} cached</small>`}</td>
    <td role="cell" class="number" data-name="Answer">${count(row.completion_tokens)}</td>
    <td role="cell" class="number" data-name="Tokens/s">${rate(row.tokens_per_second)}</td>
    <td role="cell" class=${workers.length ? "full" : "none"}>${workers.join(" → ")}</td>
  </tr>`;
}

// ------------------------------------------------------------------------------------------------------ one request

/** Ask for the explanation; again and again while the request runs. */
function useExplanation(id) {
  const { token } = useStore(session);
  const [found, setFound] = useState({ state: "loading", explanation: null, message: "" });
  useEffect(() => {
    let timer = 0;
    const ask = async () => {
      try {
        const explanation = await json(`/v1/requests/${encodeURIComponent(id)}/explain`);
        setFound({ state: "ready", explanation, message: "" });
        if (explanation.state === "running" || explanation.state === "queued") timer = setTimeout(ask, RUNNING_MS);
      } catch (error) {
        setFound({ state: error.status === 404 ? "missing" : error.status === 401 || error.status === 403 ? "refused" : "error", explanation: null, message: error.message });
      }
    };
    ask();
    return () => clearTimeout(timer);
  }, [id, token]);
  return found;
}

const BACK = html`<p class="back"><a href="#/requests">All requests</a></p>`;

function OneRequest({ id }) {
  useStore(fleet); // for the names of workers
  const { state, explanation, message } = useExplanation(id);
  if (state === "loading") return html`${BACK}<h1>Request</h1><${Loading}>Asking for the explanation…<//>`;
  if (state === "missing")
    return html`${BACK}<h1>Request</h1><${Empty} title="The gateway keeps no explanation of this request">${message}<//>`;
  if (state !== "ready") return html`${BACK}<h1>Request</h1><${Empty} title="There is no explanation to show">${message}<//>`;
  return html`${BACK}
    <div class="title-row"><h1>Request <code>${shortId(id)}</code></h1><${State} state=${explanation.state} /></div>
    <${Summary} explanation=${explanation} />
    <div class="columns">
      ${explanation.segments.length > 0 && html`<section class="card"><h2>Until the first token</h2>
        <${Waterfall} caption=${segmentsCaption(explanation)} rows=${segmentRows(explanation).map(named)} total=${explanation.ttft_ms} /></section>`}
      ${explanation.phases.length > 0 && html`<section class="card"><h2>The whole request</h2>
        <${Waterfall} caption="Phases may overlap." rows=${phaseRows(explanation).map(named)} total=${explanation.duration_ms} /></section>`}
    </div>
    ${explanation.route && html`<${Route} route=${explanation.route} explanation=${explanation} />`}
    <${Moves} moves=${explanation.moves} />
    <${Cost} usage=${explanation.usage} />
    <${Texts} texts=${explanation.texts} />
    <${Ids} explanation=${explanation} />`;
}

const named = (row) => ({ ...row, where: row.where && nameOf(row.where) });

const segmentsCaption = ({ ttft_ms, unexplained_ms, segments }) =>
  ttft_ms == null
    ? "So far."
    : `${plural(segments.length, "segment")} explain ${milliseconds(ttft_ms - unexplained_ms)} of ${milliseconds(ttft_ms)}.`;

function Summary({ explanation }) {
  const { usage } = explanation;
  return html`<dl class="stats wide-stats">
    <${Stat} name="First token" value=${milliseconds(explanation.ttft_ms)} />
    <${Stat} name="Total" value=${milliseconds(explanation.duration_ms)} />
    <${Stat} name="Tokens a second" value=${rate(explanation.tokens_per_second)} />
    <${Stat} name="Prompt" value=${count(usage.prompt_tokens)} note=${usage.cached_tokens ? `${percent(usage.cached_tokens / usage.prompt_tokens)} cached` : "tokens"} />
    <${Stat} name="Answer" value=${count(usage.completion_tokens)} note="tokens" />
    ${explanation.error && html`<${Stat} name="Error" value=${explanation.error} />`}
  </dl>`;
}

function Route({ route, explanation }) {
  const predicted = route.mode === "handed_over" ? route.predicted_ms.hand_over : route.predicted_ms.local;
  const isChosen = (each) => each.is_chosen;
  const isRunnerUp = (each) => route.runner_up && each.worker === route.runner_up.worker && each.role === route.runner_up.role;
  const where = route.prefill ? html`<b>${nameOf(route.prefill)}</b> reads the prompt, <b>${nameOf(route.decode)}</b> writes the answer` : html`<b>${nameOf(route.decode)}</b> does everything`;
  return html`<section class="block"><h2>Why it went there</h2>
    <p>${where}. ${sentence(route.reason)}${predicted != null && ` The router predicted ${milliseconds(predicted)} until the prompt's cache is there; the first token came after ${milliseconds(explanation.ttft_ms)}.`}</p>
    ${route.candidates.length > 0 && html`<div class="wide" tabindex="0" role="region" aria-label="Candidates"><table class="candidates">
      <caption>What the router compared. Milliseconds are predictions.</caption>
      <thead><tr><th scope="col">Worker</th><th scope="col">Verdict</th><th scope="col" class="number">Predicted</th><th scope="col" class="number">Queue</th>
        <th scope="col" class="number">Loading</th><th scope="col" class="number">Computing</th><th scope="col" class="number">Hand-over</th>
        <th scope="col" class="number">Cached tokens</th><th scope="col" class="number">Load</th></tr></thead>
      <tbody>${route.candidates.map((each, place) => html`<tr key=${place} class=${isChosen(each) ? "chosen" : ""}>
        <th scope="row">${nameOf(each.worker)}<small>${each.role}</small></th>
        <td>${isChosen(each) ? html`<b>chosen</b>` : isRunnerUp(each) ? "runner-up" : ""}</td>
        <td class="number">${milliseconds(each.predicted_ms)}</td><td class="number">${milliseconds(each.queue_ms)}</td>
        <td class="number">${milliseconds(each.load_ms)}</td><td class="number">${milliseconds(each.compute_ms)}</td>
        <td class="number">${milliseconds(each.hand_over_ms)}</td><td class="number">${cachedText(each.cached_tokens)}</td>
        <td class="number">${percent(each.load)}</td></tr>`)}</tbody>
    </table></div>`}
    ${route.attempts.length > 1 && html`<ol class="attempts">${route.attempts.map((each) => html`<li key=${each.attempt}>
      ${[each.prefill, each.decode].filter(Boolean).map(nameOf).join(" → ")}: ${each.outcome}</li>`)}</ol>`}
  </section>`;
}

/** Write a reason as a sentence, with the names of workers for their ids. */
function sentence(text) {
  if (!text) return "";
  const words = text.replace(/[\w.-]+/g, (word) => nameOf(word));
  return `${words[0].toUpperCase()}${words.slice(1)}.`;
}

function cachedText({ own, host, remote }) {
  const parts = [own && `${count(own)} own`, host && `${count(host)} host`, remote && `${count(remote)} remote`].filter(Boolean);
  return parts.join(", ") || "none";
}

const MOVES = { hand_over: "Hand-over", migration: "Migration", restart: "Restart" };

function Moves({ moves }) {
  return html`<section class="block"><h2>What moved</h2>
    ${moves.length === 0
      ? html`<p>Nothing: the KV cache stayed where it was computed.</p>`
      : html`<div class="wide" tabindex="0" role="region" aria-label="Moves"><table class="moves">
          <thead><tr><th scope="col">Move</th><th scope="col">From</th><th scope="col">To</th><th scope="col">Why</th><th scope="col" class="number">At</th>
            <th scope="col" class="number">Took</th><th scope="col" class="number">Tokens</th><th scope="col" class="number">Bytes</th><th scope="col">By</th></tr></thead>
          <tbody>${moves.map((each, place) => html`<tr key=${place}><th scope="row">${MOVES[each.kind] ?? each.kind}</th><td>${nameOf(each.from)}</td><td>${nameOf(each.to)}</td>
            <td>${each.why}${each.seam && html`<small class="problem" title=${`${each.seam.from_class} → ${each.seam.to_class}`}>other numerics from token ${count(each.seam.position)} on</small>`}</td><td class="number">${milliseconds(each.time_ms)}</td><td class="number">${milliseconds(each.duration_ms)}</td>
            <td class="number">${count(each.num_tokens)}</td><td class="number">${count(each.num_bytes)}</td><td>${each.transport}</td></tr>`)}</tbody>
        </table></div>`}
  </section>`;
}

function Cost({ usage }) {
  return html`<section class="block"><h2>What it cost</h2>
    <${Bar} label="Prompt tokens" total=${usage.prompt_tokens} show=${count} parts=${[
      { name: "Computed", value: usage.computed_tokens, kind: "one" },
      { name: "From the pool", value: usage.pool_tokens, kind: "two" },
      { name: "From the store", value: usage.store_tokens, kind: "three" },
      { name: "From another host", value: usage.remote_tokens, kind: "four" },
    ]} />
    <dl class="pairs">
      <dt>Prefill</dt><dd>${milliseconds(usage.prefill_us / 1000)} of a worker</dd>
      <dt>Decode</dt><dd>${milliseconds(usage.decode_us / 1000)} of a worker</dd>
      <dt>Bytes moved</dt><dd>${count(usage.bytes_moved)}</dd>
      ${usage.reprefill_tokens > 0 && html`<dt>Computed again</dt><dd>${plural(usage.reprefill_tokens, "token")}, not billed</dd>`}
      <dt>Neurons</dt><dd>${(usage.microneurons / 1e6).toFixed(6)}</dd>
    </dl></section>`;
}

function Texts({ texts }) {
  if (!texts) return null;
  return html`<section class="block"><h2>What was said</h2>
    <details><summary>Prompt</summary><pre class="json" tabindex="0">${texts.prompt}</pre></details>
    <details><summary>Answer</summary><pre class="json" tabindex="0">${texts.answer}</pre></details></section>`;
}

function Ids({ explanation }) {
  return html`<section class="block"><h2>To find it elsewhere</h2><dl class="pairs">
    <dt>Request</dt><dd><code>${explanation.id}</code> <${CopyButton} text=${explanation.id} /></dd>
    ${explanation.trace_id && html`<dt>Trace</dt><dd><code>${explanation.trace_id}</code></dd>`}
    <dt>Account</dt><dd>${explanation.account}</dd>
    <dt>Model</dt><dd>${explanation.model}</dd>
    <dt>Gateway</dt><dd><code>${explanation.gateway}</code></dd>
    <dt>Ended by</dt><dd>${explanation.finish_reasons.join(", ") || "–"}</dd>
  </dl></section>`;
}
