#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs what the virtual machines need ("vm", the default), what the benchmark
# compares with ("bench"), what the Kubernetes cluster stands on ("kube"), what shows the
# console ("browser"), what tells whether everybody can use it ("axe", from npm), what tests alerts
# ("prometheus") or what the test of the packages makes its disk with ("packages") from the
# distribution's packages, and says what it installs.
# Nothing is done when all of it is there.
set -eu

packages=""
need() { # program, package
	command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ] || packages="$packages $2"
}
machines() { # what the scenarios in virtual machines, and the build, need
	need qemu-system-x86_64 qemu-system-x86
	need busybox busybox-static
	need fio fio
	need mkfs.ext4 e2fsprogs
	need mkfs.xfs xfsprogs
	need blkid util-linux
	need losetup mount
	need nvme nvme-cli
	need depmod kmod
	need protoc protobuf-compiler
	[ -e /usr/include/google/protobuf/timestamp.proto ] || packages="$packages libprotobuf-dev"
}
peers() { # what the benchmark of the user-space path compares with
	need tgtd tgt
	need iscsi-perf libiscsi-bin
	need nbdkit nbdkit
	need qemu-nbd qemu-utils
	need qemu-storage-daemon qemu-system-common
}
cluster() { # what the programs that e2e/kube/parts builds and unpacks need
	need busybox busybox-static
	need mkfs.ext4 e2fsprogs
	need mkfs.xfs xfsprogs
	need nsenter util-linux
	need losetup mount
	need ip iproute2
	ls /usr/lib/*/libseccomp.so.2 >/dev/null 2>&1 || packages="$packages libseccomp2" # runc
	# Its packages are downloaded without being installed: apt has to know of them.
	apt-cache show containerd >/dev/null 2>&1 || update=yes
}
browser() { # what photographs the console
	need chromium chromium
}
userland() { # what makes the disk with Debian's userland
	need mmdebstrap mmdebstrap
}
cache="${WEFT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/weft}"
# promtool alone is taken from its package and kept in the cache, so that no server starts.
tool="$cache/prometheus"
rules() {
	command -v promtool >/dev/null 2>&1 || [ -x "$tool/usr/bin/promtool" ] || fetch=yes
}
# axe-core is taken from its npm package and kept in the cache. It is used by tests alone.
axe="$cache/axe"
access() {
	[ ! -e "$axe/axe.min.js" ] || return 0
	npm=yes
	need npm npm
}
update="" fetch="" npm=""
[ $# -gt 0 ] || set -- vm
for part in "$@"; do
	case $part in
	vm) machines ;;
	bench) peers ;;
	kube) cluster ;;
	browser) browser ;;
	axe) access ;;
	packages) userland ;;
	prometheus) rules ;;
	*) echo "install: no part $part: vm, bench, kube, browser, axe, prometheus or packages" >&2; exit 2 ;;
	esac
done

distribution() { # what comes from the distribution
	echo "install: from the distribution:${packages:- its list of packages}${fetch:+, and promtool}"
	command -v apt-get >/dev/null 2>&1 || {
		echo "install: no apt-get here: install these packages' programs by hand" >&2
		exit 1
	}
	sudo=""
	[ "$(id -u)" = 0 ] || sudo=sudo
	export DEBIAN_FRONTEND=noninteractive
	$sudo apt-get update -qq
	if [ -n "$fetch" ]; then
		dir=$(mktemp -d)
		(cd "$dir" && apt-get download -qq prometheus 2>"$dir/err" || { cat "$dir/err" >&2; exit 1; })
		dpkg-deb -x "$dir"/prometheus_*.deb "$dir/all"
		mkdir -p "$tool/usr/bin"
		mv "$dir/all/usr/bin/promtool" "$tool/usr/bin/"
		rm -rf "$dir"
	fi
	[ -n "$packages" ] || return 0
	# shellcheck disable=SC2086
	$sudo apt-get install -y -qq --no-install-recommends $packages >/dev/null
}

[ -n "$packages$update$fetch$npm" ] || exit 0
[ -z "$packages$update$fetch" ] || distribution
if [ -n "$npm" ]; then
	echo "install: axe-core from npm"
	dir=$(mktemp -d)
	(cd "$dir" && npm pack --silent axe-core@4 >/dev/null && tar xzf axe-core-*.tgz package/axe.min.js)
	mkdir -p "$axe"
	mv "$dir/package/axe.min.js" "$axe/"
	rm -rf "$dir"
fi
echo "install: done"
