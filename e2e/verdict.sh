#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# verdict.sh NAME COMMAND ARG...: runs the command and ends with one clear line,
# after a list of the tests that failed and what each of them said last.
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
# With -v a test speaks before its FAIL line, without after it.
echo "$name: what they said:"
grep -v 'run it by hand' "$log" | grep -E -B 25 -A 15 '^ *--- FAIL: |^=== FAIL: |^panic: ' | cut -c 1-300 | tail -n 150
echo "$name: what failed:"
grep -E '^ *--- FAIL: |^=== FAIL: |^FAIL[[:space:]]|^lint: |^make.*\*\*\*|\[build failed\]' "$log" | sort | uniq | head -40
echo "$name: FAIL (exit $code) after $(($(date +%s) - start)) s"
exit "$code"
