using Workerd = import "/workerd/workerd.capnp";

const config :Workerd.Config = (
  services = [
    (name = "main", worker = (
      modules = [(name = "worker", esModule = embed "bundle.js")],
      compatibilityDate = "2026-11-01",
      compatibilityFlags = ["nodejs_compat"],
      bindings = [(name = "AI", wrapped = (
        moduleName = "cloudflare-internal:ai-api",
        innerBindings = [(name = "fetcher", service = "tandem")],
      ))],
    )),
    (name = "tandem", external = (address = "127.0.0.1:8642", http = ())),
  ],
  sockets = [(name = "http", address = "127.0.0.1:8787", http = (), service = "main")],
);
