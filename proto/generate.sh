#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Generates proto/pb from proto/weft/v1. The plugins are pinned in go.mod; the
# protoc version line is dropped, so that any protoc gives the same files.
set -eu
cd "$(dirname "$0")"
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
go build -o "$bin/" google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
PATH="$bin:$PATH" protoc -I . \
	--go_out=pb --go_opt=module=weft.dev/weft/proto/pb \
	--go-grpc_out=pb --go-grpc_opt=module=weft.dev/weft/proto/pb \
	weft/v1/types.proto weft/v1/manager.proto weft/v1/agent.proto weft/v1/quorum.proto weft/v1/identity.proto
sed -i '/^\/\/ .*protoc  *v[0-9]/d' pb/*.pb.go
