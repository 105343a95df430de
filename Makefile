# SPDX-License-Identifier: Apache-2.0
# make help lists the targets.

KERNEL ?= 6.1# kernel of the virtual machines, Debian's 6.1 or 6.12
COUNT  ?= 1# runs of each scenario
RUN    ?= .# the scenarios to run, a regular expression
PART   ?= all# the part that bench runs: user, failover, patience, tail, vm, columns, csi, manager, managers, snapshots or all
PAIRS  ?= .# the pairs of host and target that interop runs, a regular expression
export WEFT_KERNEL = $(KERNEL)
VERSION ?= $(shell git describe --tags --match 'v*' --dirty=+changes 2>/dev/null)
# The same build settings for programs, tests and checks, so that they share Go's build
# cache.
export CGO_ENABLED = 0
export GOFLAGS ?= -trimpath

.DEFAULT_GOAL := help
.PHONY: help bench-compare bench-peers console-test faults faults-quorum faults-vm explore mutants demo demo-test demo-vm screenshots test build lint unit generate check kernel interop e2e kube-bins kube-test kube-lost-node kube-e2e kube-e2e-quick image packages packages-test manifests bench fuzz race install clean kernel-and-interop install-test

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: build ## show the main job as a story, on this machine in user space: create, attach, write, kill, heal
	@go build -o bin/ ./e2e/demo ./e2e/workload
	@bin/demo

demo-test: build ## run the story in a new directory, again in the same one, and without block devices
	@go build -o bin/ ./e2e/demo ./e2e/workload
	@d=$$(mktemp -d) && trap 'rm -rf "$$d"' EXIT && \
		bin/demo -dir "$$d/a" && bin/demo -dir "$$d/a" && bin/demo -dir "$$d/b" -block-device none

screenshots: build ## photograph each page of the console, light and dark, in bin/screenshots (WALK=1 VERSION=v0.1.0: the pictures of docs/walk.md)
	@e2e/install.sh browser
	@go run ./e2e/screenshots $(if $(WALK),-walk -out docs/images)

demo-vm: install ## show the same through the kernels of virtual machines
	@go run ./e2e/demo/vm

console-test: ## test the console in headless Chromium, with axe-core (RUN=TestInABrowser/TheKeyboard)
	@e2e/install.sh browser axe
	go test -count=1 -v -run '$(or $(RUN),.)' ./cmd/internal/console

# Scenarios that make test leaves to make e2e: they take most of its time, and most of what they
# show is shown in user space by unit tests, or by a shorter scenario.
LONG = AgentsKilledAndMachinesReboot|Authentication|ANetworkFails|BadInput|AStaleLegIsRefused|StockHost|ADriveWarnsOfItsEnd|LateWrite|CopiesGoOn|PlainLegsChangeHands|FilesSurviveSnapshotsAndKills|SeveralPaths|BesideTheKernel|RoCE|FilesSurviveDetachAndAttach|Thin|EverythingIsUpgraded|TargetsAreUpgraded|ManagersKilled|PodsVolumeOutlivesTargetAndClient|CachesOfAllCopiesAreLost|Snapshots|Replaced|Shared|VolumeGrowsWithoutATarget|FileSystemsGrow|CrossAttach|StoreRebuiltFromDrives
ACROSS = TestLinuxHostOnOurTarget|TestOurHostOnLinuxTarget# our host on our target is a unit test; Linux on Linux tests the suite
HARNESS = TestKernelFiveMachinesBootSideBySide|TestKernelNetwork|TestKernelNoMachineOutlivesTheTest# what the machines can do, on which no other test depends
test: install ## run lint, unit tests, the demo, kernel suites and part of the scenarios in virtual machines; make e2e runs all scenarios
	@e2e/verdict.sh "make test" $(MAKE) --no-print-directory PAIRS='$(ACROSS)' LESS='$(HARNESS)' SKIP='$(LONG)' lint unit demo-test kernel-and-interop e2e

build: ## build the weft program, static, in bin/
	go build -ldflags '-X main.release=$(VERSION)' -o bin/weft ./cmd/weft

lint: ## check formatting, vet, staticcheck, import arrows and style
	@test -z "$$(gofmt -l cmd csi deploy target initiator volmgr raid proto e2e)" || { gofmt -l cmd csi deploy target initiator volmgr raid proto e2e; echo "lint: the files above are not formatted"; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	go test ./e2e/lint

unit: ## run the unit and property tests, which need no special kernel
	@WEFT_HISTORIES=$${WEFT_HISTORIES:-48} e2e/again.sh 10 ./... -timeout 20m -skip '^TestKernel|^TestScenario|^TestInterop|^TestKube'

race: ## run the unit tests of all that agents and managers are made of under the race detector, which needs gcc (20 minutes)
	WEFT_HISTORIES=$${WEFT_HISTORIES:-8} CGO_ENABLED=1 go test -race -count=1 -timeout 60m -skip '^TestKernel|^TestScenario|^TestInterop|^TestKube' ./proto/... ./raid/... ./target/... ./initiator/... ./volmgr/...

kernel: ## test the harness and the kernel wrappers on a real kernel, in virtual machines
	e2e/again.sh 5 './e2e/vm ./e2e' -count=1 -v -p 1 -timeout 30m -run '^TestKernel' $(if $(LESS),-skip '$(LESS)')

interop: ## test Linux's NVMe/TCP host and target with ours, in a virtual machine (KERNEL=6.12 PAIRS=TestOurHost)
	WEFT_RUN="$${WEFT_RUN:-$(PAIRS)}" go test -count=1 -v -timeout 40m -run '^TestInterop' ./e2e

kernel-and-interop: # side by side: each waits for its machines for a part of its time
	@e2e/beside.sh "$(MAKE) --no-print-directory kernel LESS='$(LESS)'" "$(MAKE) --no-print-directory interop PAIRS='$(PAIRS)'"

e2e: ## run the scenarios in virtual machines (KERNEL=6.12 COUNT=3 RUN=TestTargetKilled; MANAGERS=3: with three volume managers)
	$(if $(MANAGERS),WEFT_MANAGERS=$(MANAGERS) )e2e/again.sh 4 './e2e ./e2e/csi' -count=$(COUNT) -v -timeout 85m -p 1 -run '^TestScenario.*$(RUN)' $(if $(SKIP),-skip '^TestScenario($(SKIP))$$')

kube-bins: ## build Kubernetes and its CSI sidecars from their Go modules into the cache (8 minutes the first time; continues after an interruption)
	@e2e/install.sh kube
	@go run ./e2e/kube/build

KUBE = WEFT_KUBE=$${WEFT_KUBE:-1} e2e/again.sh 5 ./e2e/kube -count=1 -v -timeout 90m
kube-test: kube-bins image ## test a Kubernetes cluster of two nodes on this machine: volumes in pods, restarts in the middle of calls, the chart (RUN=Volumes/grows; RUN=Examples: a data set from a snapshot, NFS and S3, with images that take minutes to build)
	$(if $(findstring Examples,$(RUN)),go run ./e2e/kube/build -examples)
	$(KUBE) -run '^Test.*$(RUN)' -skip '^TestKubeLostNode|^TestKubeSuite$(if $(findstring Examples,$(RUN)),,|^TestKubeExamples)'

kube-lost-node: kube-bins ## lose a node of that cluster while its pod writes; once more with the manager that leads; once more without the fence, which must do damage
	$(KUBE) -run '^TestKubeLostNode'

FOCUS ?= .
kube-e2e: kube-bins ## run Kubernetes' own external-storage suite (FOCUS='volume-expand', FSTYPE=xfs, THIN=false)
	WEFT_KUBE_FOCUS='$(FOCUS)' WEFT_KUBE_FSTYPE='$(FSTYPE)' WEFT_KUBE_THIN='$(THIN)' $(KUBE) -run '^TestKubeSuite'

QUICK_CASES = should store data|should write files of various sizes|should support volume SELinux mount options|should concurrently access the single volume from pods on the same node|ReadWriteOncePod|fsgroupchangepolicy|Dynamic Snapshot .delete policy
kube-e2e-quick: ## run a part of that suite that takes two minutes
	@$(MAKE) --no-print-directory kube-e2e FOCUS='$(QUICK_CASES)'

bench: ## measure what Weft costs, as ratios (PART=user: the user-space path and its peers, on this machine; PART=failover: how long I/O stalls there when a target or a path fails; PART=patience: how long healthy targets are silent on a machine that is overloaded, LENGTH=3600 seconds; PART=tail: how long the slowest I/Os of an hour take, LENGTH=3600; PART=vm: the kernel path; PART=columns: what mirrors cost on several processors, on both paths (KERNEL=6.12); PART=csi: what a pod waits for; PART=manager: the volume manager with many volumes, VOLUMES=10000 for another number; PART=managers: three of them on this machine, with 1000 nodes, NODES=100 for another number; PART=snapshots: legs found through a map, in memory, beside qcow2 and, in a virtual machine, beside dm-thin, and how long writes wait for a snapshot; with KVM about 15 minutes)
	@$(if $(filter failover patience tail,$(PART)),,e2e/install.sh $(if $(filter user csi manager managers,$(PART)),,vm) $(if $(filter vm columns csi manager managers,$(PART)),,bench))
	go build -o bin/bench ./e2e/bench
	@$(if $(filter failover patience snapshots all,$(PART)),$(MAKE) --no-print-directory build)
	$(if $(filter csi manager managers,$(PART)),,bin/bench -part "$(PART)" $(if $(LENGTH),-seconds $(LENGTH)) -results "$(RESULTS)")
	$(if $(filter csi all,$(PART)),go test -run '^$$' -bench . -benchtime 30x ./e2e/csi)
	$(if $(filter manager all,$(PART)),go test -run '^$$' -bench 'DecisionAmong|VolumesThrough|RecordOfALost' -benchtime 1x -timeout 30m ./volmgr/cluster ./volmgr)
	$(if $(filter managers all,$(PART)),go test -run '^$$' -bench 'ThreeManagers' -benchtime 1x -timeout 30m ./volmgr)
	$(if $(filter snapshots all,$(PART)),go test -count=1 -v -run WhatFirstWritesCost -bench Mapped -benchtime 100x ./target/mapped)

RESULTS ?= bin/bench.json# where bench keeps the results of the user-space path
LAST = docs/performance-user.json# the results that docs/performance.md shows
bench-compare: ## measure the user-space path and compare it with the results in docs; fails if Weft is worse
	@$(MAKE) --no-print-directory bench PART=user
	@bin/bench -results "$(RESULTS)" -compare "$(LAST)"

bench-peers: ## name the peers that bench measures beside Weft here, and how to get those that are missing
	@e2e/install.sh bench
	@go build -o bin/bench ./e2e/bench
	@bin/bench -peers

faults: ## inject thousands of faults into the user-space path, with new seeds (FAULTS=3000)
	go test -count=1 -timeout 60m -run TestNothingIsLost ./e2e/fault -faults $${FAULTS:-3000} -first $$(date +%s)

faults-quorum: ## the same with three volume managers, which share their records (FAULTS=3000)
	go test -count=1 -timeout 60m -run 'TestNothingIsLost|TestTheAPIIsLinearizable' ./e2e/fault -managers 3 -faults $${FAULTS:-3000} -first $$(date +%s)

faults-vm: install ## inject faults into virtual machines with real kernels, on the kernel path; 25 faults take 7 minutes (FAULTS=500 KERNEL=6.12 KIND=thin FIRST=7)
	go run ./e2e/fault/vm -faults $${FAULTS:-500} $(if $(KIND),-kind $(KIND)) $(if $(FIRST),-first $(FIRST))

explore: ## visit everything that can happen in small clusters, larger ones than in the unit tests (CONFIG='{"Copies":2,"Hosts":1,"Writes":2,"Cuts":2,"Lates":1}' DEPTH=20 STATES=1000000)
	go test -count=1 -v -timeout 3h -run Configurations ./e2e/explore $(if $(CONFIG),-config '$(CONFIG)',-larger) -depth $${DEPTH:-0} -states $${STATES:-3000000}

MUTANTS ?= .
mutants: ## remove guards from the code, one at a time: a test must notice each (QUICK=1: the part that CI runs; MUTANTS=flush; FAULTS=1200: with the fault suite, which must notice three quarters)
	go run ./e2e/mutants -run '$(MUTANTS)' $(if $(QUICK),-quick) $(if $(FAULTS),-faults $(FAULTS) -timeout 30m)

fuzz: ## run each fuzz target for FUZZTIME (30s)
	@e2e/fuzz.sh $${FUZZTIME:-30s}

generate: ## generate proto/pb from proto/weft, docs/cli.md from the commands, and the chart's alerts and dashboard
	proto/generate.sh
	go test ./cmd/weft -run TestTheCommandReferenceIsCurrent -update
	go test ./cmd/internal/monitoring -run TestTheChartsCopiesAreCurrent -update

image: ## build the container image: bin/image (OCI layout) and bin/weft-image.tar (ctr images import)
	go run ./deploy/image -out bin -release '$(VERSION)'

packages: ## build the packages for Debian (.deb) and Red Hat (.rpm) and their relatives, in bin/packages (ARCH=arm64)
	go run ./deploy/packages -out bin/packages -release '$(VERSION)' $(if $(ARCH),-arch $(ARCH))

packages-test: packages ## install the .deb in a virtual machine with Debian and systemd, mount volumes at boot, reboot, remove it again (4 minutes; 2 more the first time)
	@e2e/install.sh vm packages
	go test -count=1 -v -timeout 20m -run '^TestScenarioPackages' ./e2e/packages

install-test: packages ## type the guide's commands for three nodes and a client, in virtual machines with Debian and systemd; then scan their ports as a stranger, and lose a node (4 minutes; 2 more the first time)
	@e2e/install.sh vm packages
	go test -count=1 -v -timeout 30m -run '^TestScenarioThreeNodes' ./e2e/packages

manifests: ## generate deploy/kubernetes from the Helm chart (builds Helm's engine once)
	go run ./deploy/manifests

check: generate manifests ## fail if generated code or manifests are not current
	git diff --exit-code -- proto/pb deploy docs/cli.md

install: ## install the distribution's packages that the tests need
	@e2e/install.sh vm prometheus

clean: ## remove bin/ and the cache of kernels and images
	rm -rf bin "$${WEFT_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/weft}"
