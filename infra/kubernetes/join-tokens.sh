#!/bin/sh
# Prints a Secret with join tokens for new pods: infra/kubernetes/join-tokens.sh | kubectl apply -f -
# USES (1000) and EXPIRES (30d) limit the tokens; ROLES are the roles; EXEC is how a command runs in a gateway's pod.
set -eu
namespace=${NAMESPACE:-tandem}
exec=${EXEC:-kubectl -n $namespace exec gateway-0 -c gateway --}
data=""
for role in ${ROLES:-kv prefill decode encode}; do
    made=$($exec /opt/tandem/bin/python -m control_plane fleet token \
        --role "$role" --uses "${USES:-1000}" --expires "${EXPIRES:-30d}")
    token=$(printf '%s\n' "$made" | sed -n 's/^token  *//p')
    [ -n "$token" ] || { echo "no token for $role: $made" >&2; exit 1; }
    data="$data  $role: $token
"
done
# At the end: kubectl must not apply a part.
printf 'apiVersion: v1\nkind: Secret\nmetadata:\n  name: tandem-join\n  namespace: %s\nstringData:\n%s' "$namespace" "$data"
