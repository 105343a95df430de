#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scenarios.sh ARG...: runs go test with these arguments. About one run in fifty, a drive that
# QEMU 7.2 emulates stops answering for good, whatever the guest does. If each test that failed
# had such a drive, by the word of its machine's kernel, these tests are run once more.
set -uo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export WEFT_VM_STOPPED=$dir/stopped
go test "$@" | tee "$dir/log"
code=${PIPESTATUS[0]}
[ "$code" -eq 0 ] && exit 0
grep -oE '^--- FAIL: [A-Za-z0-9_]+' "$dir/log" | cut -d' ' -f3 | sort -u >"$dir/failed"
touch "$dir/stopped"
if [ ! -s "$dir/failed" ] || [ -n "$(comm -23 "$dir/failed" <(sort -u "$dir/stopped"))" ]; then
	exit "$code"
fi
again=$(paste -sd'|' "$dir/failed")
echo "scenarios.sh: drives of QEMU had stopped in all tests that failed; once more: $again"
rm "$dir/stopped"
go test "$@" -run "^($again)\$"
