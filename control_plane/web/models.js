// Which models are served, and for what.

import { json, session, accessOf } from "./session.js";
import { Store } from "./lib.js";

const EVERY_MS = 5000;

/** `state`: "loading", "ready" or "error"; `list`: `{name, isText, isEmbedding, contextLength}`. */
export const models = new Store({ state: "loading", list: [], message: "" });

/** Ask for the models now and every few seconds, as long as the page is seen. Returns a function that stops. */
export function followModels() {
  const ask = async () => {
    if (document.hidden) return;
    const { token } = session.value;
    try {
      const found = await json("/ai-api/models/search?per_page=1000");
      if (token !== session.value.token) return;
      if (session.value.run !== "yes") session.update({ run: "yes" });
      models.set({ state: "ready", list: found.result.map(described), message: "" });
    } catch (error) {
      if (token !== session.value.token) return;
      session.update({ run: accessOf(error) });
      models.set({ state: "error", list: [], message: error.message });
    }
  };
  ask();
  const timer = setInterval(ask, EVERY_MS);
  let { token } = session.value;
  const stop = session.follow(() => {
    if (token === session.value.token) return;
    token = session.value.token;
    ask();
  });
  return () => {
    clearInterval(timer);
    stop();
  };
}

function described(found) {
  const property = (name) => found.properties.find((each) => each.property_id === name)?.value;
  return {
    name: found.name,
    description: found.description,
    isText: found.task.name === "Text Generation",
    isEmbedding: found.task.name === "Text Embeddings",
    contextLength: Number(property("context_window")) || null,
  };
}
