// An ordinary Cloudflare Worker: a chat page, a streamed answer, a whole answer. It knows nothing of Tandem.
import page from "./page.html";

export default {
  async fetch(request, env) {
    const url = new URL(request.url);
    const route = ROUTES[`${request.method} ${url.pathname}`];
    if (!route) return Response.json({ error: `nothing at ${request.method} ${url.pathname}` }, { status: 404 });
    try {
      return await route(request, env, url);
    } catch (error) {
      return failure(error);
    }
  },
};

const ROUTES = {
  "GET /": () => new Response(page, { headers: { "content-type": "text/html; charset=utf-8" } }),
  "POST /chat": chat,
  "GET /run": runOnce,
};

// Streams server-sent events as the model writes them. A browser that leaves cancels the stream, and the model stops.
// `request.signal` does the same for a call that has not answered yet, where the runtime sees that early who has left;
// workerd on its own sees it with the first token it cannot deliver.
async function chat(request, env) {
  const { messages, model = env.MODEL, ...options } = await request.json();
  const stream = await env.AI.run(model, { ...options, messages, stream: true }, { signal: request.signal });
  return new Response(stream, { headers: { "content-type": "text/event-stream", "cache-control": "no-cache" } });
}

async function runOnce(request, env, url) {
  const { prompt = "Once upon a time", model = env.MODEL, ...rest } = Object.fromEntries(url.searchParams);
  const options = Object.fromEntries(Object.entries(rest).map(([name, value]) => [name, Number(value)]));
  return Response.json(await env.AI.run(model, { ...options, prompt }, { signal: request.signal }));
}

// env.AI throws errors whose message begins with Cloudflare's code: "3040: Capacity temporarily exceeded ...".
function failure(error) {
  const code = Number(/^(\d{3,5}):/.exec(error.message)?.[1] ?? 0);
  const status = STATUS_OF_CODE[code] ?? (error instanceof SyntaxError ? 400 : 502);
  return Response.json({ error: error.message, name: error.name, code }, { status });
}

const STATUS_OF_CODE = { 3003: 400, 3006: 413, 3007: 408, 3036: 429, 3040: 429, 3042: 404, 5004: 400, 5006: 400, 5007: 400 };
