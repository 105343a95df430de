#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh TIME: runs each fuzz target of the tree for that long.
set -eu
for package in $(go list ./...); do
	dir=$(go list -f '{{.Dir}}' "$package")
	for target in $(grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go 2>/dev/null | sed 's/func //'); do
		echo "fuzz: $package $target for $1"
		# Interesting inputs are shortened for a second, not a minute: fuzzing would stand still.
		go test -run '^$' -fuzz "^$target\$" -fuzztime "$1" -fuzzminimizetime 1s "$package"
	done
done
