// Prints what OpenAI's client for Node.js returns: an answer, a stream, errors.   node openai.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const ask = { model, messages: [{ role: "user", content: "What is a KV cache?" }], max_tokens: 24, seed: 5 };

const whole = await client.chat.completions.create(ask);
const collected = { streamed: "", usage: null, finish: null };
const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  collected.streamed += chunk.choices[0]?.delta.content ?? "";
  collected.finish = chunk.choices[0]?.finish_reason ?? collected.finish;
  collected.usage = chunk.usage ?? collected.usage;
}
const plain = await client.completions.create({ model, prompt: "Once", max_tokens: 4, logprobs: 1, echo: false, seed: 1 });
const models = (await client.models.list()).data.map((each) => each.id);
const errors = [];
for (const change of [{ model: "no-such-model" }, { temperature: -3 }, { tools: [{ type: "function" }] }]) {
  await client.chat.completions.create({ ...ask, ...change }).catch((error) => {
    errors.push({ kind: error.constructor.name, status: error.status, message: error.message });
  });
}
const left = await client.completions.create({ model, prompt: "Once", max_tokens: 900, temperature: 2, stream: true });
for await (const _ of left) break;

console.log(JSON.stringify({ whole, ...collected, plain, models, errors }));
