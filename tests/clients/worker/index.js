// Prints what libraries for Workers return over env.AI. One route per library and kind of call.
import { runWithTools } from "@cloudflare/ai-utils";
import { embedMany, generateText, jsonSchema, rerank, stepCountIs, streamText, tool } from "ai";
import { createWorkersAI } from "workers-ai-provider";

export default {
  async fetch(request, env) {
    const url = new URL(request.url);
    const query = Object.fromEntries(url.searchParams);
    try {
      return Response.json(await ROUTES[url.pathname](env, query));
    } catch (error) {
      const { name, message, statusCode, lastError } = error;
      return Response.json({ name, message, status: statusCode ?? lastError?.statusCode }, { status: 500 });
    }
  },
};

const ROUTES = {
  "/generate": generate,
  "/stream": stream,
  "/tools": tools,
  "/generate-tools": generateTools,
  "/stream-tools": streamTools,
  "/models": models,
  "/encode": encode,
};
const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const WEATHER = { name: "get_weather", description: "Get the weather in a city" };

function settings(env, { model = "@tandem/demo", affinity, temperature }) {
  const provider = createWorkersAI({ binding: env.AI });
  return {
    model: provider(model, affinity ? { sessionAffinity: affinity } : {}),
    prompt: "What is a KV cache?",
    maxOutputTokens: 24,
    seed: 5,
    maxRetries: 0,
    ...(temperature ? { temperature: Number(temperature) } : {}),
  };
}

async function generate(env, query) {
  const { text, usage, finishReason } = await generateText(settings(env, query));
  return { text, usage, finishReason, requestId: env.AI.lastRequestId };
}

async function stream(env, query) {
  const failures = [];
  const result = streamText({ ...settings(env, query), onError: ({ error }) => failures.push(error) });
  let text = "";
  for await (const part of result.textStream) text += part;
  if (failures.length) throw failures[0];
  return { text, usage: await result.usage, finishReason: await result.finishReason };
}

// @cloudflare/ai-utils: what was called with what, and the answer that came of it.
async function tools(env, { model = "@tandem/demo", name = WEATHER.name }) {
  const called = [];
  const weather = {
    ...WEATHER,
    name,
    parameters: CITY,
    function: async (args) => {
      called.push(args);
      return { temperature: 12, sky: "sunny" };
    },
  };
  const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
  return { called, answer: await runWithTools(env.AI, model, { messages, tools: [weather] }) };
}

// The AI SDK: a call, its result, and the answer to that.
function toolSettings(env, query, called) {
  const execute = async (args) => {
    called.push(args);
    return { temperature: 12, sky: "sunny" };
  };
  return {
    ...settings(env, query),
    prompt: "What is the weather in Oslo?",
    temperature: 0,
    maxOutputTokens: 80,
    stopWhen: stepCountIs(2),
    toolChoice: query.choice === "named" ? { type: "tool", toolName: WEATHER.name } : (query.choice ?? "auto"),
    tools: {
      [WEATHER.name]: tool({ description: WEATHER.description, inputSchema: jsonSchema(CITY), execute }),
      set_timer: tool({
        description: "Start a timer",
        inputSchema: jsonSchema({ type: "object", properties: { minutes: { type: "integer" } }, required: ["minutes"] }),
      }),
    },
  };
}

async function generateTools(env, query) {
  const called = [];
  const { text, steps } = await generateText(toolSettings(env, query, called));
  return { called, text, ends: steps.map((step) => step.finishReason) };
}

async function streamTools(env, query) {
  const called = [];
  const failures = [];
  const result = streamText({ ...toolSettings(env, query, called), onError: ({ error }) => failures.push(error) });
  let text = "";
  for await (const part of result.textStream) text += part;
  if (failures.length) throw failures[0];
  return { called, text, ends: (await result.steps).map((step) => step.finishReason) };
}

async function models(env) {
  return (await env.AI.models({ search: "demo" })).map((model) => model.name);
}

// The binding, and the AI SDK over it: embeddings and a ranking.
async function encode(env, { embedder, ranker }) {
  const provider = createWorkersAI({ binding: env.AI });
  const values = ["a cat sits", "rates rise"];
  const { shape, data } = await env.AI.run(embedder, { text: values });
  const { embeddings } = await embedMany({ model: provider.textEmbedding(embedder), values, maxRetries: 0 });
  const ranked = await rerank({
    model: provider.reranking(ranker), query: "cats", documents: values, topN: 2, maxRetries: 0,
  });
  return { shape, data, embeddings, ranking: ranked.ranking };
}
