// Prints what env.AI returns in miniflare, over its remote proxy.   node miniflare.mjs PROXY_URL MODEL
import { readFileSync } from "node:fs";
import { Miniflare } from "miniflare";

const [proxy, model] = process.argv.slice(2);
const worker = new Miniflare({
  modules: true,
  script: readFileSync(new URL("wrangler/index.js", import.meta.url), "utf8"),
  compatibilityDate: "2025-04-28",
  cf: false,
  ai: { binding: "AI", remoteProxyConnectionString: new URL(proxy) },
});
const ask = (body) => worker.dispatchFetch("http://worker/", { method: "POST", body: JSON.stringify(body) });
const inputs = { prompt: "Hi", max_tokens: 16, seed: 3 };
try {
  const whole = await (await ask({ model, ...inputs })).json();
  const streamed = await (await ask({ model, ...inputs, stream: true })).text();
  const models = await (await ask({})).json();
  const refused = await (await ask({ model: "@cf/none/such", ...inputs })).json();
  console.log(JSON.stringify({ whole, streamed, models, refused }));
} finally {
  await worker.dispose();
}
