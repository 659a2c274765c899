// Which file answers a request? DISK holds the assets; what is no asset goes to NEXT, the Worker, where there is one.
const TYPES = {
  avif: "image/avif", css: "text/css; charset=utf-8", csv: "text/csv; charset=utf-8", gif: "image/gif",
  htm: "text/html; charset=utf-8", html: "text/html; charset=utf-8", ico: "image/x-icon", jpeg: "image/jpeg", jpg: "image/jpeg",
  js: "text/javascript; charset=utf-8", json: "application/json", map: "application/json", md: "text/markdown; charset=utf-8",
  mjs: "text/javascript; charset=utf-8", mp3: "audio/mpeg", mp4: "video/mp4", pdf: "application/pdf", png: "image/png",
  svg: "image/svg+xml", txt: "text/plain; charset=utf-8", wasm: "application/wasm", webm: "video/webm",
  webmanifest: "application/manifest+json", webp: "image/webp", woff: "font/woff", woff2: "font/woff2",
  xml: "text/xml; charset=utf-8",
};

export default {
  async fetch(request, env) {
    const isRead = request.method === "GET" || request.method === "HEAD";
    const asset = isRead ? await find(request, env.DISK) : null;
    if (asset) return asset;
    if (env.NEXT) return env.NEXT.fetch(request);
    return new Response("Not Found", { status: isRead ? 404 : 405 });
  },
};

async function find(request, disk) {
  const { pathname } = new URL(request.url);
  for (const path of candidates(pathname)) {
    const found = await disk.fetch(new URL(path, "http://assets"), { method: request.method });
    // A folder is answered with a list of its names, as JSON.
    const isFile = found.ok && found.headers.get("content-type") === "application/octet-stream";
    if (!isFile) {
      await found.body?.cancel();
      continue;
    }
    const headers = new Headers(found.headers);
    headers.set("content-type", TYPES[path.split(".").pop().toLowerCase()] ?? "application/octet-stream");
    headers.set("cache-control", "no-cache");
    return new Response(found.body, { status: found.status, headers });
  }
  return null;
}

// "/" is /index.html, "/about" is /about.html or /about/index.html.
function candidates(path) {
  if (path.endsWith("/")) return path === "/" ? ["/index.html"] : [`${path}index.html`, `${path.slice(0, -1)}.html`];
  return [path, `${path}.html`, `${path}/index.html`];
}
