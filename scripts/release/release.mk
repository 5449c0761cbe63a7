# Builds a release, and checks that two builds of it have the same bytes. GoReleaser, with
# .goreleaser.yaml, writes the archives, packages, bills of materials and krew's manifest. The
# targets below write the other files. The Makefile includes this file, and sets VERSION.

# The tools are in .tools/bin. The targets are stamp files, as in `make tools`. The name of a stamp
# file contains the version of its tool.
GORELEASER := $(TOOLS)/bin/.goreleaser-$(GORELEASER_VERSION)
CYCLONEDX  := $(TOOLS)/bin/.cyclonedx-gomod-$(CYCLONEDX_VERSION)
CRANE      := $(TOOLS)/bin/.crane-$(CRANE_VERSION)
$(GORELEASER): MODULE = github.com/goreleaser/goreleaser/v2@$(GORELEASER_VERSION)
$(CYCLONEDX): MODULE = github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@$(CYCLONEDX_VERSION)
$(CRANE): MODULE = github.com/google/go-containerregistry/cmd/crane@$(CRANE_VERSION)
$(GORELEASER) $(CYCLONEDX) $(CRANE): | go
	GOBIN=$(TOOLS)/bin CGO_ENABLED=0 go install -trimpath $(MODULE)
	touch $@

# The node architectures that a release supports.
ARCHES := amd64 arm64

# The full name of the agent's image; its short name is unwind:$(VERSION). make ignores an
# environment variable IMAGE, because that may belong to another program.
IMAGE = docker.io/library/unwind:$(VERSION)

# The output of `make image` and `make chart-archive`.
IMAGE_ARCHIVE = dist/unwind-$(VERSION)-image.tar
CHART_ARCHIVE = dist/unwind-$(VERSION:v%=%).tgz

# The URL of the repository, from which krew downloads releases. The release workflow sets SITE.
# Nobody owns the default (.invalid, RFC 2606).
SITE = https://unwind.invalid

# The date of all files in a release is the commit's date
# (https://reproducible-builds.org/specs/source-date-epoch).
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

# Go settings that change the bytes of a release, so they must not come from the machine. None is
# empty, because Go would then use the value set with `go env -w`. The bills of materials name the
# version of Go, which is at least go.mod's. To rebuild with that version, set GOTOOLCHAIN=go1.N.P.
RELEASE_ENV := GOFLAGS=-mod=readonly GOAMD64=v1 GOARM64=v8.0 GOFIPS140=off

release: $(GORELEASER) $(CYCLONEDX) $(CRANE) ## put a release into dist/
	PATH=$(TOOLS)/bin:$$PATH $(RELEASE_ENV) CGO_ENABLED=0 VERSION=$(VERSION) SITE=$(SITE) SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) \
		RELEASE_DATE=$(shell date -u -d @$(SOURCE_DATE_EPOCH) +%Y-%m-%dT%H:%M:%SZ) goreleaser release --snapshot --clean
	mv dist/krew/unwind.yaml dist && cd dist && rm -r */ artifacts.json metadata.json config.yaml
	scripts/release/notes.sh $(VERSION) >dist/NOTES.md
	$(MAKE) image chart-archive VERSION=$(VERSION) SITE=$(SITE) SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH)
	cd dist && export LC_ALL=C && sha256sum [!NS]* >SHA256SUMS

# GoReleaser runs this target first.
release-parts: PARTS := bin/release
release-parts: go
	rm -rf $(PARTS) && mkdir -p $(PARTS)/systemd $(PARTS)/doc
	scripts/release/licenses.sh $(PARTS)/licenses
	$(MAKE) man MANUAL=$(PARTS)/man8 SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH)
	gzip -nk $(PARTS)/man8/*.8
	cp cmd/unwindctl/internal/install/systemd/* $(PARTS)/systemd
	sed -i 's|/usr/local/bin|/usr/bin|; /unwindctl install --systemd/d' $(PARTS)/systemd/*
	cp README.md CHANGELOG.md cmd/unwindctl/OPERATIONS.md cmd/unwind/CONFIGURATION.md cmd/unwind/LIMITS.md $(PARTS)/doc
	cp LICENSE $(PARTS)/doc/copyright
	chmod -R u=rwX,go=rX $(PARTS) # the packages' files get the modes of these files

# Packs files into an archive that has the same bytes on every machine: tar sorts the files, and
# takes no times, owners or modes from the file system, except for the execute permission.
PACK = tar -c --format=ustar --sort=name --mtime=@$(SOURCE_DATE_EPOCH) --owner=0 --group=0 --numeric-owner \
	--mode=u=rwX,go=rX

image: PARTS := dist/image
image: $(CRANE) ## put the agent's image into dist/ (OCI archive); IMAGE names it
	rm -rf $(PARTS)
	scripts/release/licenses.sh $(PARTS)/licenses
	set -e; for arch in $(ARCHES); do dir=$(PARTS)/$$arch; \
		$(RELEASE_ENV) GOOS=linux GOARCH=$$arch $(GO_BUILD) -o $$dir/ ./cmd/unwind ./cmd/unwindctl; \
		$(PACK) -C $$dir unwind unwindctl -C $(CURDIR) LICENSE -C $(PARTS) licenses | gzip -n >$$dir.tar.gz; \
	done
	PATH=$(TOOLS)/bin:$$PATH SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) scripts/release/image.sh $(IMAGE) $(VERSION) \
		"$(filter-out %.invalid,$(SITE))" "$(shell git rev-parse HEAD 2>/dev/null)" $(IMAGE_ARCHIVE) $(PARTS) $(ARCHES)
	rm -r $(PARTS)

# The chart of this version. It names the image in IMAGE_ARCHIVE by its digest.
chart-archive: NAME = unwind
chart-archive: go
	mkdir -p dist && cp -r scripts/deploy/helm/unwind dist
	sed -i 's|^version: .*|version: $(VERSION:v%=%)|; s|^appVersion: .*|appVersion: $(VERSION)|' dist/$(NAME)/Chart.yaml
	set -e; image=$(IMAGE); digest=$$(tar -xOf $(IMAGE_ARCHIVE) index.json | grep -o 'sha256:[0-9a-f]*'); \
		sed -i "s|^  repository: .*|  repository: $${image%:*}|; s|^  tag: .*|  tag: $${image##*:}|; s|^  digest: .*|  digest: $$digest|" \
		dist/$(NAME)/values.yaml
	$(PACK) -C dist $(NAME) | gzip -n >$(CHART_ARCHIVE)
	rm -r dist/$(NAME)

# The two releases are built in different directories, but because of -trimpath, they share Go's
# build cache. So the recipe builds the plugin once more with an empty cache, to prove that the
# compiler itself writes the same bytes.
release-check: $(GORELEASER) $(CYCLONEDX) $(CRANE) ## build the release twice, and compare and test it
	@set -e; work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; trap 'exit 1' INT TERM; \
	git clone --quiet . "$$work/one"; git clone --quiet "$$work/one" "$$work/another/deeper"; \
	for copy in one another/deeper; do \
		$(MAKE) -C "$$work/$$copy" release TOOLS=$(TOOLS); \
		umask 077; export TZ=Asia/Kathmandu; \
	done; \
	cd "$$work"; \
	[ "$$(ls one/dist)" = "$$(ls another/deeper/dist)" ] || { echo "error: not the same files" >&2; exit 1; }; \
	for file in one/dist/[!S]*; do cmp "$$file" "another/deeper/dist/$${file##*/}"; done; \
	GOCACHE=$$work/cache $(RELEASE_ENV) $(MAKE) -C another/deeper build COMMANDS=./cmd/unwind; \
	tar -xOzf one/dist/unwind-*-linux-$$(go env GOARCH).tar.gz --wildcards --no-wildcards-match-slash '*/unwind' | \
		cmp - another/deeper/bin/unwind; \
	cd $(CURDIR)/$(CHECK); UNWIND_RELEASE=$$work/one/dist go test -run '^TestRelease$$' -count=1 .; \
	cat $$work/one/dist/SHA256SUMS
