// Prints what Cloudflare's client for Node.js returns: an answer, a stream, errors, a list.   node cloudflare.mjs BASE_URL MODEL
import Cloudflare from "cloudflare";

const [baseURL, model] = process.argv.slice(2);
const client = new Cloudflare({ baseURL, apiToken: "unused", maxRetries: 0 });
const ask = { account_id: "acc", prompt: "Hi", max_tokens: 16, seed: 7 };

const whole = await client.ai.run(model, ask);
const response = await client.ai.run(model, { ...ask, stream: true }).asResponse();
const lines = (await response.text()).split("\n").filter((line) => line.startsWith("data: "));
const models = [];
for await (const each of client.ai.models.list({ account_id: "acc" })) models.push(each.name);
const schema = await client.ai.models.schema.get({ account_id: "acc", model });
const errors = [];
for (const [name, change] of [["@cf/none/such", {}], [model, { temperature: 9 }]]) {
  await client.ai.run(name, { ...ask, ...change }).catch((error) => {
    errors.push({ kind: error.constructor.name, status: error.status, code: error.errors[0].code });
  });
}
console.log(JSON.stringify({ whole, lines, models, input: Object.keys(schema.input.properties), errors }));
