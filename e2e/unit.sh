#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# unit.sh ARG...: runs the unit tests of all packages with these arguments of go test. Tests that
# watch time can fail on a machine that does something else. So up to three tests that failed run
# once more, and the output names them; a defect fails twice.
again=$(mktemp)
trap 'rm -f "$again"' EXIT
go tool gotestsum --format standard-quiet --rerun-fails=1 --rerun-fails-max-failures=3 \
	--rerun-fails-run-root-test --rerun-fails-report="$again" --packages=./... -- "$@" || exit
[ ! -s "$again" ] || sed 's/^/unit.sh: passed at the second try only: /' "$again"
