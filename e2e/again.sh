#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# again.sh N PACKAGES ARG...: runs the tests of these packages with these arguments of go test. Tests
# that watch time can fail on a machine that does something else. So if at most N tests and subtests
# failed, the tests that they belong to run once more, and the output names them; a defect fails twice.
most=$1 packages=$2
shift 2
format=standard-quiet
case " $* " in *" -v "*) format=standard-verbose ;; esac
again=$(mktemp)
trap 'rm -f "$again"' EXIT
go tool gotestsum --format "$format" --rerun-fails=1 --rerun-fails-max-failures="$most" \
	--rerun-fails-run-root-test --rerun-fails-report="$again" --packages="$packages" -- "$@" || exit
[ ! -s "$again" ] || sed 's/^/again.sh: passed at the second try only: /' "$again"
