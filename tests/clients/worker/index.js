// What do the libraries that people use inside Workers make of env.AI? One route per library and way of asking.
import { runWithTools } from "@cloudflare/ai-utils";
import { generateText, streamText } from "ai";
import { createWorkersAI } from "workers-ai-provider";

export default {
  async fetch(request, env) {
    const url = new URL(request.url);
    const asked = Object.fromEntries(url.searchParams);
    try {
      return Response.json(await ROUTES[url.pathname](env, asked));
    } catch (error) {
      const { name, message, statusCode, lastError } = error;
      return Response.json({ name, message, status: statusCode ?? lastError?.statusCode }, { status: 500 });
    }
  },
};

const ROUTES = { "/generate": generate, "/stream": stream, "/tools": tools, "/models": models };

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

async function generate(env, asked) {
  const { text, usage, finishReason } = await generateText(settings(env, asked));
  return { text, usage, finishReason, requestId: env.AI.lastRequestId };
}

async function stream(env, asked) {
  const failures = [];
  const result = streamText({ ...settings(env, asked), onError: ({ error }) => failures.push(error) });
  let text = "";
  for await (const part of result.textStream) text += part;
  if (failures.length) throw failures[0];
  return { text, usage: await result.usage, finishReason: await result.finishReason };
}

async function tools(env, { model = "@tandem/demo" }) {
  const sum = {
    name: "sum",
    description: "Adds two numbers",
    parameters: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } }, required: ["a", "b"] },
    function: async ({ a, b }) => String(a + b),
  };
  const messages = [{ role: "user", content: "What is 17 + 25? Use the tool." }];
  return runWithTools(env.AI, model, { messages, tools: [sum] });
}

async function models(env) {
  return (await env.AI.models({ search: "demo" })).map((model) => model.name);
}
