// What all modules of the page share: Preact, htm, and a value that components follow.

import { Component, Fragment, h, render } from "./vendor/preact.js";
import { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { Component, Fragment, render, useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState };

/** A value with followers. `set` replaces it; nobody changes it in place. */
export class Store {
  #followers = new Set();

  constructor(value) {
    this.value = value;
  }

  set(value) {
    this.value = value;
    for (const follower of [...this.#followers]) follower();
  }

  update(changes) {
    this.set({ ...this.value, ...changes });
  }

  follow(follower) {
    this.#followers.add(follower);
    return () => this.#followers.delete(follower);
  }
}

/** Return a store's value, and render again when the store changes. */
export function useStore(store) {
  const [, setTurn] = useState(0);
  useEffect(() => {
    const stop = store.follow(() => setTurn((turn) => turn + 1));
    setTurn((turn) => turn + 1); // what changed between rendering and following
    return stop;
  }, [store]);
  return store.value;
}
