# Runs src/index.js in workerd, with its env.AI connected to Tandem.
#
#   npm install && npm start                                             Tandem on this machine
#   npm start -- --external-addr tandem=10.0.0.7:8642                    Tandem somewhere else
#   npm start -- --socket-addr http=127.0.0.1:9000                       the Worker on another port

using Workerd = import "/workerd/workerd.capnp";

const config :Workerd.Config = (
  services = [
    (name = "main", worker = .worker),
    (name = "tandem", external = (
      address = "127.0.0.1:8642",
      http = (),
      # With a token: http = (injectRequestHeaders = [(name = "authorization", value = "Bearer ...")]),
    )),
  ],
  sockets = [(name = "http", address = "127.0.0.1:8787", http = (), service = "main")],
);

const worker :Workerd.Worker = (
  modules = [(name = "index.js", esModule = embed "src/index.js"), (name = "page.html", text = embed "src/page.html")],
  compatibilityDate = "2026-11-01",
  compatibilityFlags = ["enable_request_signal"],
  bindings = [
    # The same as `"ai": {"binding": "AI"}` in wrangler.jsonc: workerd's own AI module, over the service "tandem".
    (name = "AI", wrapped = (
      moduleName = "cloudflare-internal:ai-api",
      innerBindings = [(name = "fetcher", service = "tandem")],
    )),
    (name = "MODEL", text = "@tandem/demo"),
  ],
);
