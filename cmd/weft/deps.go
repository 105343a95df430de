// SPDX-License-Identifier: Apache-2.0

//go:build deps

// This file is never built: it names the modules that go.mod keeps.

package main

import (
	_ "github.com/dgraph-io/badger/v4"
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/prometheus/client_golang/prometheus"
	_ "github.com/prometheus/client_golang/prometheus/promhttp"
	_ "github.com/rogpeppe/go-internal/testscript"
	_ "github.com/spf13/cobra"
	_ "github.com/u-root/mkuimage/uimage"
	_ "github.com/u-root/u-root/pkg/cpio"
	_ "github.com/u-root/u-root/pkg/kmodule"
	_ "github.com/u-root/u-root/pkg/libinit"
	_ "github.com/u-root/u-root/pkg/mount"
	_ "github.com/vishvananda/netlink"
	_ "golang.org/x/sync/errgroup"
	_ "golang.org/x/sys/unix"
	_ "google.golang.org/genproto/googleapis/rpc/errdetails"
	_ "google.golang.org/grpc"
	_ "google.golang.org/grpc/test/bufconn"
	_ "sigs.k8s.io/yaml"
)
