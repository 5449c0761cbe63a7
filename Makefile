# The targets are the interface; continuous integration runs the same ones. `make` alone lists them: see HELP.

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

# The releases of containerd that make e2e builds; SHORT=1 is the subset that continuous integration has the time for.
CONTAINERD_VERSIONS := v2.4.2 $(if $(SHORT),,v2.0.14 v1.7.35)

# Debian's packages that make e2e unpacks below .tools/e2e/deb, with what they need and the machine lacks. None is installed, so
# no service is started.
DEBS := runc containerd podman conmon

# The reference plugins that the tests and the demo use, by their folder in containernetworking/plugins.
PLUGINS := main/bridge main/host-device main/loopback main/macvlan main/ptp \
           ipam/host-local ipam/static \
           meta/bandwidth meta/firewall meta/portmap meta/sbr meta/tuning

VERSION   = $(shell scripts/release/version.sh)
TOOLS    := $(CURDIR)/.tools
GO_FILES := find . -name '.?*' -prune -o -name '*.go' -print

# What the tests and the demo call, as command:package. Fetching modules takes certificates; -race takes a C compiler.
DEPS := iptables:iptables nft:nftables ip:iproute2 ping:iputils-ping update-ca-certificates:ca-certificates gcc:gcc strace:strace pkill:procps

# What the binaries are built with, here and in a release.
GO_BUILD = CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X main.version=$(VERSION)"

# What make build builds.
COMMANDS := ./cmd/unwind ./cmd/unwindctl ./cmd/kubectl-unwind

# Where make man puts the man pages.
MANUAL ?= bin/man8

# How many pods the soak adds and removes.
PAIRS ?= 100000

# The tests of what is deployed, a module of its own. It is not in an archive.
CHECK := scripts/deploy/check

# What writes the agent's image and the bills of materials, each a module of its own: unwind has no use for images and bills.
IMAGE_WRITER := scripts/image
SBOM_WRITER  := scripts/sbom

# The packages of make mutants.
MUTATED ?= plugin/decide plugin/known plugin/netconf ipam

# How long make fuzz lets each target run.
FUZZTIME ?= 10s

# Stamps name the version, so that a new one is fetched.
PLUGINS_STAMP := $(TOOLS)/cni/.plugins-$(PLUGINS_VERSION)
CNITOOL_STAMP := $(TOOLS)/bin/.cnitool-$(CNITOOL_VERSION)

# The time only ends a test that hangs: the machine may be ten times slower than one on which they take 8 minutes.
GO_TEST := go test -vet=off -parallel 6 -timeout 3h

# The programs that tests start: testdata is outside of ./...
TEST_PROGRAMS := $(patsubst %/main.go,./%,$(wildcard testdata/*/main.go))

# Not in everybody's PATH, and the plugins call iptables.
export PATH := $(PATH):/usr/sbin:/sbin

# The linters keep findings by the content of a package. What they find in one clone they would report in another, under paths that
# may be gone, so that no comment there silences it.
export GOLANGCI_LINT_CACHE := $(TOOLS)/lint/golangci
export STATICCHECK_CACHE   := $(TOOLS)/lint/staticcheck

.DEFAULT_GOAL := help
include plugin/e2e/tools.mk scripts/release/release.mk

.PHONY: help build tools deps test matrix race proof soak fuzz mutants e2e e2e-tools e2e-k8s e2e-now e2e-next lint chart demo docs words man bench release archive kubectl-archive image chart-archive release-check workflows vulnerabilities clean go faulty
.NOTPARALLEL:

# What make help lists, by purpose.
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

# go test prints its packages in order, as they end. The longest one is apart, so that it holds no other's line back.
test: deps tools build ## run all tests on real plugins and namespaces (8 minutes, root)
	@echo "The tests of ./plugin take longest; they run beside the others, each of which has its line as it ends."
	@plugin=$$(mktemp); trap 'rm -f '$$plugin EXIT; trap 'exit 130' INT; \
	CGO_ENABLED=0 $(GO_TEST) ./plugin >$$plugin 2>&1 & \
	CGO_ENABLED=0 $(GO_TEST) $$(go list ./... | grep -v '/plugin$$'); others=$$?; \
	wait $$!; failed=$$?; cat $$plugin; [ $$others$$failed = 00 ]
	set -e; for module in $(IMAGE_WRITER) $(SBOM_WRITER); do go test -C $$module -count=1 ./...; done

matrix: deps tools build ## run the tests with larger samples (root)
	UNWIND_TEST_LONG=matrix CGO_ENABLED=0 $(GO_TEST) -count=1 ./journal ./plugin/... ./cmd/unwindctl

# Of the tests with namespaces, these are the ones in which one process has several goroutines: see sandbox.Concurrent.
race: deps tools build ## run tests with the race detector (6 minutes, root)
	CGO_ENABLED=1 $(GO_TEST) -race -short ./...

proof: deps tools build ## run all tests at full length (2 hours, root)
	UNWIND_TEST_LONG=1 CGO_ENABLED=0 go test -count=1 -v -timeout 6h ./journal ./plugin/... ./cmd/unwindctl

soak: deps tools build ## add and remove PAIRS pods (100,000) with faults (hours, root)
	UNWIND_TEST_SOAK=$(PAIRS) CGO_ENABLED=0 go test -run '^TestSoak$$' -count=1 -v -timeout 12h ./plugin

fuzz: go ## let each fuzz target run for FUZZTIME (10s) (root)
	@scripts/fuzz.sh $(FUZZTIME)

# Each mutant is run by the tests that need neither root nor long.
mutants: go ## change one operator at a time: tests must notice (10 minutes)
	go run ./scripts/mutants $(MUTATED)

lint: deps go workflows vulnerabilities ## check format, vet, linters, go.mod, scripts and workflows
	@unformatted=$$($(GO_FILES) | xargs gofmt -l) && [ -z "$$unformatted" ] || \
		{ echo "gofmt -w is needed on: $$unformatted" >&2; exit 1; }
	go vet -tags e2e ./... $(TEST_PROGRAMS)
	go run honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION) -tags e2e ./... $(TEST_PROGRAMS)
	go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION) run ./... $(TEST_PROGRAMS)
	go mod tidy -diff
	set -e; for module in $(IMAGE_WRITER) $(SBOM_WRITER); do (cd $$module && go vet ./... && go mod tidy -diff && \
		go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION) run); done
	for script in .ci/run scripts/*.sh scripts/release/*.sh; do bash -n "$$script" || exit 1; done

# Without a network there is no database: that is said, and is no fault of what is checked. GOVULNDB names another, such as a copy.
GOVULNDB ?= https://vuln.go.dev
vulnerabilities: go
	@out=$$(go run golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK_VERSION) -db $(GOVULNDB) ./... 2>&1) && failed= || failed=1; echo "$$out"; \
	case $$failed$$out in *'fetching vulnerabilities'*) \
		echo "warning: known vulnerabilities were not looked for: the database cannot be read" >&2; failed= ;; esac; \
	[ -z "$$failed" ]

workflows: go
	go run github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT_VERSION) -shellcheck= -pyflakes=

# A module of its own: Prometheus, Helm and the types of Kubernetes are what unwind itself has no use for. Its inputs are outside of
# it, where go test does not see them change; so nothing is cached.
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

# MULTUS=PATH compares with that multus binary, too; ARGS="-chains 3 -parallel 1,32 -dead 0" is a part of it, see -help.
bench: deps tools build ## time ADD and DEL, plain and through unwind (root)
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o $(TOOLS)/test/ ./scripts/bench/noop
	MULTUS=$(MULTUS) CGO_ENABLED=0 go run -buildvcs=false ./scripts/bench -out $(TOOLS)/bench.txt $(ARGS)
	go run golang.org/x/perf/cmd/benchstat@$(BENCHSTAT_VERSION) -col /kind $(TOOLS)/bench.txt

clean: ## remove bin/, dist/ and .tools/
	rm -rf bin dist .tools

go:
	@command -v go >/dev/null || \
		{ echo "error: no go command in PATH" >&2; \
		  echo "hint: install Go (https://go.dev/dl) and add its bin folder to PATH" >&2; exit 1; }
