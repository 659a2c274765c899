// The playground: asks a model in five ways, shows what the answer cost, and the code for the same call.

import { Answers, isBusy } from "../answers.js";
import { codeOf, LANGUAGES } from "../code.js";
import { count, milliseconds, percent, plural, rate } from "../format.js";
import { Fragment, html, Store, useEffect, useId, useRef, useState, useStore } from "../lib.js";
import { models } from "../models.js";
import { announce, CopyButton, Empty, Loading, Stat, Tabs, Waterfall } from "../parts.js";
import { json, session } from "../session.js";
import { segmentRows } from "../explanation.js";

const MODES = [
  { id: "chat", name: "Chat" },
  { id: "completion", name: "Completion" },
  { id: "schema", name: "JSON Schema" },
  { id: "tools", name: "Tools" },
  { id: "embeddings", name: "Embeddings" },
];
const EXAMPLES = ["What is a KV cache?", "Why split prefill from decode?", "Write a haiku about memory."];
const SCHEMA = {
  type: "object",
  properties: {
    topic: { type: "string", maxLength: 40 },
    summary: { type: "string", maxLength: 160 },
    difficulty: { type: "integer", minimum: 1, maximum: 5 },
  },
  required: ["topic", "summary", "difficulty"],
  additionalProperties: false,
};
const TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Current weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const MAX_ANNOUNCED_CHARACTERS = 1000;

/** What the reader wrote and got: kept while the page is open, and nowhere else. */
const desk = new Store({
  mode: "chat",
  textModel: "",
  embeddingModel: "",
  language: "curl",
  settings: { max_tokens: 256, temperature: 0.7, system: "" },
  messages: [], // of the chat
  toolMessages: [],
  drafts: {
    chat: "",
    completion: "A KV cache is",
    schema: "Describe a KV cache.",
    tools: "What is the weather in Oslo?",
    embeddings: "A cat sits on the mat.\nThe kitten rests on a rug.\nInterest rates rose again.",
  },
  schema: JSON.stringify(SCHEMA, null, 2),
  tools: JSON.stringify(TOOLS, null, 2),
  vectors: null,
});
const answers = Object.fromEntries(MODES.map((mode) => [mode.id, new Answers()]));

const setDraft = (mode, text) => desk.update({ drafts: { ...desk.value.drafts, [mode]: text } });

export function Playground() {
  const { state, list, message } = useStore(models);
  const { run, watch } = useStore(session);
  const desks = useStore(desk);
  if (run === "token" && watch !== "yes") return html`<h1>Playground</h1>`; // the question for a token stands above
  if (run === "refused" || run === "token")
    return html`<h1>Playground</h1><${Empty} title="This token cannot run models">A token with the scope <b>inference</b> runs models. The operator's token opens fleet, cache, requests and events.<//>`;
  if (state === "loading") return html`<h1>Playground</h1><${Loading}>Asking which models are served…<//>`;
  if (state === "error")
    return html`<h1>Playground</h1><${Empty} title="The gateway does not answer">${message}. The page tries again every few seconds.<//>`;
  const isEmbedding = desks.mode === "embeddings";
  const choices = list.filter((model) => (isEmbedding ? model.isEmbedding : model.isText));
  const wanted = isEmbedding ? desks.embeddingModel : desks.textModel;
  const model = choices.find((each) => each.name === wanted) ?? choices[0];
  return html`
    <div class="title-row"><h1>Playground</h1><${ModelChoice} choices=${choices} model=${model} isEmbedding=${isEmbedding} /></div>
    <${Tabs} label="Kind of request" tabs=${MODES} chosen=${desks.mode} onChoose=${(mode) => desk.update({ mode })}>
      ${model ? html`<${Mode} key=${desks.mode} model=${model.name} />` : html`<${NoModel} isEmbedding=${isEmbedding} />`}
    <//>`;
}

function ModelChoice({ choices, model, isEmbedding }) {
  if (!model) return null;
  const choose = (event) => desk.update({ [isEmbedding ? "embeddingModel" : "textModel"]: event.currentTarget.value });
  return html`<label class="choice">Model
    <select value=${model.name} onChange=${choose}>
      ${choices.map((each) => html`<option key=${each.name} value=${each.name}>${each.name}</option>`)}
    </select></label>`;
}

function NoModel({ isEmbedding }) {
  return isEmbedding
    ? html`<${Empty} title="No embedding model is served"><code>tandem up --embedding-model MODEL</code> serves one beside the
        model that writes text.<//>`
    : html`<${Empty} title="No model is being served yet">It appears here as soon as its workers are ready. The view Fleet shows
        what they load.<//>`;
}

function Mode({ model }) {
  const { mode } = useStore(desk);
  const View = { chat: Chat, completion: Completion, schema: Schema, tools: Tools, embeddings: Embeddings }[mode];
  return html`<${View} model=${model} answers=${answers[mode]} />`;
}

// ------------------------------------------------------------------------------------------------------------- chat

function Chat({ model, answers }) {
  const desks = useStore(desk);
  const answer = useStore(answers.store);
  const { messages } = desks;
  const send = async (text) => {
    const before = desk.value.messages;
    const kept = before.at(-1)?.role === "user" ? before.slice(0, -1) : before; // a question without an answer goes
    const asked = [...kept, { role: "user", content: text }];
    desk.update({ messages: asked });
    setDraft("chat", "");
    const end = await asking(answers, "/v1/chat/completions", streamed(chatBody(model, asked)));
    if (desk.value.messages !== asked) return; // a new chat was begun
    if (end.text) desk.update({ messages: [...asked, { role: "assistant", content: end.text }] });
  };
  const clear = () => {
    answers.clear();
    desk.update({ messages: [] });
  };
  const isAnswered = messages.at(-1)?.role === "assistant";
  return html`<div class="desk">
    <div class="talk">
      ${messages.length === 0 && html`<div class="hello"><p>Ask <b>${model}</b> something. The conversation stays in this tab.</p>
        <div class="examples">${EXAMPLES.map((text) => html`<button key=${text} type="button" class="quiet" onClick=${() => send(text)}>${text}</button>`)}</div></div>`}
      <div class="messages">
        ${messages.map((message, place) => html`<${Message} key=${place} ...${message} />`)}
        ${!isAnswered && messages.length > 0 && html`<${Message} role="assistant" content=${answer.text} answer=${answer} />`}
        ${isAnswered && html`<${Ending} answer=${answer} />`}
      </div>
      <${Composer} mode="chat" label="Message" answers=${answers} onSend=${send} placeholder="Ask something. Enter sends, Shift and Enter begin a new line." />
      <div class="below"><${Settings} hasSystem />
        ${messages.length > 0 && html`<button type="button" class="link" onClick=${clear}>New chat</button>`}</div>
    </div>
    <${Aside} answer=${answer} kind="chat" path="/v1/chat/completions"
      body=${chatBody(model, messages.length ? upToLastQuestion(messages) : [{ role: "user", content: EXAMPLES[0] }])} />
  </div>`;
}

const upToLastQuestion = (messages) => messages.slice(0, messages.findLastIndex((each) => each.role === "user") + 1);

function Message({ role, content, answer }) {
  const isBegun = !answer || answer.text || answer.thinking || answer.calls.length;
  return html`<article class="message ${role}" aria-label=${role === "user" ? "You" : "Answer"}>
    ${answer?.thinking && html`<details class="thinking"><summary>Thinking</summary><p>${answer.thinking}</p></details>`}
    ${isBegun ? html`<p>${content}</p>` : answer && isBusy(answer) && html`<p class="pulse" aria-hidden="true">…</p>`}
    ${answer && html`<${Ending} answer=${answer} />`}
  </article>`;
}

/** What the reader must know about an answer's end; nothing if it simply ended. */
function Ending({ answer }) {
  if (answer.phase === "failed") return html`<p class="problem" role="alert">${answer.error}</p>`;
  if (answer.phase === "stopped") return html`<p class="note">Stopped.</p>`;
  if (answer.phase === "done" && answer.finish === "length")
    return html`<p class="note">The answer ended at the largest number of tokens; the settings have it.</p>`;
  return null;
}

function chatBody(model, messages, more = {}) {
  const { settings } = desk.value;
  const system = settings.system.trim() ? [{ role: "system", content: settings.system.trim() }] : [];
  return {
    model,
    messages: [...system, ...messages],
    max_tokens: settings.max_tokens,
    temperature: settings.temperature,
    stream: true,
    ...more,
  };
}

const streamed = (body) => ({ ...body, stream_options: { include_usage: true } });

/** Ask and tell screen readers: once that it began, once what came. */
async function asking(answers, path, body) {
  announce("Answering.");
  const end = await answers.ask(path, body);
  const words = { done: "Answer complete.", stopped: "Answer stopped.", failed: "" }[end.phase] ?? "";
  const called = end.calls.map((each) => `Calls ${each.name}.`).join(" ");
  announce(`${words} ${called} ${end.text}`.trim().slice(0, MAX_ANNOUNCED_CHARACTERS));
  return end;
}

// -------------------------------------------------------------------------------------------- completion and schema

function Completion({ model, answers }) {
  const desks = useStore(desk);
  const answer = useStore(answers.store);
  const body = () => ({
    model,
    prompt: desk.value.drafts.completion,
    max_tokens: desk.value.settings.max_tokens,
    temperature: desk.value.settings.temperature,
    stream: true,
  });
  const send = () => asking(answers, "/v1/completions", streamed(body()));
  return html`<div class="desk">
    <div class="talk">
      <${Composer} mode="completion" label="Prompt" answers=${answers} onSend=${send} rows=${4} button="Continue" keeps />
      <${Settings} />
      <${Result} answer=${answer} empty="The model writes on from your prompt; no chat template is applied.">
        <p class="running"><span class="soft">${answer.phase !== "idle" && desks.drafts.completion}</span>${answer.text}</p>
      <//>
    </div>
    <${Aside} answer=${answer} kind="completion" path="/v1/completions" body=${body()} />
  </div>`;
}

function Schema({ model, answers }) {
  const desks = useStore(desk);
  const answer = useStore(answers.store);
  const { value: schema, problem } = parsed(desks.schema);
  const format = { type: "json_schema", json_schema: { name: "answer", schema: schema ?? {} } };
  const body = () =>
    chatBody(model, [{ role: "user", content: desk.value.drafts.schema }], { response_format: format });
  const send = () => asking(answers, "/v1/chat/completions", streamed(body()));
  return html`<div class="desk">
    <div class="talk">
      <${JsonField} name="schema" label="JSON Schema of the answer" problem=${problem} />
      <${Composer} mode="schema" label="Message" answers=${answers} onSend=${send} keeps disabled=${Boolean(problem)} />
      <${Settings} hasSystem />
      <${Result} answer=${answer} empty="Every token that would break the schema is masked, so the answer always parses.">
        <pre class="json" tabindex="0" aria-label="Answer as JSON">${pretty(answer)}</pre>
      <//>
    </div>
    <${Aside} answer=${answer} kind="chat" path="/v1/chat/completions" body=${body()} />
  </div>`;
}

/** Write JSON with its lines once it is complete; until then as it comes. */
function pretty(answer) {
  if (isBusy(answer)) return answer.text;
  const { value } = parsed(answer.text);
  return value === null ? answer.text : JSON.stringify(value, null, 2);
}

function parsed(text) {
  try {
    return { value: JSON.parse(text), problem: "" };
  } catch (error) {
    return { value: null, problem: `This is not JSON: ${error.message}` };
  }
}

function JsonField({ name, label, problem }) {
  const desks = useStore(desk);
  const id = useId();
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <textarea id=${id} class="mono" rows="9" spellcheck=${false} value=${desks[name]} aria-invalid=${String(Boolean(problem))}
      aria-describedby="${id}-problem" onInput=${(event) => desk.update({ [name]: event.currentTarget.value })} />
    <p id="${id}-problem" class="problem" hidden=${!problem}>${problem}</p>
  </div>`;
}

function Result({ answer, empty, children }) {
  if (answer.phase === "idle") return html`<p class="hint">${empty}</p>`;
  const isWaiting = answer.phase === "asking" && !answer.text;
  return html`<section class="result" aria-label="Answer">
    ${answer.thinking && html`<details class="thinking"><summary>Thinking</summary><p>${answer.thinking}</p></details>`}
    ${isWaiting ? html`<p class="pulse" aria-hidden="true">…</p>` : children}
    <${Ending} answer=${answer} />
  </section>`;
}

// ------------------------------------------------------------------------------------------------------------ tools

function Tools({ model, answers }) {
  const desks = useStore(desk);
  const answer = useStore(answers.store);
  const { value: tools, problem } = parsed(desks.tools);
  const { toolMessages } = desks;
  const question = () => [{ role: "user", content: desk.value.drafts.tools }];
  const ask = async (messages) => {
    desk.update({ toolMessages: messages });
    const end = await asking(answers, "/v1/chat/completions", streamed(chatBody(model, messages, { tools })));
    if (desk.value.toolMessages !== messages) return;
    const calls = end.calls.map((each) => ({
      id: each.id,
      type: "function",
      function: { name: each.name, arguments: each.arguments },
    }));
    const said = { role: "assistant", content: end.text || null, ...(calls.length ? { tool_calls: calls } : {}) };
    if (end.phase === "done") desk.update({ toolMessages: [...messages, said] });
  };
  const last = toolMessages.at(-1);
  const open = last?.role === "assistant" && last.tool_calls && !isBusy(answer) ? last.tool_calls : [];
  return html`<div class="desk">
    <div class="talk">
      <${JsonField} name="tools" label="Tools, as in OpenAI's API" problem=${problem} />
      <${Composer} mode="tools" label="Message" answers=${answers} onSend=${() => ask(question())} keeps disabled=${Boolean(problem)} />
      <${Settings} hasSystem />
      <${Result} answer=${answer} empty="The model answers, or calls a tool. You then play the tool, and the model goes on.">
        ${answer.calls.map(
          (each) => html`<div key=${each.id} class="call"><span class="soft">calls</span> <b>${each.name}</b><code>${each.arguments}</code></div>`,
        )}
        ${answer.text && html`<p class="running">${answer.text}</p>`}
      <//>
      ${open.length > 0 && html`<${ToolResults} key=${open[0].id} calls=${open} onSend=${(results) => ask([...toolMessages, ...results])} />`}
    </div>
    <${Aside} answer=${answer} kind="chat" path="/v1/chat/completions"
      body=${chatBody(model, toolMessages.length && last.role !== "assistant" ? toolMessages : question(), { tools: tools ?? [] })} />
  </div>`;
}

function ToolResults({ calls, onSend }) {
  const id = useId();
  const [results, setResults] = useState(() => calls.map(() => `{"degrees": 12, "sky": "clear"}`));
  const send = (event) => {
    event.preventDefault();
    onSend(calls.map((each, place) => ({ role: "tool", tool_call_id: each.id, content: results[place] })));
  };
  return html`<form class="field" onSubmit=${send}>
    ${calls.map(
      (each, place) => html`<${Fragment} key=${each.id}>
        <label for="${id}-${place}">Result of ${each.function.name}</label>
        <textarea id="${id}-${place}" class="mono" rows="2" value=${results[place]}
          onInput=${(event) => setResults(results.map((text, other) => (other === place ? event.currentTarget.value : text)))} />
      <//>`,
    )}
    <div class="buttons"><button type="submit" class="primary">Send the result</button></div>
  </form>`;
}

// ------------------------------------------------------------------------------------------------------- embeddings

function Embeddings({ model }) {
  const desks = useStore(desk);
  const [state, setState] = useState({ phase: "idle", error: "" });
  const texts = () => desk.value.drafts.embeddings.split("\n").map((text) => text.trim()).filter(Boolean);
  const body = () => ({ model, input: texts() });
  const send = async () => {
    setState({ phase: "asking", error: "" });
    announce("Computing embeddings.");
    const began = performance.now();
    try {
      const asked = texts();
      const answer = await json("/v1/embeddings", { method: "POST", body: { model, input: asked } });
      const vectors = answer.data.map((item) => item.embedding);
      desk.update({ vectors: { texts: asked, vectors, tokens: answer.usage.prompt_tokens, ms: performance.now() - began } });
      setState({ phase: "done", error: "" });
      announce(`${plural(vectors.length, "embedding")} computed.`);
    } catch (error) {
      setState({ phase: "failed", error: error.message });
    }
  };
  return html`<div class="desk">
    <div class="talk">
      <${Composer} mode="embeddings" label="Texts, one a line" onSend=${send} rows=${5} button="Embed" keeps isAsking=${state.phase === "asking"} />
      ${state.phase === "failed" && html`<p class="problem" role="alert">${state.error}</p>`}
      ${desks.vectors ? html`<${Similarities} ...${desks.vectors} />` : html`<p class="hint">Each text becomes a vector. The table then shows how close each pair of texts is.</p>`}
    </div>
    <aside class="facts">
      ${desks.vectors && html`<section><h2>This answer</h2><dl class="stats">
        <${Stat} name="Time" value=${milliseconds(desks.vectors.ms)} />
        <${Stat} name="Tokens" value=${count(desks.vectors.tokens)} />
        <${Stat} name="Dimensions" value=${count(desks.vectors.vectors[0]?.length)} />
      </dl></section>`}
      <${Code} kind="embeddings" path="/v1/embeddings" body=${body()} />
    </aside>
  </div>`;
}

function cosine(left, right) {
  const dot = (a, b) => a.reduce((sum, value, place) => sum + value * b[place], 0);
  return dot(left, right) / Math.sqrt(dot(left, left) * dot(right, right));
}

function Similarities({ texts, vectors }) {
  const shown = texts.slice(0, 8);
  return html`<div class="wide" tabindex="0" role="region" aria-label="Similarities"><table class="similarities">
    <caption>Cosine of each pair${texts.length > 8 ? `: the first 8 of ${texts.length} texts` : ""}</caption>
    <thead><tr><th scope="col">Text</th>${shown.map((_, place) => html`<th key=${place} scope="col" class="number">${place + 1}</th>`)}</tr></thead>
    <tbody>${shown.map((text, row) => html`<tr key=${row}>
      <th scope="row"><span class="soft">${row + 1}</span> ${text}</th>
      ${shown.map((_, column) => {
        const value = cosine(vectors[row], vectors[column]);
        return html`<td key=${column} class="number"><i class="heat" style=${{ opacity: Math.max(0, value) ** 2 * 0.32 }} /><span>${value.toFixed(2)}</span></td>`;
      })}
    </tr>`)}</tbody>
  </table></div>`;
}

// ----------------------------------------------------------------------------------------------------------- shared

/** The text to send, and the button that becomes Stop. `keeps`: the text stays after sending. */
function Composer({ mode, label, answers, onSend, placeholder = "", rows = 2, button = "Send", keeps, disabled, isAsking }) {
  const { drafts } = useStore(desk);
  const idle = useRef(new Answers());
  const answer = useStore((answers ?? idle.current).store);
  const area = useRef(null);
  const id = useId();
  const isRunning = isBusy(answer);
  const text = drafts[mode];
  useEffect(() => {
    const field = area.current; // as tall as its text, within the style sheet's bounds
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight + 2}px`;
  }, [text]);
  const send = (event) => {
    event.preventDefault();
    if (isRunning || disabled || isAsking || !text.trim()) return;
    onSend(text.trim());
  };
  const key = (event) => {
    const sends = keeps ? event.ctrlKey || event.metaKey : !event.shiftKey;
    if (event.key === "Enter" && sends && !event.isComposing) send(event);
  };
  return html`<form class="composer" onSubmit=${send}>
    <label for=${id} class=${keeps ? "" : "unseen"}>${label}</label>
    <textarea id=${id} ref=${area} rows=${rows} value=${text} placeholder=${placeholder} onKeyDown=${key}
      onInput=${(event) => setDraft(mode, event.currentTarget.value)} />
    <div class="buttons">
      ${isRunning
        ? html`<button type="button" class="primary" key="stop" onClick=${() => answers.stop()}>Stop</button>`
        : html`<button type="submit" class="primary" key="send" disabled=${disabled || isAsking || !text.trim()}>${button}</button>`}
    </div>
  </form>`;
}

function Settings({ hasSystem }) {
  const { settings } = useStore(desk);
  const id = useId();
  const change = (name, value) => desk.update({ settings: { ...settings, [name]: value } });
  const number = (name, label, min, max, step) => html`<label for="${id}-${name}">${label}</label>
    <input id="${id}-${name}" type="number" min=${min} max=${max} step=${step} value=${settings[name]}
      onChange=${(event) => event.currentTarget.checkValidity() && event.currentTarget.value !== "" && change(name, Number(event.currentTarget.value))} />`;
  return html`<details class="settings"><summary>Settings</summary><div class="grid">
    ${number("max_tokens", "Most tokens of the answer", 1, 100000, 1)}
    ${number("temperature", "Temperature", 0, 2, 0.1)}
    ${hasSystem && html`<label for="${id}-system">System message</label>
      <textarea id="${id}-system" rows="2" value=${settings.system} onInput=${(event) => change("system", event.currentTarget.value)} />`}
  </div></details>`;
}

function Aside({ answer, kind, path, body }) {
  return html`<aside class="facts"><${Facts} answer=${answer} /><${Code} kind=${kind} path=${path} body=${body} /></aside>`;
}

/** What the answer took: from the gateway's explanation, and measured here until it is there. */
function Facts({ answer }) {
  const { explanation, usage } = answer;
  if (answer.phase === "idle") return null;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return html`<section aria-label="This answer">
    <h2>This answer</h2>
    <dl class="stats">
      <${Stat} name="First token" value=${milliseconds(explanation?.ttft_ms ?? answer.ttftMs)} />
      <${Stat} name="Tokens a second" value=${rate(explanation?.tokens_per_second ?? answer.tokensPerSecond)} />
      <${Stat} name="Prompt" value=${count(usage?.prompt_tokens)} note=${cached ? `${percent(cached / usage.prompt_tokens)} cached` : ""} />
      <${Stat} name="Answer" value=${count(usage?.completion_tokens)} note="tokens" />
    </dl>
    ${explanation && html`<${Waterfall} caption="Until the first token" rows=${segmentRows(explanation)} total=${explanation.ttft_ms} isCompact />
      <p class="note"><a href="#/requests/${encodeURIComponent(answer.requestId)}">Why it went where it went</a></p>`}
    ${answer.explanationState === "waiting" && html`<p class="note">Waiting for the phases…</p>`}
    ${answer.explanationState === "missing" && html`<p class="note">The gateway keeps no explanation of this answer.</p>`}
  </section>`;
}

function Code({ kind, path, body }) {
  const { language } = useStore(desk);
  const { token } = useStore(session);
  const text = codeOf(language, { kind, path, body, origin: location.origin, hasToken: Boolean(token) });
  return html`<section class="code" aria-label="Code">
    <h2>The same from your code</h2>
    <${Tabs} label="Language" tabs=${LANGUAGES} chosen=${language} onChoose=${(chosen) => desk.update({ language: chosen })} quiet>
      <pre tabindex="0" aria-label="Code">${text}</pre>
      <${CopyButton} text=${text} />
    <//>
  </section>`;
}
