// Who the reader of the page is: the token, what it permits, and requests that carry it.

import { Store } from "./lib.js";

const KEY = "tandem-token";

/**
 * `run`: whether models can be run; `watch`: whether the fleet may be seen. Each is "unknown", "yes", "token" (a token is
 * needed, or another one), "refused" (the token does not permit it) or "away" (no answer).
 */
export const session = new Store({ token: sessionStorage.getItem(KEY) ?? "", run: "unknown", watch: "unknown" });

export function setToken(token) {
  if (token) sessionStorage.setItem(KEY, token);
  else sessionStorage.removeItem(KEY);
  session.update({ token, run: "unknown", watch: "unknown" });
}

/** An answer that is no success: the gateway's own sentence. */
export class GatewayError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request with the token; `body` is sent as JSON. Throws GatewayError for a refusal. */
export async function call(path, { method = "GET", body, signal, headers = {} } = {}) {
  const { token } = session.value;
  const all = { ...headers };
  if (token) all.authorization = `Bearer ${token}`;
  if (body !== undefined || method !== "GET") all["content-type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers: all,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (!answer.ok) throw new GatewayError(answer.status, await messageOf(answer));
  return answer;
}

export const json = async (path, options) => (await call(path, options)).json();

/** Return what a refusal means for a part of the page. */
export function accessOf(error) {
  if (error.status === 401) return "token";
  if (error.status === 403) return "refused";
  return "away";
}

async function messageOf(answer) {
  const text = await answer.text();
  try {
    const error = JSON.parse(text);
    return error.error?.message ?? error.errors?.[0]?.message ?? error.description ?? text;
  } catch {
    return text || `the gateway answered ${answer.status}`;
  }
}
