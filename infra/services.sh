#!/usr/bin/env bash
# Installs what some tests need and pip does not bring: a C compiler (stub NVML), PostgreSQL, workerd (the example Worker),
# and the clients that Node.js programs have already (tests/clients).
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

if ! command -v npm >/dev/null; then
    echo "no npm: install Node.js 20 or newer, then run make services again" >&2
    exit 1
fi
# Not `npm ci`: it insists on the workerd binaries of every platform, and a registry mirror may hold only ours.
npm install --prefix examples/worker --no-save --no-audit --no-fund --loglevel error
npm install --prefix tests/clients --no-save --no-audit --no-fund --loglevel error
