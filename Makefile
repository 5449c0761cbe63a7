# Continuous integration runs the same targets as developers. `make` without arguments lists the
# targets (see HELP).

PLUGINS_VERSION     := v1.10.0
PLUGINS_BEFORE      := v1.9.1
PLUGINS_CNI04       := v0.9.1
CNITOOL_VERSION     := v1.3.1
STATICCHECK_VERSION := v0.8.2
GOLANGCI_VERSION    := v2.12.2
ACTIONLINT_VERSION  := v1.7.12
GOVULNCHECK_VERSION := v1.9.0
BENCHSTAT_VERSION   := v0.0.0-20260908200009-22c9c6c9d4da
AWS_CNI_VERSION     := v1.23.2
CILIUM_VERSION      := v1.19.6
MULTUS_VERSION      := v4.3.0
CRIO_VERSION        := v1.36.3
NERDCTL_VERSION     := v2.3.5
GORELEASER_VERSION  := v2.15.1
CYCLONEDX_VERSION   := v1.10.0
CRANE_VERSION       := v0.22.1

# `make e2e` builds these releases of containerd. With SHORT=1, which continuous integration uses,
# it builds only the newest.
CONTAINERD_VERSIONS := v2.4.2 $(if $(SHORT),,v2.0.14 v1.7.35)

# `make e2e` unpacks these Debian packages below .tools/e2e/deb, with any dependencies that are not
# on this machine. Nothing is installed, so no service starts.
DEBS := runc containerd podman conmon

# The reference plugins that the tests and the demo use, as directories below plugins/ in the
# repository containernetworking/plugins.
PLUGINS := main/bridge main/host-device main/loopback main/macvlan main/ptp \
           ipam/host-local ipam/static \
           meta/bandwidth meta/firewall meta/portmap meta/sbr meta/tuning

VERSION   = $(shell scripts/release/version.sh)
TOOLS    := $(CURDIR)/.tools
GO_FILES := find . -name '.?*' -prune -o -name '*.go' -print

# The commands that the tests and the demo run, as command:package. ca-certificates is there for
# downloading modules, and gcc for -race.
DEPS := iptables:iptables nft:nftables ip:iproute2 ping:iputils-ping update-ca-certificates:ca-certificates gcc:gcc strace:strace pkill:procps

# Builds the binaries for bin/ and for the agent's image. .goreleaser.yaml has the same flags.
GO_BUILD = CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X main.version=$(VERSION)"

# The programs that `make build` builds.
COMMANDS := ./cmd/unwind ./cmd/unwindctl ./cmd/kubectl-unwind

# The directory into which `make man` writes the man pages.
MANUAL ?= bin/man8

# The number of pods that `make soak` adds and removes.
PAIRS ?= 100000

# The directory of the tests of the deployment files: a module that no release archive contains.
CHECK := scripts/deploy/check

# The packages that `make mutants` checks.
MUTATED ?= plugin/decide plugin/known plugin/netconf ipam

# The time for which `make fuzz` runs each target.
FUZZTIME ?= 10s

# The name of each stamp file contains a version, so that make rebuilds a tool when its version
# changes.
PLUGINS_STAMP := $(TOOLS)/cni/.plugins-$(PLUGINS_VERSION)
CNITOOL_STAMP := $(TOOLS)/bin/.cnitool-$(CNITOOL_VERSION)

# The timeout is for tests that hang: all tests together take 10 minutes, or ten times as long on a
# slow machine.
GO_TEST := go test -vet=off -parallel 6 -timeout 3h

# The programs that tests start, as a list because the pattern ./... does not match testdata.
TEST_PROGRAMS := $(patsubst %/main.go,./%,$(wildcard testdata/*/main.go))

# The plugins run iptables, which is in these directories. Not every user has them in PATH.
export PATH := $(PATH):/usr/sbin:/sbin

# Each clone of the repository has its own linter caches. A finding in a shared cache would contain
# the path of the clone that was linted first. In another clone, the linters would report that path,
# and no comment could silence the finding.
export GOLANGCI_LINT_CACHE := $(TOOLS)/lint/golangci
export STATICCHECK_CACHE   := $(TOOLS)/lint/staticcheck

.DEFAULT_GOAL := help
include plugin/e2e/tools.mk scripts/release/release.mk

.PHONY: help build tools deps test matrix race proof soak fuzz mutants e2e e2e-tools e2e-k8s e2e-now e2e-next lint chart demo docs words man bench release release-parts image chart-archive release-check workflows vulnerabilities clean go faulty
.NOTPARALLEL:

# The targets that `make help` lists, by purpose.
HELP := "Start here:demo test" "Build:build tools deps clean" "Check:lint chart race matrix proof soak fuzz mutants e2e e2e-k8s" \
	"Measure and write:bench docs words man" "Release:release image release-check"

help: ## list the targets
	@for group in $(HELP); do \
		echo "$${group%%:*}:"; \
		for target in $${group#*:}; do sed -n "s/^$$target:.*## /  $$target\t/p" $(MAKEFILE_LIST); done | expand -t 17; \
	done

build: go ## put unwind, unwindctl and kubectl-unwind into bin/
	$(GO_BUILD) -o bin/ $(COMMANDS)

tools: $(PLUGINS_STAMP) $(CNITOOL_STAMP) faulty ## put cnitool, the reference and the test plugins into .tools/

$(PLUGINS_STAMP): | go
	GOBIN=$(TOOLS)/cni CGO_ENABLED=0 go install \
		$(PLUGINS:%=github.com/containernetworking/plugins/plugins/%@$(PLUGINS_VERSION))
	touch $@

$(CNITOOL_STAMP): | go
	GOBIN=$(TOOLS)/bin CGO_ENABLED=0 go install github.com/containernetworking/cni/cnitool@$(CNITOOL_VERSION)
	touch $@

faulty: go
	CGO_ENABLED=0 go build -buildvcs=false -o $(TOOLS)/test/ $(filter-out %/unwind,$(TEST_PROGRAMS))

deps: ## install missing packages with Debian's apt (root)
	@scripts/deps.sh $(DEPS)

# The tests of ./plugin take longest, so a separate "go test" runs them. Otherwise they would delay
# the results of the packages that follow, because "go test" prints all results in order.
test: deps tools build ## run all tests on real plugins and namespaces (10 minutes, root)
	@echo "The tests of ./plugin take longest. They run in parallel with the others, and their result comes last."
	@plugin=$$(mktemp); trap 'rm -f '$$plugin EXIT; trap 'exit 130' INT; \
	CGO_ENABLED=0 $(GO_TEST) ./plugin >$$plugin 2>&1 & \
	CGO_ENABLED=0 $(GO_TEST) $$(go list ./... | grep -v '/plugin$$'); others=$$?; \
	wait $$!; failed=$$?; cat $$plugin; [ $$others$$failed = 00 ]

matrix: deps tools build ## run the tests with larger samples (root)
	UNWIND_TEST_LONG=matrix CGO_ENABLED=0 $(GO_TEST) -count=1 ./journal ./plugin/... ./cmd/unwindctl

# The race detector finds no races between processes. So of the tests that need namespaces, this
# target runs only those in which goroutines run in parallel (see sandbox.Concurrent).
race: deps tools build ## run tests with the race detector (6 minutes, root)
	CGO_ENABLED=1 $(GO_TEST) -race -short ./...

proof: deps tools build ## run all tests at full length (hours, root)
	UNWIND_TEST_LONG=1 CGO_ENABLED=0 $(GO_TEST) -count=1 -v -timeout 6h ./journal ./plugin/... ./cmd/unwindctl

soak: deps tools build ## add and remove PAIRS pods (100,000) with faults (hours, root)
	UNWIND_TEST_SOAK=$(PAIRS) CGO_ENABLED=0 go test -run '^TestSoak$$' -count=1 -v -timeout 12h ./plugin

fuzz: go ## let each fuzz target run for FUZZTIME (10s) (root)
	@scripts/fuzz.sh $(FUZZTIME)

# For each mutant, this runs the package's tests that are fast and need no root.
mutants: go ## change one operator at a time: tests must notice (10 minutes)
	go run ./scripts/mutants $(MUTATED)

lint: deps go workflows vulnerabilities ## check format, vet, linters, go.mod, scripts and workflows
	@unformatted=$$($(GO_FILES) | xargs gofmt -l) && [ -z "$$unformatted" ] || \
		{ echo "gofmt -w is needed on: $$unformatted" >&2; exit 1; }
	go vet -tags e2e ./... $(TEST_PROGRAMS)
	go run honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION) -tags e2e ./... $(TEST_PROGRAMS)
	go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION) run ./... $(TEST_PROGRAMS)
	go mod tidy -diff
	for script in .ci/run scripts/*.sh scripts/release/*.sh; do bash -n "$$script" || exit 1; done

# Without the vulnerability database, for example offline, this target prints a warning and
# succeeds. GOVULNDB names another database, such as a local copy.
GOVULNDB ?= https://vuln.go.dev
vulnerabilities: go
	@out=$$(go run golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK_VERSION) -db $(GOVULNDB) ./... 2>&1) && failed= || failed=1; echo "$$out"; \
	case $$failed$$out in *'fetching vulnerabilities'*) \
		echo "warning: did not check for known vulnerabilities: cannot read the database" >&2; failed= ;; esac; \
	[ -z "$$failed" ]

workflows: go
	go run github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT_VERSION) -shellcheck= -pyflakes=

# The tests are a separate module, because unwind itself doesn't need Prometheus, Helm or the
# Kubernetes API types. They read files outside their module. "go test" doesn't notice changes to
# these files, so -count=1 disables its cache.
chart: go workflows ## test the alerts, the dashboard and the Helm chart
	cd $(CHECK) && go vet ./... && go test -count=1 ./...

demo: ## show the leak without unwind, and none with it (1 minute, root)
	@echo "Building unwind and the plugins..."
	@$(MAKE) -s deps tools build
	@scripts/demo.sh

docs: go ## write the tables of the decisions from the code
	UNWIND_UPDATE=1 go test -p 1 ./plugin/decide -run 'Test(Due|Verdict)Table' -count=1

words: go ## print every text of the programs that a user may read
	@go run ./scripts/words

man: go ## write the man pages of unwindctl into MANUAL (bin/man8)
	UNWIND_MANUAL=$(abspath $(MANUAL)) TZ=UTC SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) CGO_ENABLED=0 GOOS= GOARCH= \
		go test -trimpath ./cmd/unwindctl -short -run TestManual -count=1

# With MULTUS=PATH, this also times the multus binary at that path. ARGS contains flags that select
# benchmarks, for example ARGS="-chains 3 -parallel 1,32 -dead 0". ARGS=-help lists the flags.
bench: deps tools build ## time ADD and DEL, without and with unwind (root)
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o $(TOOLS)/test/ ./scripts/bench/noop
	MULTUS=$(MULTUS) CGO_ENABLED=0 go run -buildvcs=false ./scripts/bench -out $(TOOLS)/bench.txt $(ARGS)
	go run golang.org/x/perf/cmd/benchstat@$(BENCHSTAT_VERSION) -col /kind $(TOOLS)/bench.txt

clean: ## remove bin/, dist/ and .tools/
	rm -rf bin dist .tools

go:
	@command -v go >/dev/null || \
		{ echo "error: no go command in PATH" >&2; \
		  echo "hint: install Go (https://go.dev/dl) and add its bin directory to PATH" >&2; exit 1; }
