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

# What the tests and the demo call, as command:package. Fetching modules takes certificates; -race takes a C compiler,
# and that the C library's headers.
DEPS := iptables:iptables nft:nftables ip:iproute2 ping:iputils-ping update-ca-certificates:ca-certificates gcc:gcc strace:strace pkill:procps

# What the binaries are built with, here and in a release.
GO_BUILD = CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X main.version=$(VERSION)"

# What make build builds.
COMMANDS := ./cmd/unwind ./cmd/unwindctl ./cmd/kubectl-unwind

# What a release is written with, on the machine that builds: compiled as the programs are, so that both share packages.
GO_RUN = GOOS= GOARCH= CGO_ENABLED=0 go run -C $(1) -buildvcs=false -trimpath .

# Where make man puts the man pages.
MANUAL ?= bin/man8

# How many pods the soak adds and removes.
PAIRS ?= 100000

# The machines that a release is for.
ARCHES := amd64 arm64

# Those that kubectl-unwind is for, as system/architecture.
LAPTOPS := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64

# What else is in an archive. Its documents link nothing else (TestArchiveLinks).
RELEASE_FILES := LICENSE README.md CHANGELOG.md $(wildcard scripts/systemd/unwind-*) scripts/demo.svg \
	scripts/quickstart.sh scripts/deploy scripts/providers scripts/bench/README.md \
	plugin/README.md plugin/decide/README.md journal/README.md testdata/README.md cmd/unwind/CONFIGURATION.md cmd/unwind/LIMITS.md \
	cmd/unwindctl/OPERATIONS.md .github/CONTRIBUTING.md .github/SECURITY.md

# The tests of what is deployed, a module of its own. It is not in an archive.
CHECK := scripts/deploy/check

# What writes the agent's image and the bills of materials, each a module of its own: unwind has no use for images and bills.
IMAGE_WRITER := scripts/image
SBOM_WRITER  := scripts/sbom

# The full name of the agent's image, of which unwind:$(VERSION) is short. Not from the environment, where IMAGE may be another's.
IMAGE = docker.io/library/unwind:$(VERSION)

# Where make image puts it, and make chart-archive the chart.
IMAGE_ARCHIVE = dist/unwind-$(VERSION)-image.tar
CHART_ARCHIVE = dist/unwind-$(VERSION:v%=%).tgz

# The address of the repository, below which krew finds a release. None is known here: .invalid is nobody's (RFC 2606).
SITE = https://unwind.invalid

# The date of all files in a release (https://reproducible-builds.org/specs/source-date-epoch): that of the commit.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

# The Go that builds is that of go.mod, or newer, and is named in the archive's sbom.cdx.json; GOTOOLCHAIN=go1.N.P takes that one.
# These settings, which a machine may have, make other bytes. Empty is not enough: go env -w would rule then.
RELEASE_ENV := GOFLAGS=-mod=readonly GOAMD64=v1 GOARM64=v8.0 GOFIPS140=off

# The packages of make mutants.
MUTATED ?= plugin/decide plugin/known plugin/netconf ipam

# How long make fuzz lets each target run.
FUZZTIME ?= 10s

# Stamps name the version, so that a new one is fetched.
PLUGINS_STAMP := $(TOOLS)/cni/.plugins-$(PLUGINS_VERSION)
CNITOOL_STAMP := $(TOOLS)/bin/.cnitool-$(CNITOOL_VERSION)
E2E           := $(TOOLS)/e2e
AWS_CNI_STAMP := $(E2E)/aws/.built-$(AWS_CNI_VERSION)
CILIUM_STAMP  := $(E2E)/cilium/.built-$(CILIUM_VERSION)
MULTUS_STAMP  := $(E2E)/multus/.built-$(MULTUS_VERSION)
BEFORE_STAMP  := $(E2E)/plugins-before/.built-$(PLUGINS_BEFORE)
CNI04_STAMP   := $(E2E)/plugins-cni04/.built-$(PLUGINS_CNI04)
UPSTREAM      := $(E2E)/upstream-$(PLUGINS_VERSION)
SANDBOX_TESTS := $(E2E)/sandbox-tests-$(firstword $(CONTAINERD_VERSIONS))
CRIO_STAMP    := $(E2E)/crio/.built-$(CRIO_VERSION)
NERDCTL_STAMP := $(E2E)/nerdctl/.built-$(NERDCTL_VERSION)
OCICNI        := plugin/e2e/ocicni
OCICNI_STAMP  := $(E2E)/ocicni/.built-$(shell sed -n 's|^\tgithub.com/cri-o/ocicni ||p' plugin/e2e/ocicni/go.mod)
E2E_STAMPS    := $(CONTAINERD_VERSIONS:%=$(E2E)/containerd-%/.built) $(E2E)/deb/.unpacked $(UPSTREAM)/.built \
                 $(SANDBOX_TESTS)/.built $(AWS_CNI_STAMP) $(CILIUM_STAMP) $(MULTUS_STAMP) $(OCICNI_STAMP) $(BEFORE_STAMP) \
                 $(if $(SHORT),,$(CRIO_STAMP) $(NERDCTL_STAMP))

# All programs of a cluster in one, of the version that its go.mod has: six minutes of two cores, the first time.
HYPERKUBE          := plugin/e2e/hyperkube
KUBERNETES_VERSION := $(shell sed -n 's|^require k8s.io/kubernetes ||p' $(HYPERKUBE)/go.mod)
KUBERNETES_STAMP   := $(E2E)/kubernetes/.built-$(KUBERNETES_VERSION)

# The helm command, of the version that tests the chart.
HELM_VERSION := $(shell sed -n 's|^\thelm.sh/helm/v3 ||p' $(CHECK)/go.mod)
HELM_STAMP   := $(E2E)/helm/.built-$(HELM_VERSION)

# The tests that have several goroutines at work in one process.
RACES := Test(Soak|.*OverSeam|TwoSweeps|Sweep.*|Pace.*|StatusSweeps|StatusOfDelegates|Lock.*|StillQueue|Kept|ServeIdle|Dedup.*|Agent.*|Run.*)

# The time only ends a test that hangs: the machine may be ten times slower than one on which they take 4 minutes.
GO_TEST := go test -parallel 16 -timeout 3h

# The programs that tests start: testdata is outside of ./...
TEST_PROGRAMS := $(patsubst %/main.go,./%,$(wildcard testdata/*/main.go))

# Not in everybody's PATH, and the plugins call iptables.
export PATH := $(PATH):/usr/sbin:/sbin

# The linters keep findings by the content of a package. What they find in one clone they would report in another, under paths that
# may be gone, so that no comment there silences it.
export GOLANGCI_LINT_CACHE := $(TOOLS)/lint/golangci
export STATICCHECK_CACHE   := $(TOOLS)/lint/staticcheck

.PHONY: help build tools deps test proof soak fuzz mutants e2e e2e-tools e2e-k8s e2e-now e2e-next lint chart demo docs words man bench release archive kubectl-archive image chart-archive release-check workflows vulnerabilities clean go faulty
.NOTPARALLEL:

# What make help lists, by purpose.
HELP := "Start here:demo test" "Build:build tools deps clean" "Check:lint chart proof soak fuzz mutants e2e e2e-k8s" \
	"Measure and write:bench docs words man" "Release:release image release-check"

help: ## list the targets
	@for group in $(HELP); do \
		echo "$${group%%:*}:"; \
		for target in $${group#*:}; do sed -n "s/^$$target:.*## /  $$target\t/p" $(firstword $(MAKEFILE_LIST)); done | expand -t 17; \
	done

build: go ## put unwind, unwindctl and kubectl-unwind into bin/
	$(GO_BUILD) -o bin/ $(COMMANDS)

tools: $(PLUGINS_STAMP) $(CNITOOL_STAMP) faulty ## put cnitool, the reference and the test plugins into .tools/

$(PLUGINS_STAMP): | go
	GOBIN=$(TOOLS)/cni CGO_ENABLED=0 go install \
		$(PLUGINS:%=github.com/containernetworking/plugins/plugins/%@$(PLUGINS_VERSION))
	touch $@

# The reference plugins before those: a node has them when its pods are added, and newer ones when they go.
$(BEFORE_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)
	GOBIN=$(@D) CGO_ENABLED=0 go install \
		$(PLUGINS:%=github.com/containernetworking/plugins/plugins/%@$(PLUGINS_BEFORE))
	touch $@

# A portmap that rejects a cniVersion above 0.4.0, as those before the plugins' release 1.0 do.
$(CNI04_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)
	GOBIN=$(@D) CGO_ENABLED=0 go install github.com/containernetworking/plugins/plugins/meta/portmap@$(PLUGINS_CNI04)
	touch $@

$(CNITOOL_STAMP): | go
	GOBIN=$(TOOLS)/bin CGO_ENABLED=0 go install github.com/containernetworking/cni/cnitool@$(CNITOOL_VERSION)
	touch $@

faulty: go
	CGO_ENABLED=0 go build -buildvcs=false -o $(TOOLS)/test/ $(filter-out %/unwind,$(TEST_PROGRAMS))

deps: ## install missing packages with Debian's apt (root)
	@missing=; \
	for dep in $(DEPS); do \
		command -v $${dep%:*} >/dev/null || missing="$$missing $${dep#*:}"; \
	done; \
	echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1 || missing="$$missing libc6-dev"; \
	[ -n "$$missing" ] || exit 0; \
	if ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ]; then \
		echo "error: missing:$$missing" >&2; \
		echo "hint: on Debian and as root, make installs these packages; elsewhere, install their like" >&2; \
		exit 1; \
	fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get update && apt-get install -y --no-install-recommends $$missing

# The plugin under test is started some thousand times, so it is built without the race detector, which is for what runs
# inside one process: a sweep, STATUS, the agent, the journal. There TestSoak has 100 pairs, which start the plugin with the
# race detector.
# go test prints its packages in order, as they end. The longest one is apart, so that it holds no other's line back.
test: deps tools build ## run all tests on real plugins and namespaces (4 minutes, root)
	@echo "The tests of ./plugin take longest; they run beside the others, each of which has its line as it ends."
	@plugin=$$(mktemp); trap 'rm -f '$$plugin EXIT; trap 'exit 130' INT; \
	CGO_ENABLED=0 $(GO_TEST) ./plugin >$$plugin 2>&1 & \
	CGO_ENABLED=0 $(GO_TEST) $$(go list ./... | grep -v '/plugin$$'); others=$$?; \
	wait $$!; failed=$$?; cat $$plugin; [ $$others$$failed = 00 ]
	@echo "Again with the race detector; these tests wait more than they compute:"
	UNWIND_TEST_SOAK=100 CGO_ENABLED=1 $(GO_TEST) -p 6 -race -run '^$(RACES)$$' \
		$$(grep -rlE '^func $(RACES)\(' --include='*_test.go' cmd ipam journal plugin | xargs -n 1 dirname | sort -u | sed 's|^|./|')
	set -e; for module in $(IMAGE_WRITER) $(SBOM_WRITER); do go test -C $$module -count=1 ./...; done

proof: deps tools build ## run the long proofs and large models (half an hour, root)
	UNWIND_TEST_LONG=1 CGO_ENABLED=0 go test -run '^(TestProtocolAtLength|TestPowerLoss.*|TestFlipped.*|TestSteady|TestSoak|TestFaultMatrix.*|TestKilled.*|TestLateDEL.*|TestResultsAreLibcnis|TestReferencePlugins|TestVersions|TestBrokenJournal|TestTurnNotCome|TestCutOffReservation|TestPlantedLinks|TestShownToProviders|TestLikePlain|TestPlainNodeWhileADDs)$$' -count=1 -v -timeout 3h \
		./journal ./plugin/... ./cmd/unwindctl

soak: deps tools build ## add and remove PAIRS pods (100,000) with faults (hours, root)
	UNWIND_TEST_SOAK=$(PAIRS) CGO_ENABLED=0 go test -run '^TestSoak$$' -count=1 -v -timeout 12h ./plugin

# The targets are what go test lists. Inputs that failed go into the package's testdata/fuzz; keep them there, with the fix.
# Before Go 1.27 a run may fail as its time ends, with "context deadline exceeded" and no input (golang/go#75804).
fuzz: go ## let each fuzz target run for FUZZTIME (10s) (root)
	@set -e; for package in $$(go list ./...); do \
		listed=$$(go test -list '^Fuzz' $$package); \
		for target in $$(echo "$$listed" | grep '^Fuzz'); do \
			echo "$$package $$target"; \
			out=$$(go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x $$package 2>&1) && \
				{ echo "$$out" | tail -n 1; continue; }; \
			echo "$$out"; \
			case $$out in *'Failing input'* | *panic*) exit 1 ;; *'    context deadline exceeded'*) ;; *) exit 1 ;; esac; \
		done; \
	done

# Each mutant is run by the tests that need neither root nor long.
mutants: go ## change one operator at a time: tests must notice (10 minutes)
	go run ./scripts/mutants $(MUTATED)

e2e: deps tools build e2e-tools ## test real runtimes (root); SHORT=1: the newest containerd only
	UNWIND_E2E_SHORT=$(SHORT) CGO_ENABLED=0 go test -tags e2e -p 1 -count=1 -timeout 90m -v -run E2E ./plugin/e2e

e2e-tools: $(E2E_STAMPS) faulty
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -o $(E2E)/bin/ ./plugin/e2e/pause ./testdata/faulty

e2e-k8s: deps tools build e2e-tools e2e-now e2e-next $(KUBERNETES_STAMP) $(HELM_STAMP) $(CNI04_STAMP) ## test on Kubernetes (root); SHORT=1: not as long
	UNWIND_E2E_SHORT=$(SHORT) CGO_ENABLED=0 go test -tags e2e -p 1 -count=1 -timeout 60m -v -run Kubernetes ./plugin/e2e

$(KUBERNETES_STAMP): $(wildcard $(HYPERKUBE)/*) | go
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(HYPERKUBE) && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o $(@D)/ \
		-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$(KUBERNETES_VERSION)" .
	touch $@

# Two minutes of two cores, the first time.
$(HELM_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)
	GOBIN=$(@D) CGO_ENABLED=0 go install -buildvcs=false -trimpath -ldflags "-s -w" helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)
	touch $@

# Two untagged builds, for an upgrade: the image that the chart and daemonset.yaml name, and the next one with its chart, as a
# release has them.
e2e-now: go
	$(MAKE) image VERSION=v0.0.0-20260101000000-000000000001 IMAGE=docker.io/library/unwind:dev IMAGE_ARCHIVE=$(E2E)/image-now.tar
e2e-next: go
	$(MAKE) image chart-archive VERSION=v0.0.0-20260102000000-000000000002 IMAGE=docker.io/library/unwind:next \
		IMAGE_ARCHIVE=$(E2E)/image-next.tar CHART_ARCHIVE=$(E2E)/chart-next.tgz

# A module of its own: go install refuses a version whose go.mod has exclude or replace lines.
$(E2E)/containerd-%/.built: MODULE = github.com/containerd/containerd$(if $(filter v1.%,$*),,/v2)
$(E2E)/containerd-%/.built: | go
	rm -rf $(@D) && mkdir -p $(@D)/module
	cd $(@D)/module && go mod init e2e/runtime && \
		go get $(MODULE)/cmd/containerd@$* $(MODULE)/cmd/containerd-shim-runc-v2@$* $(MODULE)/cmd/ctr@$* && \
		CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X $(MODULE)/version.Version=$*" -o .. \
			$(MODULE)/cmd/containerd $(MODULE)/cmd/containerd-shim-runc-v2 $(MODULE)/cmd/ctr
	rm -rf $(@D)/module
	touch $@

# containerd's own integration tests, with the shim and the plugin that fail on demand. They are built where the module is, which
# has all that it needs: three minutes of two cores, the first time.
$(SANDBOX_TESTS)/.built: MODULE = github.com/containerd/containerd/v2@$(firstword $(CONTAINERD_VERSIONS))
$(SANDBOX_TESTS)/.built: FAILING = integration/failpoint/cmd
$(SANDBOX_TESTS)/.built: | go
	rm -rf $(E2E)/sandbox-tests-* && mkdir -p $(@D)
	cd "$$(go mod download -json $(MODULE) | sed -n 's/^\t"Dir": "\(.*\)",/\1/p')" && \
		CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o $(@D)/ ./$(FAILING)/containerd-shim-runc-fp-v1 ./$(FAILING)/cni-bridge-fp && \
		CGO_ENABLED=0 go test -c -trimpath -ldflags "-s -w" -o $(@D)/integration.test ./integration
	touch $@

# A module of its own, for the same reason. The proxy does not serve the module of nerdctl's tests, of which nerdctl itself only compiles an
# interface.
$(NERDCTL_STAMP): MODULE = github.com/containerd/nerdctl
$(NERDCTL_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)/module/tigron
	cd $(@D)/module/tigron && go mod init $(MODULE)/mod/tigron && mkdir tig && \
		printf 'package tig\n\nimport "testing"\n\ntype T = testing.TB\n' >tig/tig.go
	cd $(@D)/module && go mod init e2e/runtime && go mod edit -replace $(MODULE)/mod/tigron=./tigron && \
		go get $(MODULE)/v2/pkg/netutil@$(NERDCTL_VERSION) && printf 'package main\n\nimport _ "$(MODULE)/v2/pkg/netutil"\n' >main.go && \
		CGO_ENABLED=0 go build -mod=mod -buildvcs=false -trimpath -ldflags "-s -w" -o ../nerdctl $(MODULE)/v2/cmd/nerdctl
	rm -rf $(@D)/module
	touch $@

# A module of its own, for the same reason: two minutes of two cores, the first time. CRIO= and PINNS= name binaries to take instead.
$(CRIO_STAMP): MODULE = github.com/cri-o/cri-o
$(CRIO_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)/module
	[ -z "$(CRIO)" ] || cp "$(CRIO)" $(@D)/crio
	[ -z "$(PINNS)" ] || cp "$(PINNS)" $(@D)/pinns
	cd $(@D)/module && go mod init e2e/runtime && go get $(MODULE)/cmd/crio@$(CRIO_VERSION) && \
		{ [ -e ../crio ] || CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o ../crio \
			-tags "containers_image_ostree_stub containers_image_openpgp exclude_graphdriver_btrfs" $(MODULE)/cmd/crio; } && \
		{ [ -e ../pinns ] || { cp -r "$$(go list -m -f '{{.Dir}}' $(MODULE))/pinns" . && chmod -R u+w pinns && \
			$(MAKE) -C pinns && cp bin/pinns ..; }; }
	rm -rf $(@D)/module
	touch $@

# A module of its own, for the same reason. Two minutes of two cores, the first time.
$(AWS_CNI_STAMP): MODULE = github.com/aws/amazon-vpc-cni-k8s
$(AWS_CNI_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)/module
	cd $(@D)/module && go mod init e2e/aws && \
		go get $(MODULE)/cmd/routed-eni-cni-plugin@$(AWS_CNI_VERSION) $(MODULE)/cmd/egress-cni-plugin@$(AWS_CNI_VERSION) && \
		for plugin in routed-eni-cni-plugin:aws-cni egress-cni-plugin:egress-cni; do \
			CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X main.version=$(AWS_CNI_VERSION)" \
				-o ../$${plugin#*:} $(MODULE)/cmd/$${plugin%:*} || exit 1; \
		done
	rm -rf $(@D)/module
	touch $@

# A module of its own, without cilium's replace lines, which the plugin does not need. Three minutes of two cores, the first time.
$(CILIUM_STAMP): PLUGIN = github.com/cilium/cilium/plugins/cilium-cni
$(CILIUM_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)/module
	cd $(@D)/module && go mod init e2e/cilium && go get $(PLUGIN)@$(CILIUM_VERSION) && \
		CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o .. $(PLUGIN)
	rm -rf $(@D)/module
	touch $@

# A module of its own, as above. Thin multus alone: one minute of two cores, the first time.
$(MULTUS_STAMP): PLUGIN = gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus
$(MULTUS_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)/module
	cd $(@D)/module && go mod init e2e/multus && go get $(PLUGIN)@$(MULTUS_VERSION) && \
		CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o .. $(PLUGIN)
	rm -rf $(@D)/module
	touch $@

# CRI-O's CNI library, with a program that calls it as CRI-O does.
$(OCICNI_STAMP): $(wildcard $(OCICNI)/*) | go
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(OCICNI) && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o $(@D)/ .
	touch $@

# The reference plugins' own integration suite, with what its module needs to build the rest of it.
$(UPSTREAM)/.built: | go
	rm -rf $(@D) && mkdir -p $(@D)
	mkdir $(@D)/src
	tar -c -C "$$(go list -m -f '{{.Dir}}' github.com/containernetworking/plugins@$(PLUGINS_VERSION))" \
		go.mod go.sum integration pkg/testutils/echo | tar -x -C $(@D)/src
	chmod -R u+w $(@D)/src
	cd $(@D)/src && CGO_ENABLED=0 go test -c -o ../integration.test ./integration
	touch $@

$(E2E)/deb/.unpacked: APT_DOWNLOAD = apt-get install -y --reinstall --download-only --no-install-recommends \
	-o Dir::Cache::archives=$(@D)/packages $(DEBS)
$(E2E)/deb/.unpacked:
	@command -v apt-get >/dev/null || { echo "error: no apt-get: the end-to-end tests take runc from Debian" >&2; exit 1; }
	rm -rf $(@D) && mkdir -p $(@D)/packages/partial
	$(APT_DOWNLOAD) || { apt-get update && $(APT_DOWNLOAD); }
	set -e; for package in $(@D)/packages/*.deb; do dpkg-deb -x "$$package" $(@D); done
	rm -rf $(@D)/packages
	touch $@

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

release: go ## put a release into dist/
	rm -rf dist && mkdir dist
	scripts/release/notes.sh $(VERSION) >dist/NOTES.md
	set -e; for arch in $(ARCHES); do \
		$(MAKE) archive ARCH=$$arch VERSION=$(VERSION) SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH); \
	done
	set -e; for laptop in $(LAPTOPS); do \
		$(MAKE) kubectl-archive OS=$${laptop%/*} ARCH=$${laptop#*/} VERSION=$(VERSION) SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH); \
	done
	$(MAKE) image chart-archive VERSION=$(VERSION) SITE=$(SITE) SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH)
	cd dist && ../scripts/release/krew.sh $(VERSION) $(SITE) >unwind.yaml
	cd dist && sha256sum *-* unwind.yaml >SHA256SUMS

# A directory as an archive, the same bytes wherever it is made: tar sorts it, and is told of what it would ask the file system.
PACK = tar -C dist -c --format=ustar --sort=name --mtime=@$(SOURCE_DATE_EPOCH) --owner=0 --group=0 --numeric-owner \
	--mode=u=rwX,go=rX $(NAME) | gzip -n >dist/$(NAME).tar.gz && rm -rf dist/$(NAME)

# One archive, with all that a node needs.
archive: NAME = unwind-$(VERSION)-linux-$(ARCH)
archive: go
	mkdir -p dist/$(NAME)
	$(RELEASE_ENV) GOOS=linux GOARCH=$(ARCH) $(GO_BUILD) -o dist/$(NAME)/ ./cmd/unwind ./cmd/unwindctl
	$(call GO_RUN,$(SBOM_WRITER)) $(VERSION) $(abspath dist/$(NAME)/licenses dist/$(NAME)/unwind dist/$(NAME)/unwindctl) \
		>dist/$(NAME)/sbom.cdx.json
	$(MAKE) man MANUAL=dist/$(NAME)/man8 SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH)
	tar -c --exclude=$(CHECK) $(RELEASE_FILES) | tar -x -C dist/$(NAME)
	cd dist/$(NAME) && find . -type f | LC_ALL=C sort | xargs sha256sum >../SHA256SUMS && mv ../SHA256SUMS .
	$(PACK)

# The plugin of kubectl, for an operator's machine.
kubectl-archive: NAME = kubectl-unwind-$(VERSION)-$(OS)-$(ARCH)
kubectl-archive: go
	mkdir -p dist/$(NAME)
	$(RELEASE_ENV) GOOS=$(OS) GOARCH=$(ARCH) $(GO_BUILD) -o dist/$(NAME)/ ./cmd/kubectl-unwind
	$(call GO_RUN,$(SBOM_WRITER)) $(VERSION) $(CURDIR)/dist/$(NAME)/licenses $(CURDIR)/dist/$(NAME)/kubectl-unwind* \
		>dist/$(NAME)/sbom.cdx.json
	cp LICENSE dist/$(NAME)
	$(PACK)

# Each architecture has a bill of materials beside the archive, such as unwind-v1.2.3-image-amd64.cdx.json.
image: PROGRAMS = $(abspath $(IMAGE_ARCHIVE)).programs
image: go ## put the agent's image into dist/ (OCI archive); IMAGE names it
	set -e; for arch in $(ARCHES); do dir=$(PROGRAMS)/$$arch; \
		$(RELEASE_ENV) GOOS=linux GOARCH=$$arch $(GO_BUILD) -o $$dir/ ./cmd/unwind ./cmd/unwindctl; \
		cp LICENSE $$dir; \
		$(call GO_RUN,$(SBOM_WRITER)) $(VERSION) $$dir/licenses $$dir/unwind $$dir/unwindctl >$(IMAGE_ARCHIVE:.tar=)-$$arch.cdx.json; \
	done
	SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) $(call GO_RUN,$(IMAGE_WRITER)) $(IMAGE) $(VERSION) "$(filter-out %.invalid,$(SITE))" \
		"$(shell git rev-parse HEAD 2>/dev/null)" $(abspath $(IMAGE_ARCHIVE)) $(PROGRAMS) $(ARCHES)
	rm -rf $(PROGRAMS)

# The chart of this version, with the image of IMAGE_ARCHIVE by its name and digest.
chart-archive: NAME = unwind
chart-archive: go
	mkdir -p dist && cp -r scripts/deploy/helm/unwind dist
	sed -i 's|^version: .*|version: $(VERSION:v%=%)|; s|^appVersion: .*|appVersion: $(VERSION)|' dist/$(NAME)/Chart.yaml
	set -e; image=$(IMAGE); digest=$$(tar -xOf $(IMAGE_ARCHIVE) index.json | grep -o 'sha256:[0-9a-f]*'); \
		sed -i "s|^  repository: .*|  repository: $${image%:*}|; s|^  tag: .*|  tag: $${image##*:}|; s|^  digest: .*|  digest: $$digest|" \
		dist/$(NAME)/values.yaml
	$(PACK)
	mv dist/$(NAME).tar.gz $(CHART_ARCHIVE)

# -trimpath keeps the directory out of the bytes and of the keys of what is cached: without it, the two releases differ although one
# cache serves both. So the compiler runs once more, without a cache, for the plugin alone.
release-check: go ## build the release twice, and compare and test it
	@set -e; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; trap 'exit 1' INT TERM; \
	git clone --quiet . "$$work/one"; git clone --quiet "$$work/one" "$$work/another/deeper"; \
	for copy in one another/deeper; do \
		$(MAKE) -C "$$work/$$copy" release; \
		umask 077; export TZ=Asia/Kathmandu; \
	done; \
	cd "$$work"; \
	[ "$$(ls one/dist)" = "$$(ls another/deeper/dist)" ] || { echo "error: not the same files" >&2; exit 1; }; \
	for file in one/dist/*; do cmp "$$file" "another/deeper/dist/$${file##*/}"; done; \
	GOCACHE=$$work/cache $(RELEASE_ENV) $(MAKE) -C another/deeper build COMMANDS=./cmd/unwind; \
	tar -xOzf one/dist/unwind-*-linux-$$(go env GOARCH).tar.gz --wildcards --no-wildcards-match-slash '*/unwind' | \
		cmp - another/deeper/bin/unwind; \
	cd $(CURDIR)/$(CHECK); UNWIND_RELEASE=$$work/one/dist go test -run '^TestRelease$$' -count=1 .; \
	cat $$work/one/dist/SHA256SUMS

clean: ## remove bin/, dist/ and .tools/
	rm -rf bin dist .tools

go:
	@command -v go >/dev/null || \
		{ echo "error: no go command in PATH" >&2; \
		  echo "hint: install Go (https://go.dev/dl) and add its bin folder to PATH" >&2; exit 1; }
