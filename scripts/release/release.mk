# Builds a release (archives, the image and the chart), and checks that two builds of it have the
# same bytes. The Makefile includes this file, and sets VERSION.

# Runs a tool for the release on the building machine. It is compiled with the same flags as the
# programs, so that both share compiled packages.
GO_RUN = GOOS= GOARCH= CGO_ENABLED=0 go run -C $(1) -buildvcs=false -trimpath .

# The architectures of nodes that a release supports.
ARCHES := amd64 arm64

# The platforms of kubectl-unwind, as system/architecture.
LAPTOPS := linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64

# The other files in an archive. Their links lead only to each other (TestArchiveLinks).
RELEASE_FILES := LICENSE README.md CHANGELOG.md $(wildcard cmd/unwindctl/internal/install/systemd/unwind-*) scripts/demo.svg \
	scripts/quickstart.sh scripts/deploy scripts/providers scripts/bench/README.md \
	plugin/README.md plugin/decide/README.md journal/README.md testdata/README.md cmd/unwind/CONFIGURATION.md cmd/unwind/LIMITS.md cmd/unwind/ALTERNATIVES.md \
	cmd/unwindctl/OPERATIONS.md .github/CONTRIBUTING.md .github/SECURITY.md

# The full name of the agent's image, for which unwind:$(VERSION) is short. It ignores an
# environment variable IMAGE, which may belong to another program.
IMAGE = docker.io/library/unwind:$(VERSION)

# The output of make image and of make chart-archive.
IMAGE_ARCHIVE = dist/unwind-$(VERSION)-image.tar
CHART_ARCHIVE = dist/unwind-$(VERSION:v%=%).tgz

# The URL of the repository, where krew downloads releases. The workflow sets it. Nobody owns the
# default (.invalid, RFC 2606).
SITE = https://unwind.invalid

# The date of all files in a release is that of the commit
# (https://reproducible-builds.org/specs/source-date-epoch).
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

# A release is built by the Go version in go.mod or a newer one, which the archive's sbom.cdx.json
# names. GOTOOLCHAIN=go1.N.P selects that version again. A machine may have other values of the
# following settings, which would change the bytes. Empty values would not help: then those of go
# env -w apply.
RELEASE_ENV := GOFLAGS=-mod=readonly GOAMD64=v1 GOARM64=v8.0 GOFIPS140=off

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

# Packs a directory into an archive that has the same bytes on every machine: tar sorts the files,
# and takes no times, owners or modes from the file system.
PACK = tar -C dist -c --format=ustar --sort=name --mtime=@$(SOURCE_DATE_EPOCH) --owner=0 --group=0 --numeric-owner \
	--mode=u=rwX,go=rX $(NAME) | gzip -n >dist/$(NAME).tar.gz && rm -rf dist/$(NAME)

# The archive with everything that a node needs, for one architecture.
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

# The archive of the kubectl plugin, for an operator's machine.
kubectl-archive: NAME = kubectl-unwind-$(VERSION)-$(OS)-$(ARCH)
kubectl-archive: go
	mkdir -p dist/$(NAME)
	$(RELEASE_ENV) GOOS=$(OS) GOARCH=$(ARCH) $(GO_BUILD) -o dist/$(NAME)/ ./cmd/kubectl-unwind
	$(call GO_RUN,$(SBOM_WRITER)) $(VERSION) $(CURDIR)/dist/$(NAME)/licenses $(CURDIR)/dist/$(NAME)/kubectl-unwind* \
		>dist/$(NAME)/sbom.cdx.json
	cp LICENSE dist/$(NAME)
	$(PACK)

# For each architecture, a bill of materials is written next to the image, such as
# unwind-v1.2.3-image-amd64.cdx.json.
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

# The chart of this version. It names the image in IMAGE_ARCHIVE by its digest.
chart-archive: NAME = unwind
chart-archive: go
	mkdir -p dist && cp -r scripts/deploy/helm/unwind dist
	sed -i 's|^version: .*|version: $(VERSION:v%=%)|; s|^appVersion: .*|appVersion: $(VERSION)|' dist/$(NAME)/Chart.yaml
	set -e; image=$(IMAGE); digest=$$(tar -xOf $(IMAGE_ARCHIVE) index.json | grep -o 'sha256:[0-9a-f]*'); \
		sed -i "s|^  repository: .*|  repository: $${image%:*}|; s|^  tag: .*|  tag: $${image##*:}|; s|^  digest: .*|  digest: $$digest|" \
		dist/$(NAME)/values.yaml
	$(PACK)
	mv dist/$(NAME).tar.gz $(CHART_ARCHIVE)

# The two releases are built in different directories, but -trimpath makes them share Go's build
# cache. So the recipe builds the plugin once more with an empty cache, to prove that the compiler
# itself gives the same bytes.
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
