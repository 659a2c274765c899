// openai for Node.js: a chat, a stream, a tool, structured output, embeddings, the list of models.
import assert from "node:assert";
import OpenAI from "openai";

const { TANDEM_URL, TANDEM_MODEL: model, TANDEM_EMBEDDER } = process.env;
const client = new OpenAI({ baseURL: `${TANDEM_URL}/v1`, apiKey: "none", maxRetries: 0 });
const ask = { model, messages: [{ role: "user", content: "What is 17 + 25?" }], max_tokens: 48, temperature: 0 };

const models = (await client.models.list()).data.map((each) => each.id);
assert(models.includes(model));
const whole = await client.chat.completions.create({ ...ask, user: "me", store: false, service_tier: "auto" });
assert(whole.choices[0].message.content);
const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
let last;
for await (const chunk of stream) last = chunk;
assert(last.usage.completion_tokens > 0);
const schema = { type: "object", properties: { result: { type: "integer" } }, required: ["result"], additionalProperties: false };
const called = await client.chat.completions.create({
  ...ask,
  tools: [{ type: "function", function: { name: "answer", parameters: schema } }],
  tool_choice: { type: "function", function: { name: "answer" } },
});
assert.equal(called.choices[0].message.tool_calls[0].function.name, "answer");
const bounded = { ...schema, properties: { result: { type: "integer", minimum: 0, maximum: 999 } } };
const structured = await client.chat.completions.create({
  ...ask,
  response_format: { type: "json_schema", json_schema: { name: "sum", schema: bounded, strict: true } },
});
assert(Number.isInteger(JSON.parse(structured.choices[0].message.content).result));
const embedded = await client.embeddings.create({ model: TANDEM_EMBEDDER, input: ["a text", "another text"] });
assert.equal(embedded.data.length, 2);
assert.equal(embedded.data[0].embedding.length, 384);
