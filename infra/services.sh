#!/usr/bin/env bash
# Installs what some tests need and pip does not install: a C compiler (stub NVML, clocks that jump), PostgreSQL,
# bubblewrap (containers), Prometheus (alerts), Chromium (the page), systemd and ip (units, networks of pods), a
# compiler and an emulator for arm64 (kernels), kubectl and schemas (manifests), workerd and wrangler (the example
# Worker), the clients for Node.js (tests/clients), axe (tests/web), and two versions of wrangler and Node.js
# (`tandem dev`). Then the tools of tests/tools that are small.
set -euo pipefail
cd "$(dirname "$0")/.."

# need COMMAND PACKAGE ...: install Debian's packages unless the command is there.
need() {
    local command=$1
    shift
    if command -v "$command" >/dev/null; then
        return
    fi
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -qq && apt-get install -y -qq "$@"
    else
        echo "no $command: install what Debian calls $* with your system's packages" >&2
        exit 1
    fi
}

need cc gcc libc6-dev
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || need initdb postgresql
need bwrap bubblewrap
need promtool --no-install-recommends prometheus
# Without windows it takes a third of the processor time; not every system has it as a package.
(need chromium-headless-shell --no-install-recommends chromium-headless-shell) ||
    need chromium --no-install-recommends chromium
need systemd-analyze systemd
need ip iproute2
if [ "$(uname -m)" = x86_64 ]; then
    need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
    need qemu-aarch64-static qemu-user-static
fi

if ! command -v npm >/dev/null; then
    echo "no npm: install Node.js 20 or newer, then run make services again" >&2
    exit 1
fi
# Not `npm ci`: it requires the workerd binaries of every platform, and a registry mirror may hold only ours.
for folder in examples/worker tests/clients tests/clients/node20 tests/clients/node22 tests/web; do
    npm install --prefix "$folder" --no-save --no-audit --no-fund --loglevel error
done

"${PYTHON:-python3}" -m infra.kubernetes.tools
# The field's own tools that are small, each in an environment of its own: build/tools.
"${PYTHON:-python3}" -m tests.tools.environments
