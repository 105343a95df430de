#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# verdict.sh NAME COMMAND ARG...: runs the command and ends with one clear line,
# after a list of the tests that failed.
name=$1
shift
start=$(date +%s)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{
	"$@" 2>&1
	echo $? >"$log.code"
} | tee "$log"
code=$(cat "$log.code")
rm -f "$log.code"
if [ "$code" -eq 0 ]; then
	echo "$name: PASS in $(($(date +%s) - start)) s"
	exit 0
fi
echo "$name: what failed:"
grep -E '^ *--- FAIL: |^FAIL[[:space:]]|^lint: |^make.*\*\*\*|\[build failed\]' "$log" | sort | uniq | head -40
echo "$name: FAIL (exit $code) after $(($(date +%s) - start)) s"
exit "$code"
