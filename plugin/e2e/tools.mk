# This file, which the Makefile includes, provides the programs that the end-to-end tests run:
# container runtimes, Kubernetes, providers' plugins, and tests of other projects. It builds Go
# modules, and unpacks Debian packages, in .tools/e2e.

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
                 $(SANDBOX_TESTS)/.built $(MULTUS_STAMP) $(OCICNI_STAMP) $(CRIO_STAMP) $(BEFORE_STAMP) \
                 $(if $(SHORT),,$(NERDCTL_STAMP) $(AWS_CNI_STAMP) $(CILIUM_STAMP))

# hyperkube is one binary with all programs of a cluster. Its go.mod contains the version of
# Kubernetes. The first build takes six minutes on two cores.
HYPERKUBE          := plugin/e2e/hyperkube
KUBERNETES_VERSION := $(shell sed -n 's|^require k8s.io/kubernetes ||p' $(HYPERKUBE)/go.mod)
KUBERNETES_STAMP   := $(E2E)/kubernetes/.built-$(KUBERNETES_VERSION)

# The helm command has the same version as the helm library in the chart's tests.
HELM_VERSION := $(shell sed -n 's|^\thelm.sh/helm/v3 ||p' $(CHECK)/go.mod)
HELM_STAMP   := $(E2E)/helm/.built-$(HELM_VERSION)

e2e: deps tools build e2e-tools ## test real runtimes (root); SHORT=1: fewer runtimes
	UNWIND_E2E_SHORT=$(SHORT) CGO_ENABLED=0 go test -tags e2e -p 1 -count=1 -timeout 90m -v -run E2E ./plugin/e2e

e2e-tools: $(E2E_STAMPS) faulty
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -o $(E2E)/bin/ ./plugin/e2e/pause ./testdata/faulty

e2e-k8s: deps tools build e2e-tools e2e-now e2e-next $(KUBERNETES_STAMP) $(HELM_STAMP) $(CNI04_STAMP) ## test on Kubernetes (root); SHORT=1: not as long
	UNWIND_E2E_SHORT=$(SHORT) CGO_ENABLED=0 go test -tags e2e -p 1 -count=1 -timeout 60m -v -run Kubernetes ./plugin/e2e

# This is the previous release of the reference plugins. Some tests add pods with it, and delete
# these pods with the current release.
$(BEFORE_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)
	GOBIN=$(@D) CGO_ENABLED=0 go install \
		$(PLUGINS:%=github.com/containernetworking/plugins/plugins/%@$(PLUGINS_BEFORE))
	touch $@

# This portmap is older than release 1.0 of the reference plugins. It rejects a cniVersion above
# 0.4.0.
$(CNI04_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)
	GOBIN=$(@D) CGO_ENABLED=0 go install github.com/containernetworking/plugins/plugins/meta/portmap@$(PLUGINS_CNI04)
	touch $@

$(KUBERNETES_STAMP): $(wildcard $(HYPERKUBE)/*) | go
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(HYPERKUBE) && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o $(@D)/ \
		-ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$(KUBERNETES_VERSION)" .
	touch $@

# The first build takes two minutes on two cores.
$(HELM_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)
	GOBIN=$(@D) CGO_ENABLED=0 go install -buildvcs=false -trimpath -ldflags "-s -w" helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)
	touch $@

# These targets build two unreleased versions for the test of an upgrade. e2e-now builds the image
# that is named in daemonset.yaml and in the repository's chart. e2e-next builds a newer image and,
# as in a release, a chart that names it.
e2e-now: go
	$(MAKE) image VERSION=v0.0.0-20260101000000-000000000001 IMAGE=docker.io/library/unwind:dev IMAGE_ARCHIVE=$(E2E)/image-now.tar
e2e-next: go
	$(MAKE) image chart-archive VERSION=v0.0.0-20260102000000-000000000002 IMAGE=docker.io/library/unwind:next \
		IMAGE_ARCHIVE=$(E2E)/image-next.tar CHART_ARCHIVE=$(E2E)/chart-next.tgz

# containerd is built in a temporary module, because go install refuses a module whose go.mod has
# exclude or replace lines.
$(E2E)/containerd-%/.built: MODULE = github.com/containerd/containerd$(if $(filter v1.%,$*),,/v2)
$(E2E)/containerd-%/.built: | go
	rm -rf $(@D) && mkdir -p $(@D)/module
	cd $(@D)/module && go mod init e2e/runtime && \
		go get $(MODULE)/cmd/containerd@$* $(MODULE)/cmd/containerd-shim-runc-v2@$* $(MODULE)/cmd/ctr@$* && \
		CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X $(MODULE)/version.Version=$*" -o .. \
			$(MODULE)/cmd/containerd $(MODULE)/cmd/containerd-shim-runc-v2 $(MODULE)/cmd/ctr
	rm -rf $(@D)/module
	touch $@

# These are containerd's own integration tests, with a shim and a plugin that fail on demand. They
# are built inside containerd's module in the module cache. The first build takes three minutes on
# two cores.
$(SANDBOX_TESTS)/.built: MODULE = github.com/containerd/containerd/v2@$(firstword $(CONTAINERD_VERSIONS))
$(SANDBOX_TESTS)/.built: FAILING = integration/failpoint/cmd
$(SANDBOX_TESTS)/.built: | go
	rm -rf $(E2E)/sandbox-tests-* && mkdir -p $(@D)
	cd "$$(go mod download -json $(MODULE) | sed -n 's/^\t"Dir": "\(.*\)",/\1/p')" && \
		CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o $(@D)/ ./$(FAILING)/containerd-shim-runc-fp-v1 ./$(FAILING)/cni-bridge-fp && \
		CGO_ENABLED=0 go test -c -trimpath -ldflags "-s -w" -o $(@D)/integration.test ./integration
	touch $@

# nerdctl is built in a temporary module, like containerd. The module proxy does not serve tigron,
# the module of nerdctl's tests. nerdctl itself uses only one interface of tigron, which a stub
# replaces.
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

# CRI-O is built in a temporary module, like containerd. The first build takes two minutes on two
# cores. To use existing binaries instead, set CRIO and PINNS to their paths.
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

# The AWS plugins are built in a temporary module, like containerd. The first build takes two
# minutes on two cores.
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

# cilium-cni is built in a temporary module without cilium's replace lines, which it does not need.
# The first build takes three minutes on two cores.
$(CILIUM_STAMP): PLUGIN = github.com/cilium/cilium/plugins/cilium-cni
$(CILIUM_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)/module
	cd $(@D)/module && go mod init e2e/cilium && go get $(PLUGIN)@$(CILIUM_VERSION) && \
		CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o .. $(PLUGIN)
	rm -rf $(@D)/module
	touch $@

# Multus (only thin Multus) is built in a temporary module, like containerd. The first build takes
# one minute on two cores.
$(MULTUS_STAMP): PLUGIN = gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus
$(MULTUS_STAMP): | go
	rm -rf $(@D) && mkdir -p $(@D)/module
	cd $(@D)/module && go mod init e2e/multus && go get $(PLUGIN)@$(MULTUS_VERSION) && \
		CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o .. $(PLUGIN)
	rm -rf $(@D)/module
	touch $@

# This program calls CRI-O's CNI library as CRI-O does.
$(OCICNI_STAMP): $(wildcard $(OCICNI)/*) | go
	rm -rf $(@D) && mkdir -p $(@D)
	cd $(OCICNI) && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w" -o $(@D)/ .
	touch $@

# This is the reference plugins' own integration suite, with the sources that the suite compiles
# when it runs.
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
