// The KV cache: its tiers now, and how much of the prompts it saved over the last hour.

import { bytes, count, percent } from "../format.js";
import { Chart } from "../chart.js";
import { html, useMemo, useStore } from "../lib.js";
import { cache, fleet, live } from "../live.js";
import { Bar, Empty, Loading, Stat } from "../parts.js";
import { NoAnswer, NoView } from "./no_view.js";

const TIERS = {
  pool: { name: "Pool", note: "memory of the engines; the fastest" },
  store: { name: "Store", note: "memory of the KV service of each host" },
  disk: { name: "Disk", note: "of the KV services" },
};
const MINUTE_POINTS = 12;
const BYTE_STEPS = Array.from({ length: 45 }, (_, power) => 2 ** power);

export function Cache() {
  const { state } = useStore(live);
  const known = useStore(cache);
  const { rates } = useStore(fleet);
  const shown = useMemo(() => shares(known.history), [known.history]);
  if (state === "token" || state === "refused") return html`<h1>Cache</h1><${NoView} what="the cache" state=${state} />`;
  if (!known.isKnown)
    return html`<h1>Cache</h1>${state === "broken" ? html`<${NoAnswer} />` : html`<${Loading}>Asking for the tiers of the cache…<//>`}`;
  const hour = sums(known.history);
  return html`
    <h1>Cache</h1>
    <p class="lead">Prompts that begin as earlier ones did are not computed again: their KV blocks come from the engine's pool, from the store of
      the host, or from disk.</p>
    ${state === "broken" && html`<p class="problem" role="status">The connection is lost. What you see is the last known state.</p>`}
    <dl class="stats wide-stats">
      <${Stat} name="Prompt from caches" value=${percent(rates.cached_share)} note="last minute" />
      <${Stat} name="Prompt from caches" value=${percent(hour.prompt ? (hour.pool + hour.store) / hour.prompt : null)} note="last hour" />
      <${Stat} name="Tokens from pools" value=${count(hour.pool)} note="last hour" />
      <${Stat} name="Tokens from stores" value=${count(hour.store)} note="last hour" />
      <${Stat} name="Tokens computed" value=${count(Math.max(0, hour.prompt - hour.pool - hour.store))} note="last hour" />
    </dl>
    <section class="card tiers"><h2>Tiers</h2>
      ${known.tiers.map((tier) => html`<div key=${tier.tier} class="device"><span>${TIERS[tier.tier].name}<small>${TIERS[tier.tier].note}</small></span>
        ${tier.total_bytes > 0
          ? html`<${Bar} label=${TIERS[tier.tier].name} total=${tier.total_bytes} parts=${[
              { name: "In use", value: tier.used_bytes, kind: "used" },
              { name: "Cached", value: tier.cached_bytes, kind: "cached" },
              { name: "Free", value: tier.free_bytes, kind: "free" },
            ]} />`
          : html`<p class="soft none">Not configured${tier.tier === "disk" ? html`: <code>--disk-bytes</code> of the KV service adds it` : ""}.</p>`}</div>`)}
    </section>
    ${known.history.length < 2
      ? html`<${Empty} title="The history begins now">The first points of the charts come in a few seconds.<//>`
      : html`<${Chart} title="Share of the prompts that came from caches" times=${shown.times} show=${percent} most=${1}
            series=${[{ name: "Pool and store", values: shown.all }, { name: "Store alone", values: shown.store }]} />
          <${Chart} title="Bytes that are kept for later prompts" times=${shown.times} show=${bytes} steps=${BYTE_STEPS}
            series=${[{ name: "Pool", values: shown.poolBytes }, { name: "Store", values: shown.storeBytes }, { name: "Disk", values: shown.diskBytes }]} />`}`;
}

function sums(points) {
  const total = (name) => points.reduce((sum, point) => sum + point[name], 0);
  return { prompt: total("prompt_tokens"), pool: total("pool_tokens"), store: total("store_tokens") };
}

/** Each share is over the last minute up to its point, so that one request does not make a spike. */
function shares(points) {
  const window = (at) => sums(points.slice(Math.max(0, at - MINUTE_POINTS + 1), at + 1));
  const recent = points.map((_, at) => window(at));
  return {
    times: points.map((point) => point.time_ms),
    all: recent.map(({ prompt, pool, store }) => (prompt ? (pool + store) / prompt : null)),
    store: recent.map(({ prompt, store }) => (prompt ? store / prompt : null)),
    poolBytes: points.map((point) => point.pool_bytes),
    storeBytes: points.map((point) => point.store_bytes),
    diskBytes: points.map((point) => point.disk_bytes),
  };
}
