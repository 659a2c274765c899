// Rows of a waterfall from an explanation of GET /v1/requests/{id}/explain.

const WORDS = {
  body: "Reading the body",
  text_wait: "Waiting for a text process",
  text: "Template and tokens",
  limits: "Limits",
  queue: "Queue of the gateway",
  route: "Choosing workers",
  submit: "To the worker",
  worker_queue: "Queue of the worker",
  prefill: "Prefill",
  hand_over: "Hand-over",
  transport: "First token back",
  detokenize: "Detokenizing",
  write: "Writing",
};
/** Where there is little room. */
const SHORT = {
  body: "Body",
  text_wait: "Text queue",
  text: "Tokenize",
  queue: "Queue",
  route: "Route",
  submit: "Submit",
  worker_queue: "Worker queue",
  transport: "Transport",
  detokenize: "Detokenize",
  write: "Write",
};
/** Phases in which a worker computes or moves. */
const COMPUTING = new Set(["prefill", "hand_over", "decode", "encode"]);
const WORKING = new Set(["prefill", "decode"]);

export const phaseName = (name) => WORDS[name] ?? name.replaceAll("_", " ").replace(/^./, (first) => first.toUpperCase());

/** The critical path of the first token, and what no segment names. */
export function segmentRows(explanation) {
  const rows = explanation.segments.map((segment) => ({
    name: phaseName(segment.name),
    short: SHORT[segment.name],
    where: segment.worker || segment.process,
    start_ms: segment.start_ms,
    duration_ms: segment.duration_ms,
    kind: WORKING.has(segment.process) ? "work" : "",
  }));
  const rest = explanation.unexplained_ms ?? 0;
  if (rest >= 0.05 && explanation.ttft_ms != null)
    rows.push({ name: "Not explained", where: "", start_ms: explanation.ttft_ms - rest, duration_ms: rest, kind: "unknown" });
  return rows;
}

export const phaseRows = (explanation) =>
  explanation.phases.map((phase) => ({
    name: phaseName(phase.name === "queue" && phase.worker ? "worker_queue" : phase.name),
    where: phase.worker,
    start_ms: phase.start_ms,
    duration_ms: phase.duration_ms,
    kind: COMPUTING.has(phase.name) ? "work" : "",
  }));
