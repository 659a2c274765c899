// Uses each binding of wrangler.jsonc once per request; nothing in it knows of Tandem.
import { DurableObject } from "cloudflare:workers";

export class Counter extends DurableObject {
  async increment(): Promise<number> {
    const count = ((await this.ctx.storage.get<number>("count")) ?? 0) + 1;
    await this.ctx.storage.put("count", count);
    return count;
  }

  async fetch(): Promise<Response> {
    const [client, server] = Object.values(new WebSocketPair());
    server.accept();
    server.addEventListener("message", (event) => server.send(`echo ${event.data}`));
    return new Response(null, { status: 101, webSocket: client });
  }
}

async function state(env: Record<string, any>): Promise<object> {
  await env.CACHE.put("key", "from kv");
  await env.DB.exec("CREATE TABLE IF NOT EXISTS notes (text TEXT)");
  await env.DB.prepare("INSERT INTO notes VALUES (?)").bind("from d1").run();
  await env.FILES.put("file", "from r2");
  const { results } = await env.DB.prepare("SELECT count(*) AS num, min(text) AS text FROM notes").all();
  return {
    kv: await env.CACHE.get("key"),
    d1: results[0],
    r2: await (await env.FILES.get("file")).text(),
    count: await env.COUNTER.getByName("one").increment(),
    asset: await (await env.ASSETS.fetch("http://assets/page.txt")).text(),
    variables: [env.GREETING, env.SECRET ?? null],
  };
}

export default {
  async fetch(request: Request, env: Record<string, any>): Promise<Response> {
    const { pathname } = new URL(request.url);
    if (pathname === "/state") return Response.json(await state(env));
    if (pathname === "/socket") return env.COUNTER.getByName("one").fetch(request);
    if (pathname === "/stream") {
      const stream = await env.AI.run("m", { prompt: "hi", stream: true }, { signal: request.signal });
      return new Response(stream, { headers: { "content-type": "text/event-stream" } });
    }
    const { response } = await env.AI.run("m", { prompt: pathname });
    return Response.json({ version: 1, response });
  },
};
