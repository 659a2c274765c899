// The page: its header, its views by the hash of its address, and the question for a token.

import { live, followLive } from "./live.js";
import { html, render, useEffect, useRef, useState, useStore } from "./lib.js";
import { followModels } from "./models.js";
import { session, setToken } from "./session.js";
import { Cache } from "./views/cache.js";
import { Events } from "./views/events.js";
import { Fleet } from "./views/fleet.js";
import { Playground } from "./views/playground.js";
import { Requests } from "./views/requests.js";

const VIEWS = [
  { id: "playground", name: "Playground", view: Playground },
  { id: "fleet", name: "Fleet", view: Fleet },
  { id: "cache", name: "Cache", view: Cache },
  { id: "requests", name: "Requests", view: Requests },
  { id: "events", name: "Events", view: Events },
];

/** Return the view and the rest of the address, such as a request's id. */
function placeOf(hash) {
  const [, id = "", ...rest] = hash.split("/");
  const view = VIEWS.find((each) => each.id === id) ?? VIEWS[0];
  return { view, rest: rest.map(decodeURIComponent) };
}

function usePlace() {
  const [place, setPlace] = useState(() => placeOf(location.hash));
  useEffect(() => {
    const changed = () => {
      if (location.hash === "" || location.hash.startsWith("#/")) setPlace(placeOf(location.hash));
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return place;
}

function App() {
  const { view, rest } = usePlace();
  const main = useRef(null);
  const isFirst = useRef(true);
  useEffect(() => followModels(), []);
  useEffect(() => followLive(), []);
  useEffect(() => {
    document.title = `${view.name} · Tandem`;
    if (!isFirst.current) main.current.focus({ preventScroll: true });
    isFirst.current = false;
    scrollTo(0, 0);
  }, [view, rest.join("/")]);
  const View = view.view;
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to content</a>
    <header>
      <a class="wordmark" href="#/playground" aria-label="Tandem: playground">Tandem<span>.</span></a>
      <nav aria-label="Views">
        ${VIEWS.map(
          (each) => html`<a key=${each.id} href="#/${each.id}" aria-current=${each === view ? "page" : undefined}>${each.name}</a>`,
        )}
      </nav>
      <${Connection} />
    </header>
    <main id="main" tabindex="-1" ref=${main} aria-label=${view.name}>
      <${TokenQuestion} />
      <${View} rest=${rest} />
    </main>
    <footer><a href="/docs">Reference</a><a href="/v1/models">Models</a><a href="/readyz">Readiness</a></footer>
    <div id="announcements" class="unseen" role="status" aria-live="polite"></div>`;
}

const WORDS = {
  connecting: "connecting",
  live: "live",
  broken: "reconnecting",
  token: "needs a token",
  refused: "own requests only",
};

function Connection() {
  const { state } = useStore(live);
  const { token } = useStore(session);
  const dot = { live: "ready", broken: "failed", connecting: "waiting" }[state] ?? "idle";
  return html`<div class="connection">
    <span class="state"><i class="dot ${dot}" aria-hidden="true" /><span role="status">${WORDS[state]}</span></span>
    ${token && html`<button type="button" class="link" onClick=${() => setToken("")}>Forget token</button>`}
  </div>`;
}

/** Asks for a token where the gateway asked for one, and says what each kind of token opens. */
function TokenQuestion() {
  const { token, run, watch } = useStore(session);
  const [draft, setDraft] = useState("");
  if (run !== "token" || watch === "yes") return null;
  const send = (event) => {
    event.preventDefault();
    if (draft.trim()) setToken(draft.trim());
    setDraft("");
  };
  return html`<form class="token" onSubmit=${send}>
    <h2>${token ? "The gateway does not know this token" : "This gateway has accounts"}</h2>
    <p>A token with the scope <b>inference</b> opens the playground and your own requests. An operator's or an admin's token
      also opens fleet, cache, events and all requests. The token stays in this tab and is gone when you close it.</p>
    <div class="field-row">
      <label class="unseen" for="token">Token</label>
      <input id="token" type="password" autocomplete="off" spellcheck=${false} placeholder="tdm_…" value=${draft}
        onInput=${(event) => setDraft(event.currentTarget.value)} />
      <button type="submit" class="primary">Use token</button>
    </div>
  </form>`;
}

render(html`<${App} />`, document.getElementById("app"));
