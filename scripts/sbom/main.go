// Sbom prints the bill of materials of Go binaries, as CycloneDX 1.6: the standard library and the
// modules that the linker recorded in them, with their licenses.
//
//	sbom VERSION DIRECTORY BINARY…
//
// It copies the texts of their licenses into DIRECTORY. The same binaries give the same bytes: the
// bill contains no time and no serial number. make release runs this program.
package main

import (
	"cmp"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// product is the name of the product that the binaries belong to.
const product = "unwind"

// stdlib is the standard library's name in the Go vulnerability database
// (https://go.dev/doc/security/vuln/database).
const stdlib = "stdlib"

func main() {
	if err := write(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func write(args []string, out io.Writer) error {
	if len(args) < 3 {
		return errors.New("usage: sbom VERSION DIRECTORY BINARY…")
	}
	var binaries []binary
	for _, path := range args[2:] {
		b, err := readBinary(path)
		if err != nil {
			return err
		}
		binaries = append(binaries, b)
	}
	found, err := copyLicenses(args[1], binaries)
	if err != nil {
		return err
	}
	return cdx.NewBOMEncoder(out, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false).
		EncodeVersion(bill(args[0], binaries, found), cdx.SpecVersion1_6)
}

// binary is a binary and the build information that the linker wrote into it.
type binary struct {
	name   string
	sha256 string
	info   *debug.BuildInfo
}

func readBinary(path string) (binary, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return binary{}, err
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return binary{}, err
	}
	sum := sha256.Sum256(data)
	return binary{filepath.Base(path), hex.EncodeToString(sum[:]), info}, nil
}

// bill lists each module once, and for each binary its modules.
func bill(version string, binaries []binary, found licenses) *cdx.BOM {
	root := cdx.Component{BOMRef: product, Type: cdx.ComponentTypeApplication, Name: product,
		Version: version}
	modules := map[string]cdx.Component{}
	var programs []cdx.Component
	var dependencies []cdx.Dependency
	for _, b := range binaries {
		program := programComponent(version, b)
		needs := []string{}
		for _, m := range moduleComponents(b.info) {
			m.Licenses = &cdx.Licenses{}
			for _, id := range found[m.Name+"@"+m.Version] {
				*m.Licenses = append(*m.Licenses, cdx.LicenseChoice{License: &cdx.License{ID: id}})
			}
			modules[m.BOMRef] = m
			needs = append(needs, m.BOMRef)
		}
		slices.Sort(needs)
		programs = append(programs, program)
		dependencies = append(dependencies, cdx.Dependency{Ref: program.BOMRef, Dependencies: &needs})
	}
	root.Components = &programs

	libraries := slices.SortedFunc(maps.Values(modules),
		func(a, b cdx.Component) int { return cmp.Compare(a.BOMRef, b.BOMRef) })
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: &root}
	bom.Components, bom.Dependencies = &libraries, &dependencies
	return bom
}

// programComponent describes a binary, with its Go version and build settings.
func programComponent(version string, b binary) cdx.Component {
	properties := []cdx.Property{{Name: "go:version", Value: b.info.GoVersion}}
	for _, s := range b.info.Settings {
		properties = append(properties, cdx.Property{Name: "go:build:" + s.Key, Value: s.Value})
	}
	return cdx.Component{
		BOMRef:     product + "/" + b.name,
		Type:       cdx.ComponentTypeApplication,
		Name:       b.name,
		Version:    version,
		Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: b.sha256}},
		Properties: &properties,
	}
}

// moduleComponents describes the standard library and the modules that are linked in; a replacement
// appears under its own name.
func moduleComponents(info *debug.BuildInfo) []cdx.Component {
	components := []cdx.Component{library(stdlib, strings.TrimPrefix(info.GoVersion, "go"), "")}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		components = append(components, library(m.Path, m.Version, m.Sum))
	}
	return components
}

// library describes a module. It leaves out the go.sum hash, which covers a list of file hashes,
// because CycloneDX hashes cover a file as it is downloaded.
func library(path, version, sum string) cdx.Component {
	purl := "pkg:golang/" + path + "@" + version
	c := cdx.Component{
		BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: path, Version: version,
		Scope: cdx.ScopeRequired, PackageURL: purl,
	}
	if sum != "" {
		c.Properties = &[]cdx.Property{{Name: "go:sum", Value: sum}}
	}
	return c
}
