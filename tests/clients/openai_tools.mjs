// Prints the tool calls of OpenAI's client for Node.js: in an answer, a stream, its own loop, errors.   node openai_tools.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "get_weather", description: "Get the weather in a city", parameters };
const tools = [{ type: "function", function: weather }];
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const ask = { model, messages, tools, max_tokens: 80, temperature: 0 };

const whole = await client.chat.completions.create(ask);
const runner = client.chat.completions.stream(ask);
const deltas = [];
runner.on("tool_calls.function.arguments.delta", (event) => deltas.push(event.arguments_delta));
const streamed = await runner.finalChatCompletion();
const called = [];
const run = client.chat.completions.runTools({
  ...ask,
  tools: [{ type: "function", function: { ...weather, parse: JSON.parse, function: (args) => {
    called.push(args);
    return { temperature: 12, sky: "sunny" };
  } } }],
});
const answer = await run.finalContent();
const errors = [];
for (const change of [{ tools: [{ type: "function", function: {} }] }, { tool_choice: { type: "function", function: { name: "none_such" } } }]) {
  await client.chat.completions.create({ ...ask, ...change }).catch((error) => errors.push(error.message));
}
console.log(JSON.stringify({ whole: whole.choices[0], streamed: streamed.choices[0], deltas, called, answer, errors }));
