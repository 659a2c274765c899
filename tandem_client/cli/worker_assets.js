// Which file answers a request? DISK holds the assets, RULES what the Worker's configuration says of them; what is no asset
// goes to NEXT, the Worker, where there is one.
const TYPES = {
  avif: "image/avif", css: "text/css; charset=utf-8", csv: "text/csv; charset=utf-8", gif: "image/gif",
  htm: "text/html; charset=utf-8", html: "text/html; charset=utf-8", ico: "image/x-icon", jpeg: "image/jpeg", jpg: "image/jpeg",
  js: "text/javascript; charset=utf-8", json: "application/json", map: "application/json", md: "text/markdown; charset=utf-8",
  mjs: "text/javascript; charset=utf-8", mp3: "audio/mpeg", mp4: "video/mp4", pdf: "application/pdf", png: "image/png",
  svg: "image/svg+xml", txt: "text/plain; charset=utf-8", wasm: "application/wasm", webm: "video/webm",
  webmanifest: "application/manifest+json", webp: "image/webp", woff: "font/woff", woff2: "font/woff2",
  xml: "text/xml; charset=utf-8",
};
const NEVER_SERVED = new Set(["/_headers", "/_redirects", "/.assetsignore"]);

export default {
  async fetch(request, env) {
    const { pathname } = new URL(request.url);
    const onlyAssets = !env.NEXT || env.RULES.workerNever.some((pattern) => matched(pattern, pathname));
    if (!onlyAssets && env.RULES.workerFirst.some((pattern) => matched(pattern, pathname))) return env.NEXT.fetch(request);
    const navigates = env.RULES.prefersNavigation && request.headers.get("sec-fetch-mode") === "navigate";
    const answer = await answerOf(request, env, onlyAssets || navigates);
    if (answer) return withHeaders(answer, env.RULES.headers, pathname);
    return onlyAssets ? new Response("Not Found", { status: 404 }) : env.NEXT.fetch(request);
  },
};

// `mayReplace`: what is not found is answered as not_found_handling says.
async function answerOf(request, { DISK, RULES }, mayReplace) {
  const url = new URL(request.url);
  const rule = firstMatch(RULES.redirects, url.pathname);
  if (rule && rule.status !== 200) return redirect(url, filled(rule.to, rule.groups), rule.status);
  const path = decoded(rule ? filled(rule.to, rule.groups).split(/[?#]/)[0] : url.pathname);
  const has = remembered((file) => isFile(DISK, file));
  const found = (await lookUp(path, has, RULES.html)) ?? (mayReplace ? await replacement(path, has, RULES.notFound) : null);
  if (!found) return rule ? new Response("Not Found", { status: 404 }) : null;
  if (request.method !== "GET" && request.method !== "HEAD") {
    return new Response("Method Not Allowed", { status: 405, headers: { allow: "GET, HEAD" } });
  }
  return found.to ? redirect(url, encoded(found.to), 307) : serve(request, DISK, found);
}

// What each way of html_handling answers a path with, besides the file of that very name.
const PAGES = {
  "auto-trailing-slash": (path) => [path.endsWith("/") ? `${path}index.html` : `${path}.html`],
  "force-trailing-slash": (path) => (path.endsWith("/") ? [`${path}index.html`, `${path.slice(0, -1)}.html`] : []),
  "drop-trailing-slash": (path) =>
    path === "/" ? ["/index.html"] : path.endsWith("/") ? [] : [`${path}.html`, `${path}/index.html`],
  none: () => [],
};

async function lookUp(path, has, how) {
  const exact = await has(path);
  if (exact && (how === "none" || !path.endsWith(".html"))) return { file: path };
  const page = path.endsWith("/index") ? null : await firstOf(PAGES[how](path), has);
  if (page) return { file: page };
  for (const to of how === "none" ? [] : addresses(path)) {
    const there = to === path || (await has(to)) ? null : await firstOf(PAGES[how](to), has);
    if (there && (!exact || there === path)) return { to };
  }
  return exact ? { file: path } : null;
}

// Where the page may be that a path means: "/a/index.html" is that of "/a/" or "/a".
function addresses(path) {
  const stem = path.replace(/(\/index\.html|\/index|\.html|\/)$/, "");
  const isPage = path.endsWith(".html") && !path.endsWith("/index.html");
  return (isPage ? [stem, `${stem}/`] : [`${stem}/`, stem]).filter((each) => each);
}

async function replacement(path, has, how) {
  if (how === "single-page-application") return (await has("/index.html")) ? { file: "/index.html" } : null;
  if (how !== "404-page") return null;
  const folders = path.split("/").slice(0, -1);  // the nearest 404.html above it
  const files = folders.map((_, i) => `${folders.slice(0, folders.length - i).join("/")}/404.html`);
  const file = await firstOf(files, has);
  return file && { file, status: 404 };
}

async function serve(request, disk, { file, status = 200 }) {
  const found = await disk.fetch(new URL(encoded(file), "http://assets"), { method: request.method });
  const headers = new Headers(found.headers);
  headers.set("content-type", TYPES[file.split(".").pop().toLowerCase()] ?? "application/octet-stream");
  headers.set("cache-control", "public, max-age=0, must-revalidate");
  return new Response(found.body, { status, headers });
}

// A folder is answered with a list of its names, as JSON.
async function isFile(disk, path) {
  if (NEVER_SERVED.has(path) || path.endsWith("/")) return false;
  const found = await disk.fetch(new URL(encoded(path), "http://assets"), { method: "HEAD" });
  return found.ok && found.headers.get("content-type") === "application/octet-stream";
}

function withHeaders(answer, rules, pathname) {
  const fitting = rules.map((rule) => ({ ...rule, groups: matched(rule.from, pathname) })).filter((rule) => rule.groups);
  if (!fitting.length) return answer;
  const headers = new Headers(answer.headers);
  const written = new Set();
  for (const { set, unset, groups } of fitting) {
    for (const name of unset) headers.delete(name);
    for (const [name, value] of set) {
      const key = name.toLowerCase();
      headers[written.has(key) ? "append" : "set"](name, filled(value, groups));
      written.add(key);
    }
  }
  return new Response(answer.body, { status: answer.status, headers });
}

function redirect(url, target, status) {
  const to = new URL(target, url);
  if (!to.search) to.search = url.search;
  const location = to.origin === url.origin ? `${to.pathname}${to.search}${to.hash}` : to.href;
  return new Response(null, { status, headers: { location } });
}

function firstMatch(rules, pathname) {
  for (const rule of rules) {
    const groups = matched(rule.from, pathname);
    if (groups) return { ...rule, groups };
  }
  return null;
}

const patterns = new Map();

// "/blog/*" and "/team/:name" as regular expressions; what fits is known to the target as :splat and :name.
function matched(pattern, pathname) {
  if (!patterns.has(pattern)) patterns.set(pattern, expression(pattern));
  const found = patterns.get(pattern)?.exec(pathname);
  return found && (found.groups ?? {});
}

function expression(pattern) {
  const escaped = pattern.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replace(/:([A-Za-z]\w*)/g, "(?<$1>[^/]+)");
  try {
    return new RegExp(`^${escaped.replace("*", "(?<splat>.*)")}$`);
  } catch {
    return null; // two placeholders of one name
  }
}

function filled(text, groups) {
  return text.replace(/:([A-Za-z]\w*)/g, (whole, name) => groups[name] ?? whole);
}

function firstOf(files, has) {
  return files.reduce(async (before, file) => (await before) ?? ((await has(file)) ? file : null), Promise.resolve(null));
}

function remembered(ask) {
  const known = new Map();
  return (key) => known.get(key) ?? known.set(key, ask(key)).get(key);
}

function decoded(path) {
  try {
    return decodeURIComponent(path).replace(/\/{2,}/g, "/");
  } catch {
    return path;
  }
}

function encoded(path) {
  return path.split("/").map(encodeURIComponent).join("/");
}
