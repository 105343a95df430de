#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# beside.sh COMMAND...: runs command lines side by side, each with a verdict. What a command
# prints appears whole, when it and those before it have ended. Fails if one of them fails.
set -uo pipefail
here=$(dirname "$0")
logs=$(mktemp -d)
pids=()
trap 'for p in "${pids[@]}"; do kill -- "-$p" 2>/dev/null; done; rm -rf "$logs"' EXIT
for command; do
	setsid "$here/verdict.sh" "$command" sh -c "$command" >"$logs/${#pids[@]}" 2>&1 &
	pids+=($!)
done
code=0
for i in "${!pids[@]}"; do
	wait "${pids[i]}" || code=1
	cat "$logs/$i"
done
exit "$code"
