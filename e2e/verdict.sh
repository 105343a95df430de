#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# verdict.sh NAME COMMAND ARG...: runs the command and ends with one clear line.
name=$1
shift
start=$(date +%s)
if "$@"; then
	echo "$name: PASS in $(($(date +%s) - start)) s"
else
	code=$?
	echo "$name: FAIL (exit $code) after $(($(date +%s) - start)) s: the first failure is above"
	exit "$code"
fi
