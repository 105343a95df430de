# SPDX-License-Identifier: Apache-2.0
# make help lists what there is.

KERNEL ?= 6.1# Debian kernel that the virtual machines boot: 6.1 or 6.12
COUNT  ?= 1# how often each scenario runs
RUN    ?= .# which scenarios run, a regular expression
PART   ?= all# what bench measures: user, vm, csi or all
PAIRS  ?= .# which pairs of host and target make interop runs, a regular expression
export WEFT_KERNEL = $(KERNEL)
VERSION ?= $(shell git describe --tags --match 'v*' --dirty=+changes 2>/dev/null)
# One kind of build for programs, tests and checks: what one of them has compiled, the
# others find in Go's cache.
export CGO_ENABLED = 0
export GOFLAGS ?= -trimpath

.DEFAULT_GOAL := help
.PHONY: help faults mutants demo demo-test demo-vm test build lint unit generate check kernel interop e2e kube-bins kube-test kube-lost-node kube-e2e kube-e2e-quick image manifests bench fuzz install clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: build ## the main job as a story, on this machine in user space: create, attach, write, kill, heal
	@go build -o bin/ ./e2e/demo ./e2e/workload
	@bin/demo

demo-test: build ## the story in a new directory, again there, and without block devices
	@go build -o bin/ ./e2e/demo ./e2e/workload
	@d=$$(mktemp -d) && trap 'rm -rf "$$d"' EXIT && \
		bin/demo -dir "$$d/a" && bin/demo -dir "$$d/a" && bin/demo -dir "$$d/b" -block-device none

demo-vm: install ## the same through the kernels of virtual machines
	@go run ./e2e/demo/vm

ACROSS = TestLinuxHostOnOurTarget|TestOurHostOnLinuxTarget# ours with ours is a unit test, Linux with Linux a test of the suite
test: install ## everything: lint, unit tests, the demo, kernel suites and scenarios in virtual machines
	@e2e/verdict.sh "make test" $(MAKE) --no-print-directory PAIRS='$(ACROSS)' lint unit demo-test kernel interop e2e

build: ## the weft program, static, in bin/
	go build -ldflags '-X main.release=$(VERSION)' -o bin/weft ./cmd/weft

lint: ## formatting, vet, staticcheck, import arrows, generated code
	@test -z "$$(gofmt -l cmd csi deploy target initiator volmgr raid proto e2e)" || { gofmt -l cmd csi deploy target initiator volmgr raid proto e2e; echo "lint: the files above are not formatted"; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	go test ./e2e/lint

unit: ## unit and property tests, without a kernel
	go test -skip '^TestKernel|^TestScenario|^TestInterop|^TestKube' ./...

kernel: ## the harness, and the kernel wrappers on a real kernel, in virtual machines
	go test -count=1 -v -p 1 -timeout 30m -run '^TestKernel' ./e2e/vm ./e2e

interop: ## Linux's NVMe/TCP host and target with ours, in a virtual machine (KERNEL=6.12 PAIRS=TestOurHost)
	WEFT_RUN="$${WEFT_RUN:-$(PAIRS)}" go test -count=1 -v -timeout 40m -run '^TestInterop' ./e2e

e2e: ## the scenarios, in virtual machines (KERNEL=6.12 COUNT=3 RUN=TestTargetKilled)
	go test -count=$(COUNT) -v -timeout 85m -p 1 -run '^TestScenario.*$(RUN)' ./e2e ./e2e/csi

kube-bins: ## Kubernetes and its CSI sidecars, built from their Go modules into the cache (12 minutes the first time; goes on where it was cut)
	@e2e/install.sh kube
	@go run ./e2e/kube/build

KUBE = WEFT_KUBE=$${WEFT_KUBE:-1} go test -count=1 -v -timeout 90m ./e2e/kube
kube-test: kube-bins image ## a Kubernetes cluster of two nodes on this machine: volumes in pods, everything restarted in the middle, the chart (RUN=Volumes/grows)
	$(KUBE) -run '^Test.*$(RUN)' -skip '^TestKubeLostNode|^TestKubeSuite'

kube-lost-node: kube-bins ## there, a node is lost with a pod that goes on writing; once without the fence, which must show
	$(KUBE) -run '^TestKubeLostNode'

FOCUS ?= .
kube-e2e: kube-bins ## Kubernetes' own external-storage suite (FOCUS='volume-expand', FSTYPE=xfs)
	WEFT_KUBE_FOCUS='$(FOCUS)' WEFT_KUBE_FSTYPE='$(FSTYPE)' $(KUBE) -run '^TestKubeSuite'

QUICK = should store data|should write files of various sizes|should support volume SELinux mount options|should concurrently access the single volume from pods on the same node|ReadWriteOncePod|fsgroupchangepolicy
kube-e2e-quick: ## a part of it that takes two minutes
	@$(MAKE) --no-print-directory kube-e2e FOCUS='$(QUICK)'

bench: ## what Weft costs, as ratios (PART=user: the user-space path and its peers, on this machine; PART=vm: the kernel path; PART=csi: what a pod waits for)
	@e2e/install.sh $(if $(filter user csi,$(PART)),,vm) $(if $(filter vm csi,$(PART)),,bench)
	go build -o bin/bench ./e2e/bench
	$(if $(filter csi,$(PART)),,bin/bench -part "$(PART)")
	$(if $(filter csi all,$(PART)),go test -run '^$$' -bench . -benchtime 30x ./e2e/csi)

faults: ## thousands of faults on the user-space path, with seeds of now (FAULTS=3000)
	go test -count=1 -timeout 60m -run TestNothingIsLost ./e2e/fault -faults $${FAULTS:-3000} -first $$(date +%s)

MUTANTS ?= .
mutants: ## take guards out of the code, one at a time: a test must notice each (QUICK=1: what CI runs; MUTANTS=flush; FAULTS=1200: against the fault suite, which must notice three quarters)
	go run ./e2e/mutants -run '$(MUTANTS)' $(if $(QUICK),-quick) $(if $(FAULTS),-faults $(FAULTS) -timeout 30m)

fuzz: ## each fuzz target for FUZZTIME (30s)
	@e2e/fuzz.sh $${FUZZTIME:-30s}

generate: ## proto/pb from proto/weft, docs/cli.md from the commands
	proto/generate.sh
	go test ./cmd/weft -run TestTheCommandReferenceIsCurrent -update

image: ## the container image, in bin/image (OCI layout) and bin/weft-image.tar (ctr images import)
	go run ./deploy/image -out bin -release '$(VERSION)'

manifests: ## deploy/kubernetes from the Helm chart (builds Helm's engine, once)
	go run ./deploy/manifests

check: generate manifests ## fail if generated code or manifests are not current
	git diff --exit-code -- proto/pb deploy docs/cli.md

install: ## install what the tests need, from the distribution's packages
	@e2e/install.sh

clean: ## remove bin/ and the cache of kernels and images
	rm -rf bin "$${WEFT_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/weft}"
