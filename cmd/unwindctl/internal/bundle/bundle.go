// Package bundle collects files for a bug report, without secrets.
package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Bundle is a list of files. Add the configurations first: their secrets are then replaced in all
// files that are added later, for example in plugins' errors.
type Bundle struct {
	Files   []File
	secrets []string
}

type File struct {
	Name string
	Data []byte
}

// Redacted replaces secrets.
const Redacted = "REDACTED"

var (
	secretKey = regexp.MustCompile(
		`(?i)token|passw|secret|key|kubeconfig|cert|credential|private|auth`)
	fileKey    = regexp.MustCompile(`(?i)(file|path|dir|kubeconfig)$`)
	secretText = regexp.MustCompile(`-----BEGIN [\s\S]*?(-----END [^-]*-----|$)|` + // PEM
		`\beyJ[\w-]+\.[\w-]+\.[\w-]*|` + // a JSON web token
		`\b\w+://[^/\s"@]+@`) // the user and the password in a URL
)

// Add adds a text file, and replaces the secrets that it recognizes.
func (b *Bundle) Add(name string, data []byte) {
	for _, secret := range b.secrets {
		data = bytes.ReplaceAll(data, []byte(secret), []byte(Redacted))
	}
	data = secretText.ReplaceAllLiteral(data, []byte(Redacted))
	b.Files = append(b.Files, File{strings.TrimPrefix(path.Clean(name), "/"), data})
}

// AddJSON adds a JSON file. It replaces the value of each key whose name suggests a secret, such as
// "password". It rejects invalid JSON.
func (b *Bundle) AddJSON(name string, data []byte) error {
	var value any
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	err := d.Decode(&value)
	if err == nil {
		data, err = json.MarshalIndent(b.redact("", value), "", "  ")
	}
	if err != nil {
		return errors.New("left out: it is not valid JSON, so secrets in it cannot be redacted")
	}
	b.Add(name, append(data, '\n'))
	return nil
}

// redact replaces the secrets in the value of a JSON key. It keeps the path of a secret file.
func (b *Bundle) redact(key string, value any) any {
	switch v := value.(type) {
	case map[string]any:
		named, _ := v["name"].(string) // an environment variable, as {"name": …, "value": …}
		for name := range v {
			inner := name
			if secretKey.MatchString(key) {
				inner = key
			}
			if name == "value" && secretKey.MatchString(named) {
				inner = named
			}
			v[name] = b.redact(inner, v[name])
		}
		return v
	case []any:
		if len(v) == 2 { // a name and a value of CNI_ARGS, in libcni's cache
			if name, ok := v[0].(string); ok {
				return []any{name, b.redact(name, v[1])}
			}
		}
		for i := range v {
			v[i] = b.redact(key, v[i])
		}
		return v
	case string:
		if strings.ContainsAny(v, "\n{") && secretKey.MatchString(v) || secretKey.MatchString(key) &&
			!(fileKey.MatchString(key) && filepath.IsAbs(v)) {
			return b.secret(v)
		}
	case json.Number:
		if secretKey.MatchString(key) {
			return b.secret(v.String())
		}
	}
	return value
}

// secret returns the replacement of a secret. It also makes Add replace this secret in later files,
// unless the secret is so short that it may be a common word.
func (b *Bundle) secret(text string) string {
	if len(text) >= 6 && !slices.Contains(b.secrets, text) {
		b.secrets = append(b.secrets, text)
	}
	return Redacted
}

// Write writes a compressed archive, with all files in one directory.
func (b *Bundle) Write(to io.Writer, dir string, at time.Time) error {
	zipped := gzip.NewWriter(to)
	archive := tar.NewWriter(zipped)
	for _, f := range b.Files {
		err := archive.WriteHeader(&tar.Header{Name: path.Join(dir, f.Name), Mode: 0o600,
			Size: int64(len(f.Data)), ModTime: at, Typeflag: tar.TypeReg})
		if err == nil {
			_, err = archive.Write(f.Data)
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(archive.Close(), zipped.Close())
}
