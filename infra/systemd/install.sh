#!/bin/sh
# Installs user, folders, units and example settings; keeps settings that are there. With arguments also Tandem itself:
# they are those of `pip install`, in /opt/tandem. Run as root. DESTDIR: a folder in place of the root.
set -eu
cd "$(dirname "$0")"
root=${DESTDIR:-}
if [ $# -gt 0 ]; then
    [ -x "$root/opt/tandem/bin/pip" ] || python3 -m venv "$root/opt/tandem"
    "$root/opt/tandem/bin/pip" install "$@"
fi
install -D -m 644 -t "$root/etc/systemd/system" tandem.target ./*.service
install -D -m 644 tandem.sysusers.conf "$root/usr/lib/sysusers.d/tandem.conf"
install -D -m 644 tandem.tmpfiles.conf "$root/usr/lib/tmpfiles.d/tandem.conf"
for file in tandem.toml secrets.env; do
    [ -e "$root/etc/tandem/$file" ] || install -D -m 600 "$file" "$root/etc/tandem/$file"
done
if [ -z "$root" ]; then
    systemd-sysusers tandem.conf
    systemd-tmpfiles --create tandem.conf
    systemctl daemon-reload
fi
