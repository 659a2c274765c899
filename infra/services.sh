#!/usr/bin/env bash
# Installs what some tests need and pip does not install: a C compiler (stub NVML, clocks that jump), PostgreSQL,
# bubblewrap (containers), workerd and wrangler (the example Worker), the clients for Node.js (tests/clients), and two
# versions of wrangler and Node.js (`tandem dev`). Then the tools of tests/tools that are small, with pip and npm.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v cc >/dev/null; then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -qq && apt-get install -y -qq gcc libc6-dev
    else
        echo "no C compiler: install gcc with your system's packages" >&2
        exit 1
    fi
fi

if ! command -v initdb >/dev/null && ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -qq && apt-get install -y -qq postgresql
    else
        echo "no PostgreSQL: install it with your system's packages" >&2
        exit 1
    fi
fi

if ! command -v bwrap >/dev/null; then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -qq && apt-get install -y -qq bubblewrap
    else
        echo "no bubblewrap: install it with your system's packages" >&2
        exit 1
    fi
fi

if ! command -v npm >/dev/null; then
    echo "no npm: install Node.js 20 or newer, then run make services again" >&2
    exit 1
fi
# Not `npm ci`: it requires the workerd binaries of every platform, and a registry mirror may hold only ours.
for folder in examples/worker tests/clients tests/clients/node20 tests/clients/node22; do
    npm install --prefix "$folder" --no-save --no-audit --no-fund --loglevel error
done

# The field's own tools that are small, each in an environment of its own: build/tools.
"${PYTHON:-python3}" -m tests.tools.environments
