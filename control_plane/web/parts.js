// The parts that views are made of.

import { bytes, milliseconds } from "./format.js";
import { html, useEffect, useId, useRef, useState } from "./lib.js";

/** A row of tabs and the panel of the chosen one (ARIA Authoring Practices, "Tabs with automatic activation"). */
export function Tabs({ label, tabs, chosen, onChoose, children, quiet = false }) {
  const id = useId();
  const row = useRef(null);
  const move = (event) => {
    const place = tabs.findIndex((tab) => tab.id === chosen);
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const target = (next + tabs.length) % tabs.length;
    onChoose(tabs[target].id);
    row.current.children[target].focus();
  };
  return html`
    <div role="tablist" aria-label=${label} class=${quiet ? "tabs quiet" : "tabs"} ref=${row} onKeyDown=${move}>
      ${tabs.map(
        (tab) => html`<button key=${tab.id} type="button" role="tab" id="${id}-${tab.id}"
          aria-selected=${String(tab.id === chosen)} aria-controls="${id}-panel"
          tabindex=${tab.id === chosen ? 0 : -1} onClick=${() => onChoose(tab.id)}>${tab.name}</button>`,
      )}
    </div>
    <div role="tabpanel" id="${id}-panel" aria-labelledby="${id}-${chosen}" class="panel">${children}</div>`;
}

/** A bar of parts of a whole: `parts` have name, value and kind (a class of the style sheet). The text is the legend. */
export function Bar({ label, parts, total, show = bytes, legend = true }) {
  const shown = parts.filter((part) => part.value > 0);
  const sum = total || shown.reduce((all, part) => all + part.value, 0) || 1;
  const text = shown.map((part) => `${part.name} ${show(part.value)}`).join(", ");
  return html`<div class="bar-box">
    <div class="bar" role="img" aria-label="${label}: ${text || "nothing"}">
      ${shown.map((part) => html`<i key=${part.name} class=${part.kind} style=${{ width: `${(100 * part.value) / sum}%` }} />`)}
    </div>
    ${legend &&
    html`<ul class="legend" aria-hidden="true">
      ${shown.map((part) => html`<li key=${part.name}><i class=${part.kind} />${part.name} <b>${show(part.value)}</b></li>`)}
    </ul>`}
  </div>`;
}

/** A dot and a word: never the colour alone. */
export function State({ state, children }) {
  return html`<span class="state"><i class="dot ${state}" aria-hidden="true" />${children ?? state}</span>`;
}

export function Stat({ name, value, note }) {
  return html`<div class="stat"><dt>${name}</dt><dd>${value}${note && html` <small>${note}</small>`}</dd></div>`;
}

/** What a view shows instead of content: nothing yet, an error, or who may see it. */
export function Empty({ title, children, action }) {
  return html`<div class="empty"><h2>${title}</h2><p>${children}</p>${action}</div>`;
}

export function Loading({ children }) {
  return html`<div class="empty" aria-busy="true"><p class="pulse">${children}</p></div>`;
}

export function CopyButton({ text, label = "Copy" }) {
  const [note, setNote] = useState("");
  useEffect(() => {
    if (!note) return undefined;
    const timer = setTimeout(() => setNote(""), 2000);
    return () => clearTimeout(timer);
  }, [note]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setNote("Copied");
    } catch {
      setNote("Select and copy by hand: the browser forbids it here"); // plain HTTP beyond this machine
    }
  };
  return html`<span class="copy"><button type="button" class="quiet" onClick=${copy}>${label}</button>
    <span role="status">${note}</span></span>`;
}

/** A modal question. `onClose` is called with whether the answer was yes. */
export function Question({ title, children, yes, isDangerous, onClose }) {
  const dialog = useRef(null);
  const id = useId();
  useEffect(() => {
    if (!dialog.current.open) dialog.current.showModal();
  }, []);
  const end = (answer) => {
    dialog.current.close();
    onClose(answer);
  };
  return html`<dialog ref=${dialog} aria-labelledby=${id} onCancel=${(event) => { event.preventDefault(); end(false); }}>
    <h2 id=${id}>${title}</h2>
    ${children}
    <div class="buttons">
      <button type="button" class="quiet" onClick=${() => end(false)}>Cancel</button>
      <button type="button" class=${isDangerous ? "danger" : "primary"} onClick=${() => end(true)}>${yes}</button>
    </div>
  </dialog>`;
}

/** A waterfall as a table: what, where, when, how long, and the bar that shows it. */
export function Waterfall({ caption, rows, total, isCompact = false }) {
  const end = total || Math.max(...rows.map((row) => row.start_ms + row.duration_ms), 0.001);
  const place = (ms) => `${Math.min(100, Math.max(0, (100 * ms) / end))}%`;
  return html`<table class=${isCompact ? "waterfall compact" : "waterfall"}>
    <colgroup><col /><col /><col /></colgroup>
    <caption>${caption}</caption>
    <thead><tr><th scope="col">Phase</th><th scope="col"><span class="unseen">When</span></th><th scope="col" class="number">Time</th></tr></thead>
    <tbody>
      ${rows.map(
        (row, index) => html`<tr key=${index}>
          <th scope="row">${isCompact ? row.short ?? row.name : row.name}${row.where && !isCompact && html`<small>${row.where}</small>`}</th>
          <td><span class="track"><i class=${row.kind ?? ""} style=${{ left: place(row.start_ms), width: place(row.duration_ms) }} /></span>
            <span class="unseen">begins at ${milliseconds(row.start_ms)}</span></td>
          <td class="number">${milliseconds(row.duration_ms)}</td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}

/** Tell screen readers something once. The page has one such region, so that nothing is read twice. */
export function announce(text) {
  const region = document.getElementById("announcements");
  if (region) region.textContent = text;
}
