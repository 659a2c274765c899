// What the fleet decided, and why: joins, losses, moves, refusals, certificates.

import { count, plural, shortId, timeOfDay } from "../format.js";
import { html, Store, useEffect, useState, useStore } from "../lib.js";
import { events, live } from "../live.js";
import { Empty, Loading, State } from "../parts.js";
import { json } from "../session.js";
import { NoAnswer, NoView } from "./no_view.js";

const AT_ONCE = 50;
const ASKED = 500;
const RANK = { info: 0, warning: 1, error: 2 };
const SEVERITIES = [
  { id: "info", name: "all severities" },
  { id: "warning", name: "warnings and errors" },
  { id: "error", name: "errors" },
];
const day = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });

const choice = new Store({ severity: "info", kind: "all", search: "" });

export function Events() {
  const { state, hello } = useStore(live);
  const fresh = useStore(events);
  const chosen = useStore(choice);
  const earlier = useEarlier(state === "live");
  const [numShown, setNumShown] = useState(AT_ONCE);
  if (state === "token" || state === "refused") return html`<h1>Events</h1><${NoView} what="events" state=${state} />`;
  if (earlier.state === "loading" && !fresh.length)
    return html`<h1>Events</h1>${state === "broken" ? html`<${NoAnswer} />` : html`<${Loading}>Asking for the events of the last days…<//>`}`;
  const all = merged(earlier.data, fresh);
  const kinds = [...new Set([...(hello?.event_kinds ?? []), ...all.map((each) => each.kind)])].sort();
  const found = all.filter((each) => isShown(each, chosen));
  return html`
    <h1>Events</h1>
    <p class="lead">What the fleet decided and why, the newest first. New events appear by themselves.</p>
    ${earlier.state === "error" && html`<p class="problem" role="alert">Earlier events: ${earlier.message}</p>`}
    <${Filters} chosen=${chosen} kinds=${kinds} numFound=${found.length} numAll=${all.length} />
    ${all.length === 0
      ? html`<${Empty} title="Nothing has happened yet">Joins, losses, moves and refusals appear here.<//>`
      : found.length === 0
        ? html`<${Empty} title="No event matches"><button type="button" class="link"
            onClick=${() => choice.set({ severity: "info", kind: "all", search: "" })}>Show all events</button><//>`
        : html`<ol class="events">${found.slice(0, numShown).map((each) => html`<${Event} key=${each.id} event=${each} />`)}</ol>
            ${found.length > numShown && html`<p><button type="button" class="quiet" onClick=${() => setNumShown(numShown + AT_ONCE)}>
              Show ${Math.min(AT_ONCE, found.length - numShown)} more of ${count(found.length)}</button></p>`}`}`;
}

/** The events that were recorded before the page was opened; asked once per connection. */
function useEarlier(isLive) {
  const [found, setFound] = useState({ state: "loading", data: [], message: "" });
  useEffect(() => {
    if (!isLive) return;
    json(`/v1/events?limit=${ASKED}`).then(
      ({ data }) => setFound({ state: "ready", data, message: "" }),
      (error) => setFound({ state: "error", data: [], message: error.message }),
    );
  }, [isLive]);
  return found;
}

function merged(earlier, fresh) {
  const byId = new Map([...earlier, ...fresh].map((each) => [each.id, each]));
  return [...byId.values()].sort((left, right) => right.time_ms - left.time_ms || right.id - left.id);
}

function isShown(event, { severity, kind, search }) {
  if (RANK[event.severity] < RANK[severity] || (kind !== "all" && event.kind !== kind)) return false;
  const words = search.trim().toLowerCase();
  return !words || [event.message, event.worker, event.host, event.model, event.cause].some((text) => text.toLowerCase().includes(words));
}

function Filters({ chosen, kinds, numFound, numAll }) {
  const change = (name) => (event) => choice.update({ [name]: event.currentTarget.value });
  return html`<div class="filters" role="search">
    <label class="search">Search <input type="search" value=${chosen.search} onInput=${change("search")} placeholder="Words, worker, host or model" /></label>
    <label>Severity <select value=${chosen.severity} onChange=${change("severity")}>
      ${SEVERITIES.map((each) => html`<option key=${each.id} value=${each.id}>${each.name}</option>`)}</select></label>
    <label>Kind <select value=${chosen.kind} onChange=${change("kind")}><option value="all">all kinds</option>
      ${kinds.map((kind) => html`<option key=${kind} value=${kind}>${kind.replaceAll("_", " ")}</option>`)}</select></label>
    <span class="end">${numFound === numAll ? plural(numAll, "event") : `${count(numFound)} of ${plural(numAll, "event")}`}</span>
  </div>`;
}

function Event({ event }) {
  const date = new Date(event.time_ms);
  const facts = [event.worker, event.host, event.model, event.cause].filter(Boolean);
  return html`<li>
    <time datetime=${date.toISOString()}>${timeOfDay(event.time_ms)}<small>${day.format(date)}</small></time>
    <div class="what"><p>${event.message.replace(/^./, (first) => first.toUpperCase())}</p>
      <small>${facts.join(" · ")}${event.request_id && html`${facts.length > 0 && " · "}<a href="#/requests/${encodeURIComponent(event.request_id)}">request ${shortId(event.request_id)}</a>`}</small></div>
    <div class="kind"><${State} state=${event.severity}>${event.kind.replaceAll("_", " ")}<span class="unseen">, ${event.severity}</span><//></div>
  </li>`;
}
