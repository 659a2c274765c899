// A chart over time with uPlot, in the page's colours, and the same numbers as a table.

import uPlot from "./vendor/uplot.js";
import { timeOfDay } from "./format.js";
import { html, useEffect, useRef, useState } from "./lib.js";

const HEIGHT = 220;
const ROWS = 30;

/** Return the colours of the style sheet as the canvas takes them. */
function colours(element) {
  const probe = element.appendChild(document.createElement("i"));
  const found = (value) => {
    probe.style.color = value;
    return getComputedStyle(probe).color;
  };
  const all = {
    soft: found("var(--soft)"),
    line: found("var(--line)"),
    series: ["var(--owner-1)", "var(--owner-2)", "var(--owner-4)"].map(found),
    fills: ["--owner-1", "--owner-2", "--owner-4"].map((name) => found(`color-mix(in srgb, var(${name}) 14%, transparent)`)),
  };
  probe.remove();
  return all;
}

/**
 * `series`: name and values of each line (null: no value); `times`: Unix milliseconds; `show` writes a value;
 * `most`: the highest value of the scale, if it is fixed; `steps`: the distances that lines of the grid may have.
 */
export function Chart({ title, times, series, show, most, steps }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [scheme, setScheme] = useState(0);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setScheme((turn) => turn + 1);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  useEffect(() => {
    plot.current = drawn(place.current, { series, show, most, steps });
    const resized = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      plot.current.destroy();
    };
  }, [scheme]);
  useEffect(() => plot.current.setData([times.map((ms) => ms / 1000), ...series.map((each) => each.values)]), [times, series, scheme]);
  return html`<figure class="chart">
    <figcaption>${title}<span class="keys" aria-hidden="true">${series.map((each, line) => html`<span key=${each.name}><i class="key-${line}" />${each.name}</span>`)}</span></figcaption>
    <div ref=${place} class="canvas" aria-hidden="true" />
    <details><summary>As a table</summary><div class="wide" tabindex="0" role="region" aria-label="${title}, as a table"><table>
      <thead><tr><th scope="col">Time</th>${series.map((each) => html`<th key=${each.name} scope="col" class="number">${each.name}</th>`)}</tr></thead>
      <tbody>${lastOf(times).map((at) => html`<tr key=${times[at]}><th scope="row">${timeOfDay(times[at])}</th>
        ${series.map((each) => html`<td key=${each.name} class="number">${show(each.values[at])}</td>`)}</tr>`)}</tbody>
    </table></div></details>
  </figure>`;
}

/** Places of the newest values, newest first. */
const lastOf = (times) => times.map((_, at) => at).slice(-ROWS).reverse();

function drawn(element, { series, show, most, steps }) {
  const colour = colours(element);
  const axis = { stroke: colour.soft, font: "12px ui-sans-serif, system-ui, sans-serif", grid: { stroke: colour.line, width: 1 }, ticks: { show: false } };
  return new uPlot(
    {
      width: element.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, most ?? Math.max(high ?? 0, 1) * 1.1] } },
      axes: [
        { ...axis, grid: { show: false }, space: 90, values: (_, at) => at.map((seconds) => timeOfDay(seconds * 1000)) },
        { ...axis, size: 68, ...(steps ? { incrs: steps } : {}), values: (_, values) => values.map(show) },
      ],
      series: [
        {},
        ...series.map((each, line) => ({
          label: each.name,
          stroke: colour.series[line],
          fill: colour.fills[line],
          width: 2,
          spanGaps: true,
          points: { show: false },
        })),
      ],
    },
    [[], ...series.map(() => [])],
    element,
  );
}
