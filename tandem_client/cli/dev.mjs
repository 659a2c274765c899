// Runs the Cloudflare Worker of the current folder with the wrangler and miniflare installed there; for `tandem dev`.
//
//   browser -> front (the chosen port) -> miniflare and workerd -> relay (adds the token) -> Tandem's gateway
//
// A change bundles the Worker again and starts a second miniflare. The first one answers until the second one is ready.
import { spawn } from "node:child_process";
import dns from "node:dns";
import { EventEmitter, once } from "node:events";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync, watch } from "node:fs";
import http from "node:http";
import https from "node:https";
import { createRequire, SourceMap } from "node:module";
import net from "node:net";
import { tmpdir } from "node:os";
import path from "node:path";
import { pipeline } from "node:stream";
import { stripVTControlCharacters } from "node:util";

const { port, environment, gateway, proxyPath } = JSON.parse(process.argv[2]);
const IGNORED = new Set(["node_modules", ".git", ".wrangler"]);
const folder = process.cwd();
const require = createRequire(path.join(folder, "wrangler.json"));
const bundles = mkdtempSync(path.join(tmpdir(), "tandem-dev-"));
const worker = new EventEmitter().setMaxListeners(0); // emits "ready"
let running = null; // {miniflare, port, outdir, digest} of the Worker that answers
let numBuilds = 0;
let watched = [folder]; // files and folders whose changes are loaded
const print = (what, text) => console.log(`${what.padEnd(10)}  ${text}`);
const notes = new Set();
const note = (text) => notes.has(text) || (notes.add(text), print("note", text));

// wrangler sometimes looks for a newer version of itself. With this, it finds no address but this machine's.
const lookup = dns.lookup;
const OFFLINE = `data:text/javascript,${encodeURIComponent(`
  import dns from "node:dns";
  import net from "node:net";
  const lookup = dns.lookup;
  dns.lookup = (name, ...rest) => name === "localhost" || net.isIP(name)
    ? lookup(name, ...rest)
    : rest.at(-1)(Object.assign(new Error("tandem dev: no names outside this machine"), { code: "ENOTFOUND" }));`)}`;
await import(OFFLINE);

// The relay forwards the calls of env.AI, which miniflare sends as HTTP requests, and adds the token.
const relay = http.createServer((request, response) => {
  if (request.headers.upgrade) return response.writeHead(426).end(); // miniflare tries a WebSocket too
  const headers = { ...request.headers, host: new URL(gateway).host };
  if (process.env.TANDEM_TOKEN) headers.authorization = `Bearer ${process.env.TANDEM_TOKEN}`;
  const client = gateway.startsWith("https:") ? https : http;
  const call = client.request(gateway + proxyPath, { method: request.method, headers, lookup }, (answer) => {
    response.writeHead(answer.statusCode, answer.headers);
    pipeline(answer, response, () => {});
  });
  call.on("error", (error) => {
    if (response.headersSent) return response.destroy();
    response.writeHead(502).end(`no answer from Tandem at ${gateway} (${error.code}); start it with: tandem up`);
  });
  response.on("close", () => call.destroy());
  request.pipe(call);
});

// The front forwards connections. A connection waits while no Worker is ready.
const front = net.createServer(async (client) => {
  client.on("error", () => {});
  if (!running) await once(worker, "ready");
  const server = net.connect(running.port, "127.0.0.1");
  pipeline(client, server, client, () => {});
});

const filesIn = (root) =>
  readdirSync(root, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => path.join(entry.parentPath ?? entry.path, entry.name))
    .sort();

// Returns the modules that wrangler wrote, the main one first.
function bundledFiles(outdir, main) {
  if (!main) return []; // assets only
  const entry = path.join(outdir, `${path.parse(main).name}.js`);
  return [entry, ...filesIn(outdir).filter((file) => file !== entry && !/\.map$|\/README\.md$/.test(file))];
}

async function bundle(into) {
  const program = path.resolve(require.resolve("wrangler"), "../../bin/wrangler.js");
  const flags = ["deploy", "--dry-run", "--name", "worker", "--outdir", into]; // `deploy` requires a name
  if (environment) flags.push("--env", environment);
  const stdio = ["ignore", "pipe", "pipe"];
  const child = spawn(process.execPath, ["--import", OFFLINE, program, ...flags], { stdio });
  try {
    require("wrangler"); // takes 1 to 2 s the first time, while the compiler runs
  } catch {} // `build` raises the error again, after the compiler's own message
  let output = "";
  for (const stream of [child.stdout, child.stderr]) stream.setEncoding("utf8").on("data", (text) => (output += text));
  const [code] = await once(child, "close");
  if (code !== 0) throw new Error(output.replace(/^.*Logs were written to.*$/m, "").trim());
}

// Returns the Worker as miniflare's options, and a digest. Equal digests mean that nothing needs to be loaded.
async function build(outdir) {
  await bundle(outdir);
  const wrangler = require("wrangler");
  const npmOfWrangler = createRequire(require.resolve("wrangler"));
  const library = npmOfWrangler("miniflare");
  const config = wrangler.unstable_readConfig({ env: environment });
  for (const binding of Object.values(config).flat()) if (binding?.remote) binding.remote = false;
  if (config.ai) config.ai.remote = true; // the relay
  const { workerOptions, externalWorkers, main } = wrangler.unstable_getMiniflareWorkerOptions(config, environment, {
    remoteProxyConnectionString: new URL(`http://127.0.0.1:${relay.address().port}/`),
  });
  const { modulesRules, ...options } = workerOptions;
  const newestDate = createRequire(npmOfWrangler.resolve("miniflare"))("workerd").compatibilityDate;
  if (options.compatibilityDate > newestDate) {
    note(`this workerd knows compatibility dates up to ${newestDate}; ${options.compatibilityDate} is not in force`);
    options.compatibilityDate = newestDate;
  }
  const rules = library.compileModuleRules(modulesRules);
  const modules = bundledFiles(outdir, main).map((file) => ({
    type: rules.find(({ include }) => library.testRegExps(include, file))?.type ?? "ESModule",
    path: file,
    contents: readFileSync(file),
  }));
  const source = main ? { modules, modulesRoot: outdir } : { modules: true, script: "export default {};" };
  const assets = config.assets?.directory ? filesIn(config.assets.directory) : [];
  const files = modules.map(({ contents }) => contents.toString("base64"));
  const dates = assets.map((file) => statSync(file).mtimeMs);
  const digest = JSON.stringify([options, externalWorkers, files, assets, dates]);
  const state = path.join(folder, ".wrangler/state/v3"); // where `wrangler dev` keeps its data
  const shared = {
    ...{ host: "127.0.0.1", port: 0, cf: false, defaultPersistRoot: state, resourcePersistencePath: state },
    ...{ verbose: true, handleStructuredLogs: printLog }, // verbose: logs the stacks of uncaught exceptions
  };
  const all = { ...shared, workers: [{ name: config.name ?? "worker", ...options, ...source }, ...externalWorkers] };
  return { library, config, digest, options: library.convertV4MiniflareOptions?.(all) ?? all };
}

// Prints a line of the Worker's log. Stacks of uncaught exceptions get the lines of the Worker's sources.
function printLog({ level, message }) {
  if (message.startsWith("uncaught exception; exception = ")) return; // the same exception, with workerd's stack
  const stack = message.replace(/^uncaught exception; source = .*?; stack = /, "");
  const text = stack.replace(/file:\/\/(\S+?):(\d+):(\d+)/g, inSource);
  (stack !== message || level === "error" ? console.error : console.log)(text);
}

function inSource(place, file, line, column) {
  if (!existsSync(`${file}.map`)) return place;
  const map = new SourceMap(JSON.parse(readFileSync(`${file}.map`, "utf8")));
  const { originalSource, originalLine, originalColumn } = map.findEntry(line - 1, column - 1);
  if (!originalSource) return place;
  const source = path.relative(folder, path.resolve(path.dirname(file), originalSource));
  return `${source}:${originalLine + 1}:${originalColumn + 1}`;
}

// Builds the folder and replaces the running Worker; returns false if nothing has changed.
async function load() {
  const outdir = path.join(bundles, String(++numBuilds));
  let loaded = false;
  try {
    const { library, config, options, digest } = await build(outdir);
    // A build command writes into the folder, so only its inputs are watched.
    watched = config.build?.command ? [config.configPath, ".dev.vars", config.build.watch_dir].flat() : [folder];
    if (digest !== running?.digest) {
      await exchange({ miniflare: new library.Miniflare(options), outdir, digest });
      loaded = true;
    }
  } finally {
    if (!loaded) rmSync(outdir, { recursive: true, force: true });
  }
  return loaded;
}

async function exchange(next) {
  try {
    next.port = Number((await next.miniflare.ready).port);
  } catch (error) {
    await next.miniflare.dispose().catch(() => {});
    throw error;
  }
  const before = running;
  running = null; // connections wait, so that only one workerd has the databases open
  await before?.miniflare.dispose().catch(() => {});
  if (before) rmSync(before.outdir, { recursive: true, force: true });
  running = next;
  worker.emit("ready");
}

// Loads until there are no more changes.
const changed = new Set();
let loading = false;
async function reload() {
  if (loading) return;
  loading = true;
  do {
    const names = [...changed].sort().join(", ");
    const first = !running;
    changed.clear();
    try {
      if (await load()) print(first ? "ready" : "reloaded", first ? `http://127.0.0.1:${front.address().port}` : names);
    } catch (error) {
      print("not loaded", names);
      const isStart = error.code === "ERR_RUNTIME_FAILURE"; // workerd has printed its message
      const text = isStart ? "The Worker failed as it started; its error is above." : `${error.message ?? error}`;
      console.log((process.stdout.isTTY ? text : stripVTControlCharacters(text)).replace(/^(?=.)/gm, "  "));
      console.log(running ? "The previous Worker keeps running." : "tandem dev waits for a change.");
      if (running) running.digest = ""; // so that the next good build is loaded and reported
    }
  } while (changed.size);
  loading = false;
}

// Watches each directory by itself, because a recursive watch would include the thousands in node_modules.
const watchers = new Map();
function watchTree(root) {
  try {
    if (!watchers.has(root)) {
      const watcher = watch(root, (event, name) => onChange(event, path.join(root, name ?? "")));
      watchers.set(root, watcher.on("error", () => {}));
    }
    for (const entry of readdirSync(root, { withFileTypes: true }))
      if (entry.isDirectory() && !IGNORED.has(entry.name)) watchTree(path.join(root, entry.name));
  } catch (error) {
    if (error.code !== "ENOENT") note(`changes in ${root} are not noticed: ${error.message}`);
  }
}

let timer;
function onChange(event, file) {
  if (IGNORED.has(path.basename(file))) return;
  for (const [root, watcher] of watchers) {
    if (event !== "rename" || !`${root}/`.startsWith(`${file}/`)) continue;
    watcher.close(); // the directory was removed or replaced
    watchers.delete(root);
  }
  if (watched.some((root) => `${file}/`.startsWith(`${path.resolve(root)}/`))) changed.add(path.relative(folder, file));
  clearTimeout(timer);
  timer = setTimeout(() => (watchTree(folder), changed.size && reload()), 100);
}

// `tandem dev` closes stdin to stop this process; Linux closes it when `tandem dev` is killed.
process.stdin.resume().on("end", async () => {
  await running?.miniflare.dispose();
  process.exit();
});
process.on("exit", () => rmSync(bundles, { recursive: true, force: true }));
front.on("error", (error) => {
  const remedies = {
    EADDRINUSE: `is in use; stop what listens there, or choose another: --port ${port < 65535 ? port + 1 : 0}`,
    EACCES: "may not be used; choose one above 1023",
  };
  console.error(`tandem: port ${port} ${remedies[error.code] ?? error.message}`);
  process.exit(1);
});
relay.listen(0, "127.0.0.1", () => front.listen(port, "127.0.0.1", () => (watchTree(folder), reload())));
