// What the gateway sends while the page is open: fleet, requests, cache and events, over one stream.

import { Store } from "./lib.js";
import { accessOf, call, session } from "./session.js";
import { eventsOf } from "./sse.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;
const SILENCE_MS = 25_000;
const MAX_EVENTS = 2000;

/** `state`: "connecting", "live", "broken", "token" (one is needed) or "refused" (the token is not an operator's). */
export const live = new Store({ state: "connecting", message: "", hello: null });
/** Workers and hosts by id, each entry the newest; `version` changes with each. */
export const fleet = new Store({ isKnown: false, workers: new Map(), hosts: new Map(), models: [], rates: {} });
export const requests = new Store({ isKnown: false, data: [] });
export const cache = new Store({ isKnown: false, tiers: [], history: [] });
/** Newest last. */
export const events = new Store([]);

/** Keep the stream open for as long as the page is. Returns a function that ends it. */
export function followLive() {
  let controller = new AbortController();
  let isOver = false;
  let { token } = session.value;
  const stop = session.follow(() => {
    if (token === session.value.token) return;
    token = session.value.token;
    controller.abort();
  });
  const run = async () => {
    let pause = FIRST_PAUSE_MS;
    while (!isOver) {
      controller = new AbortController();
      const asked = session.value.token;
      try {
        await follow(controller, () => {
          pause = FIRST_PAUSE_MS;
        });
        // The gateway ends a stream after 15 minutes, or because it drains: the next attempt tells which.
      } catch (error) {
        if (isOver) return;
        if (asked !== session.value.token) {
          forget();
          continue;
        }
        const access = error.status ? accessOf(error) : "away";
        if (session.value.watch !== access) session.update({ watch: access });
        live.update({ state: access === "away" ? "broken" : access, message: error.message });
      }
      await wait(["token", "refused"].includes(live.value.state) ? null : pause, asked);
      pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
    }
  };
  run();
  return () => {
    isOver = true;
    stop();
    controller.abort();
  };
}

function forget() {
  live.set({ state: "connecting", message: "", hello: null });
  fleet.set({ isKnown: false, workers: new Map(), hosts: new Map(), models: [], rates: {} });
  requests.set({ isKnown: false, data: [] });
  cache.set({ isKnown: false, tiers: [], history: [] });
  events.set([]);
}

/** Wait `ms`, or (null) until the token changes. */
function wait(ms, asked) {
  return new Promise((resolve) => {
    const stop = session.follow(() => {
      if (asked === session.value.token) return;
      stop();
      resolve();
    });
    if (ms !== null)
      setTimeout(() => {
        stop();
        resolve();
      }, ms);
  });
}

async function follow(controller, began) {
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => controller.abort(), SILENCE_MS);
  };
  try {
    const response = await call("/v1/live", { signal: controller.signal });
    if (session.value.watch !== "yes") session.update({ watch: "yes" });
    live.update({ state: "live", message: "" });
    heard();
    for await (const { event, data } of eventsOf(response, heard)) {
      began();
      take(event, JSON.parse(data));
    }
  } finally {
    clearTimeout(timer);
  }
}

const TAKERS = {
  hello: (data) => live.update({ hello: data }),
  fleet: takeFleet,
  requests: ({ data }) => requests.set({ isKnown: true, data }),
  cache: takeCache,
  event: (data) => events.set([...events.value.filter((each) => each.id !== data.id), data].slice(-MAX_EVENTS)),
};

function take(event, data) {
  TAKERS[event]?.(data);
}

function takeFleet({ full, workers, gone, hosts, hosts_gone, models, rates }) {
  const known = full ? new Map() : new Map(fleet.value.workers);
  for (const worker of workers) known.set(worker.id, worker);
  for (const id of gone) known.delete(id);
  const places = full ? new Map() : new Map(fleet.value.hosts);
  for (const host of hosts) places.set(host.host_id, host);
  for (const id of hosts_gone) places.delete(id);
  fleet.set({ isKnown: true, workers: known, hosts: places, models, rates });
}

function takeCache({ tiers, history }) {
  const last = cache.value.history.at(-1)?.time_ms ?? 0;
  const points = [...cache.value.history, ...history.filter((point) => point.time_ms > last)];
  cache.set({ isKnown: true, tiers, history: points.slice(-720) });
}
