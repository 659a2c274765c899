// The fleet: hosts with their memory by owner, and their workers with state, load and KV blocks.

import { bytes, count, percent, plural, rate } from "../format.js";
import { Component, html, Store, useState, useStore } from "../lib.js";
import { fleet, live } from "../live.js";
import { announce, Bar, Empty, Loading, Question, Stat, State } from "../parts.js";
import { json } from "../session.js";
import { NoAnswer, NoView } from "./no_view.js";

const HOSTS_AT_ONCE = 40;
const WORKERS_AT_ONCE = 50;
const MAX_OPEN_WORKERS = 24; // a fleet of up to so many is shown open
const ROLES = ["prefill", "decode", "encode", "kv"];
const ROLE_NAMES = { prefill: "Prefill", decode: "Decode", encode: "Encode", kv: "KV service" };
const SHOWN = [
  { id: "all", name: "all states" },
  { id: "ready", name: "ready" },
  { id: "draining", name: "draining" },
  { id: "other", name: "anything else" },
];

/** What the reader chose: kept while other views are open. */
const choice = new Store({ search: "", role: "all", state: "all", open: new Map() });

/** The one word for a worker: what its gateway would do with a request. */
export const stateOf = (worker) =>
  worker.suspected ? "suspected" : worker.state === "ready" && worker.health && worker.health !== "ok" ? worker.health : worker.state;

export function Fleet() {
  const { state } = useStore(live);
  const known = useStore(fleet);
  const chosen = useStore(choice);
  const [asked, setAsked] = useState(null);
  if (state === "token" || state === "refused") return html`<h1>Fleet</h1><${NoView} what="the fleet" state=${state} />`;
  if (!known.isKnown)
    return html`<h1>Fleet</h1>${state === "broken" ? html`<${NoAnswer} />` : html`<${Loading}>Asking the gateway for its fleet…<//>`}`;
  const workers = [...known.workers.values()];
  return html`
    <h1>Fleet</h1>
    ${state === "broken" && html`<p class="problem" role="status">The connection is lost. What you see is the last known state.</p>`}
    <${Numbers} workers=${workers} hosts=${known.hosts.size} rates=${known.rates} />
    ${workers.length === 0
      ? html`<${Empty} title="No worker has registered yet"><code>tandem up</code> starts workers on this machine. Workers on other
          machines register here by <code>--control</code>.<//>`
      : html`<${Filters} chosen=${chosen} workers=${workers} />
          <${Hosts} workers=${workers} hosts=${known.hosts} chosen=${chosen} onAsk=${setAsked} />`}
    ${asked && html`<${DrainQuestion} key=${asked.id} worker=${known.workers.get(asked.id) ?? asked} workers=${workers} onEnd=${() => setAsked(null)} />`}`;
}

function Numbers({ workers, hosts, rates }) {
  const ready = workers.filter((worker) => stateOf(worker) === "ready").length;
  const sum = (name) => workers.reduce((all, worker) => all + worker[name], 0);
  return html`<dl class="stats wide-stats">
    <${Stat} name="Workers ready" value=${count(ready)} note="of ${count(workers.length)}" />
    <${Stat} name="Hosts" value=${count(hosts)} />
    <${Stat} name="Running" value=${count(sum("num_running"))} />
    <${Stat} name="Waiting" value=${count(sum("num_waiting"))} />
    <${Stat} name="Tokens a second" value=${rate(rates.output_tokens_per_second)} />
    <${Stat} name="Prompt from caches" value=${percent(rates.cached_share)} note="last minute" />
  </dl>`;
}

function Filters({ chosen, workers }) {
  const shown = workers.filter((worker) => isShown(worker, chosen)).length;
  const change = (name) => (event) => choice.update({ [name]: event.currentTarget.value });
  return html`<div class="filters" role="search">
    <label class="search">Search <input type="search" value=${chosen.search} onInput=${change("search")} placeholder="Name, model or host" /></label>
    <label>Role <select value=${chosen.role} onChange=${change("role")}>
      <option value="all">all roles</option>${ROLES.map((role) => html`<option key=${role} value=${role}>${ROLE_NAMES[role]}</option>`)}</select></label>
    <label>State <select value=${chosen.state} onChange=${change("state")}>
      ${SHOWN.map((each) => html`<option key=${each.id} value=${each.id}>${each.name}</option>`)}</select></label>
    <span class="end" role="status">${shown === workers.length ? plural(shown, "worker") : `${count(shown)} of ${plural(workers.length, "worker")}`}</span>
  </div>`;
}

function isShown(worker, { search, role, state }) {
  if (role !== "all" && worker.role !== role) return false;
  const now = stateOf(worker);
  if (state === "other" ? now === "ready" || now === "draining" : state !== "all" && now !== state) return false;
  const words = search.trim().toLowerCase();
  if (!words) return true;
  return [worker.name, worker.id, worker.model, worker.host_id].some((text) => text?.toLowerCase().includes(words));
}

function Hosts({ workers, hosts, chosen, onAsk }) {
  const [numShown, setNumShown] = useState(HOSTS_AT_ONCE);
  const isSearching = Boolean(chosen.search.trim()) || chosen.role !== "all" || chosen.state !== "all";
  const groups = new Map();
  for (const worker of workers) {
    const group = groups.get(worker.host_id) ?? { all: [], shown: [] };
    group.all.push(worker);
    if (isShown(worker, chosen)) group.shown.push(worker);
    groups.set(worker.host_id, group);
  }
  const found = [...groups].filter(([, group]) => group.shown.length).sort(([left], [right]) => left.localeCompare(right, "en", { numeric: true }));
  if (!found.length)
    return html`<${Empty} title="No worker matches">
      <button type="button" class="link" onClick=${() => choice.update({ search: "", role: "all", state: "all" })}>Show all workers</button><//>`;
  const isOpen = (hostId) => chosen.open.get(hostId) ?? (workers.length <= MAX_OPEN_WORKERS || (isSearching && found.length <= 8));
  const turn = (hostId) => choice.update({ open: new Map(chosen.open).set(hostId, !isOpen(hostId)) });
  return html`
    ${found.slice(0, numShown).map(
      ([hostId, group]) => html`<${Host} key=${hostId} hostId=${hostId} host=${hosts.get(hostId)} all=${group.all} shown=${group.shown}
        isOpen=${isOpen(hostId)} onTurn=${turn} onAsk=${onAsk} />`,
    )}
    ${found.length > numShown &&
    html`<p><button type="button" class="quiet" onClick=${() => setNumShown(numShown + HOSTS_AT_ONCE)}>
      Show ${Math.min(HOSTS_AT_ONCE, found.length - numShown)} more of ${count(found.length)} hosts</button></p>`}`;
}

function Host({ hostId, host, all, shown, isOpen, onTurn, onAsk }) {
  const [numShown, setNumShown] = useState(WORKERS_AT_ONCE);
  const rows = isOpen ? [...shown].sort(byRole).slice(0, numShown) : [];
  const wrong = all.filter((worker) => stateOf(worker) !== "ready").length;
  const roles = ROLES.map((role) => [role, all.filter((worker) => worker.role === role).length]).filter(([, num]) => num);
  const id = `host-${hostId}`;
  return html`<section class="host card" aria-labelledby=${id}>
    <div class="host-head">
      <h2 id=${id}><button type="button" aria-expanded=${String(isOpen)} onClick=${() => onTurn(hostId)}>
        <i class="turn" aria-hidden="true" />${hostId}</button></h2>
      <p>${roles.map(([role, num]) => `${num} ${ROLE_NAMES[role].toLowerCase()}`).join(", ")}${wrong > 0 && html`, <b>${wrong} not ready</b>`}</p>
    </div>
    <${Memory} host=${host} workers=${all} isOpen=${isOpen} />
    ${isOpen &&
    html`<div class="wide" tabindex="0" role="region" aria-label="Workers of ${hostId}"><table class="workers stacked" role="table">
        <thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col">Worker</th><th role="columnheader" scope="col">State</th><th role="columnheader" scope="col">Model</th><th role="columnheader" scope="col" class="number">Running</th>
          <th role="columnheader" scope="col" class="number">Waiting</th><th role="columnheader" scope="col" class="number">Tokens/s</th><th role="columnheader" scope="col">KV blocks</th>
          <th role="columnheader" scope="col" class="number">Memory</th><th role="columnheader" scope="col"><span class="unseen">Actions</span></th></tr></thead>
        <tbody role="rowgroup">${rows.map((worker) => html`<${WorkerRow} key=${worker.id} worker=${worker} onAsk=${onAsk} />`)}</tbody>
      </table></div>
      ${shown.length > numShown &&
      html`<p class="more"><button type="button" class="quiet small" onClick=${() => setNumShown(numShown + WORKERS_AT_ONCE)}>
        Show ${Math.min(WORKERS_AT_ONCE, shown.length - numShown)} more of ${plural(shown.length, "worker")}</button></p>`}`}
  </section>`;
}

const byRole = (left, right) =>
  ROLES.indexOf(left.role) - ROLES.indexOf(right.role) || left.name.localeCompare(right.name, "en", { numeric: true });

/** Memory by owner: of the host, and of its devices; a folded host shows the sum of its devices. */
function Memory({ host, workers, isOpen }) {
  if (!host) return null;
  if (!isOpen && host.devices.length > 1)
    return html`<div class="memory"><${AllDevices} devices=${host.devices} /></div>`;
  const devices = host.devices.map(
    (device) => html`<div key=${numberOf(device)} class="device">
      <span>${device.name || "Device"} ${numberOf(device)}
        <small>${gauges(device)}</small>
        ${device.throttle_reasons.length > 0 && html`<small class="problem">slowed: ${device.throttle_reasons.join(", ")}</small>`}
        ${device.error && html`<small class="problem">${device.error}</small>`}</span>
      <${Bar} label="Memory of device ${numberOf(device)}" total=${device.total_bytes} parts=${byOwner([device])} />
      ${device.foreign_unknown && html`<small class="soft">${device.foreign_unknown}</small>`}
    </div>`,
  );
  return html`<div class="memory">${devices}${host.total_bytes > 0 && html`<${HostMemory} host=${host} workers=${workers} />`}</div>`;
}

function AllDevices({ devices }) {
  const sum = (name) => devices.reduce((all, device) => all + (device[name] ?? 0), 0);
  const loads = devices.filter((device) => device.utilization_percent != null);
  const hasPower = devices.some((device) => device.power_watts != null);
  const wrong = devices.filter((device) => device.error || device.throttle_reasons.length).length;
  return html`<div class="device"><span>${plural(devices.length, "device")}
      <small>${[loads.length > 0 ? `${Math.round(sum("utilization_percent") / loads.length)} %` : "load unknown", hasPower && `${count(sum("power_watts"))} W`].filter(Boolean).join(" · ")}</small>
      ${wrong > 0 && html`<small class="problem">${wrong} with a problem</small>`}</span>
    <${Bar} label="Memory of all devices" total=${sum("total_bytes")} parts=${byOwner(devices)} /></div>`;
}

const numberOf = (device) => [device.index, device.mig_instance].filter((part) => part !== "" && part != null).join("/");

/** Load, power and heat; null is a figure that NVML does not give. */
const gauges = ({ utilization_percent: load, power_watts: power, temperature_celsius: heat }) =>
  [load == null ? "load unknown" : `${load} %`, power != null && `${power} W`, heat != null && `${heat} °C`].filter(Boolean).join(" · ");

/** Memory by owner. Memory in use of which NVML does not tell the owner has a part of its own. */
function byOwner(devices) {
  const sum = (of) => devices.reduce((all, device) => all + of(device), 0);
  const unknown = sum((device) => (device.foreign_bytes == null ? device.used_bytes - (device.own_bytes ?? 0) : 0));
  return [
    { name: "Tandem", value: sum((device) => device.own_bytes ?? 0), kind: "one" },
    { name: "Others", value: sum((device) => device.foreign_bytes ?? 0), kind: "foreign" },
    ...(unknown > 0 ? [{ name: "Unknown owner", value: unknown, kind: "foreign" }] : []),
    { name: "Free", value: sum((device) => device.free_bytes), kind: "free" },
  ];
}

function HostMemory({ host, workers }) {
  const own = ROLES.map((role) => ({
    name: ROLE_NAMES[role],
    value: workers.reduce((sum, worker) => sum + (worker.role === role ? worker.process_bytes : 0), 0),
    kind: role,
  }));
  const ours = own.reduce((sum, part) => sum + part.value, 0);
  const others = Math.max(0, host.total_bytes - host.available_bytes - ours);
  return html`<div class="device"><span>Memory <small>${bytes(host.total_bytes)}</small></span>
    <${Bar} label="Memory of the host" total=${host.total_bytes} parts=${[
      ...own,
      { name: "Others", value: others, kind: "foreign" },
      { name: "Free", value: host.available_bytes, kind: "free" },
    ]} /></div>`;
}

/** One row. A row whose worker did not change is not rendered again: there may be a thousand. */
class WorkerRow extends Component {
  shouldComponentUpdate(next) {
    return next.worker !== this.props.worker;
  }

  render({ worker, onAsk }) {
    const state = stateOf(worker);
    const isDraining = state === "draining";
    return html`<tr role="row">
      <th scope="row" role="rowheader" class="most">${worker.name}<small>${ROLE_NAMES[worker.role] ?? worker.role}${worker.name !== worker.id && worker.role !== "kv" ? ` · ${worker.id.slice(0, 16)}` : ""}</small></th>
      <td role="cell" class="end"><${State} state=${state}>${stateText(worker, state)}<//>${worker.error && html`<small class="problem">${worker.error}</small>`}
        ${worker.health_reason && html`<small class="problem">${worker.health_reason}</small>`}
        ${worker.orphan_bytes > 0 && html`<small class="problem">${bytes(worker.orphan_bytes)} held for nobody</small>`}</td>
      <td role="cell" class=${worker.model ? "full" : "none"}>${worker.model ?? ""}</td>
      <td role="cell" class="number" data-name="Running">${count(worker.num_running)}</td>
      <td role="cell" class="number" data-name="Waiting">${count(worker.num_waiting)}</td>
      <td role="cell" class="number" data-name="Tokens/s">${rate(worker.tokens_per_second)}</td>
      <td role="cell" class="blocks full"><${Blocks} worker=${worker} /></td>
      <td role="cell" class="number most" data-name="Memory">${worker.process_bytes ? bytes(worker.process_bytes) : "–"}</td>
      <td role="cell" class="number end">${worker.role !== "kv" && html`<button type="button" class="quiet small" onClick=${() => onAsk({ ...worker })}
        aria-label="${isDraining ? "Resume" : "Drain"} ${worker.name}">${isDraining ? "Resume" : "Drain"}</button>`}</td>
    </tr>`;
  }
}

function stateText(worker, state) {
  if (state === "suspected") return `silent for ${worker.silent_seconds} s`;
  if (worker.load_stage && state !== "ready" && state !== "draining" && worker.load_progress < 1)
    return `${worker.load_stage} ${Math.round(worker.load_progress * 100)} %`;
  return worker.silent_seconds ? `${state}, silent for ${worker.silent_seconds} s` : state;
}

function Blocks({ worker }) {
  const { kv, store } = worker;
  if (store?.total_bytes)
    return html`<${Bar} legend=${false} label="Store" total=${store.total_bytes} parts=${[
      { name: "in use", value: store.leased_bytes + store.filling_bytes, kind: "used" },
      { name: "cached", value: store.cached_bytes, kind: "cached" },
      { name: "free", value: store.free_bytes, kind: "free" },
    ]} /><small>${bytes(store.cached_bytes)} stored of ${bytes(store.total_bytes)}</small>`;
  if (!kv?.total_blocks) return html`<span class="soft">–</span>`;
  return html`<${Bar} legend=${false} label="KV blocks" total=${kv.total_blocks} show=${count} parts=${[
    { name: "in use", value: kv.used_blocks - kv.held_blocks, kind: "used" },
    { name: "held", value: kv.held_blocks, kind: "held" },
    { name: "cached", value: kv.cached_blocks, kind: "cached" },
    { name: "free", value: kv.free_blocks, kind: "free" },
  ]} /><small>${count(kv.used_blocks)} in use, ${count(kv.cached_blocks)} cached of ${count(kv.total_blocks)}</small>`;
}

/** Asks before a worker is drained or taken back, and says what follows. */
function DrainQuestion({ worker, workers, onEnd }) {
  const [isDraining] = useState(stateOf(worker) === "draining");
  const [problem, setProblem] = useState("");
  const verb = isDraining ? "Resume" : "Drain";
  const others = workers.filter(
    (each) => each.id !== worker.id && each.role === worker.role && each.model === worker.model && stateOf(each) === "ready",
  ).length;
  const end = async (isSure) => {
    if (!isSure) return onEnd();
    try {
      await json(`/v1/workers/${encodeURIComponent(worker.id)}/${isDraining ? "resume" : "drain"}`, { method: "POST" });
      announce(isDraining ? `${worker.name} takes requests again.` : `${worker.name} drains.`);
      return onEnd();
    } catch (error) {
      return setProblem(error.message);
    }
  };
  if (problem)
    return html`<${Question} key="problem" title="${worker.name} was not ${isDraining ? "resumed" : "drained"}" yes="Close" onClose=${onEnd}><p class="problem">${problem}</p><//>`;
  return html`<${Question} key="ask" title="${verb} ${worker.name}?" yes=${verb} isDangerous=${!isDraining} onClose=${end}>
    ${isDraining
      ? html`<p>The worker takes new requests again.</p>`
      : html`<p>The worker finishes ${worker.num_running ? plural(worker.num_running, "running request") : "what runs"} and takes nothing new, until you
          resume it or it starts again.</p>
        ${others === 0 && html`<p class="warning">No other ${worker.role} worker of ${worker.model} is ready.${" "}
          ${worker.role === "prefill" ? "Decode workers will read prompts themselves." : "Requests for the model will wait, then fail."}</p>`}`}
  <//>`;
}
