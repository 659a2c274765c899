// What a view shows to a reader who may not see it.

import { html, useStore } from "../lib.js";
import { live } from "../live.js";
import { Empty } from "../parts.js";

export function NoView({ what, state }) {
  return state === "token"
    ? html`<${Empty} title="A token is needed">The gateway shows ${what} to operators only. Use the token of the gateway's operator, or one
        with the scope <b>admin</b>.<//>`
    : html`<${Empty} title="Only operators see ${what}">Your token opens the playground and your own requests. The token of the gateway's
        operator, or one with the scope <b>admin</b>, opens this view.<//>`;
}

/** While the stream is not there: the gateway's own sentence, such as that too many readers have the page open. */
export function NoAnswer() {
  const { message } = useStore(live);
  return html`<${Empty} title="The gateway sends nothing now">${message && `${message}. `}The page tries again by itself.<//>`;
}
