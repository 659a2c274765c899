// Asks for answers that take longer than their deadline; prints what the SDKs for Node.js make of it, retries and all.
//   node deadline.mjs URL MODEL
import Cloudflare from "cloudflare";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "hi" }];
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused" });
const beside = new OpenAI({ baseURL: `${url}/client/v4/accounts/acc/ai/v1`, apiKey: "unused" });
const cloudflare = new Cloudflare({ baseURL: `${url}/client/v4`, apiToken: "unused" });
const calls = [
  () => openai.chat.completions.create({ model, messages }),
  () => openai.completions.create({ model, prompt: "hi" }),
  () => beside.chat.completions.create({ model, messages }),
  () => cloudflare.ai.run(model, { account_id: "acc", prompt: "hi" }),
];
const errors = [];
for (const call of calls) {
  await call().catch((error) => errors.push({ kind: error.constructor.name, status: error.status }));
}
console.log(JSON.stringify(errors));
