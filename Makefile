# The targets are the interface; continuous integration runs the same ones. `make` alone lists them.

PLUGINS_VERSION     := v1.9.1
CNITOOL_VERSION     := v1.3.1
STATICCHECK_VERSION := v0.8.2

# The reference plugins that the tests and the demo use, by their folder in containernetworking/plugins.
PLUGINS := main/bridge main/host-device main/loopback main/macvlan main/ptp \
           ipam/host-local ipam/static \
           meta/bandwidth meta/firewall meta/portmap meta/sbr meta/tuning

VERSION   = $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
TOOLS    := $(CURDIR)/.tools
GO_FILES := find . -name '.?*' -prune -o -name '*.go' -print

# What the tests and the demo call, as command:package. Fetching modules takes certificates; -race takes a C compiler,
# and that the C library's headers.
DEPS := iptables:iptables nft:nftables ip:iproute2 ping:iputils-ping update-ca-certificates:ca-certificates gcc:gcc

# Stamps name the version, so that a new one is fetched.
PLUGINS_STAMP := $(TOOLS)/cni/.plugins-$(PLUGINS_VERSION)
CNITOOL_STAMP := $(TOOLS)/bin/.cnitool-$(CNITOOL_VERSION)

# testdata is outside of ./...
ALL_PACKAGES := ./... ./testdata/faulty ./testdata/sandbox

# Not in everybody's PATH, and the plugins call iptables.
export PATH := $(PATH):/usr/sbin:/sbin

.PHONY: help build tools deps test lint demo bench clean go faulty
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 8

build: go ## put unwind and unwindctl into bin/
	CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags "-s -w -X main.version=$(VERSION)" -o bin/ \
		./cmd/unwind ./cmd/unwindctl

tools: $(PLUGINS_STAMP) $(CNITOOL_STAMP) faulty ## put the reference plugins, cnitool and the faulty plugin into .tools/

$(PLUGINS_STAMP): | go
	GOBIN=$(TOOLS)/cni CGO_ENABLED=0 go install \
		$(PLUGINS:%=github.com/containernetworking/plugins/plugins/%@$(PLUGINS_VERSION))
	touch $@

$(CNITOOL_STAMP): | go
	GOBIN=$(TOOLS)/bin CGO_ENABLED=0 go install github.com/containernetworking/cni/cnitool@$(CNITOOL_VERSION)
	touch $@

faulty: go
	CGO_ENABLED=0 go build -buildvcs=false -o $(TOOLS)/test/faulty ./testdata/faulty

deps: ## install what is missing of iptables, nftables, iproute2, ping and a C compiler (Debian, as root)
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

test: deps tools build ## run all tests, with -race, on real plugins and namespaces (as root)
	CGO_ENABLED=1 go test -race -parallel 16 -timeout 30m ./...

lint: deps go ## check format, vet, staticcheck, go.mod and the scripts
	@unformatted=$$($(GO_FILES) | xargs gofmt -l) && [ -z "$$unformatted" ] || \
		{ echo "gofmt -w is needed on: $$unformatted" >&2; exit 1; }
	go vet $(ALL_PACKAGES)
	go run honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION) $(ALL_PACKAGES)
	go mod tidy -diff
	for script in .ci/run scripts/*.sh; do bash -n "$$script" || exit 1; done

demo: deps tools build ## show what a failing plugin leaks without unwind, and with it (as root, under two minutes)
	scripts/demo.sh

bench: deps tools build ## time ADD and DEL of a chain of real plugins, plain and through unwind (as root, on a quiet machine)
	CGO_ENABLED=0 go run -buildvcs=false ./scripts/bench

clean: ## remove bin/ and .tools/
	rm -rf bin .tools

go:
	@command -v go >/dev/null || \
		{ echo "error: no go command in PATH" >&2; \
		  echo "hint: install Go (https://go.dev/dl) and add its bin folder to PATH" >&2; exit 1; }
