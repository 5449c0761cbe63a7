// Package netconf parses unwind's configuration and its chain, the runtime's conflists, and CNI
// results.
package netconf

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"
)

// Name is the plugin type of unwind itself. No delegate may have this type.
const Name = "unwind"

// DefaultStateDir is the directory of a node's journal and locks.
const DefaultStateDir = "/var/lib/cni/unwind"

// MaxConfig limits a network configuration, in bytes. The largest in use have a few KiB.
const MaxConfig = 4 << 20

// Conf is unwind's entry in a conflist, as the runtime passes it on stdin.
type Conf struct {
	CNIVersion    string
	Name          string
	Capabilities  map[string]bool
	RuntimeConfig map[string]json.RawMessage
	PrevResult    json.RawMessage
	Injected      map[string]json.RawMessage // keys for the delegates (see InjectedKeys)
	Chain         json.RawMessage
	ChainFile     string
	DisableGC     bool
	Valid         []Attachment               // the list that a GC sent; nil if it sent none
	ValidRaw      map[string]json.RawMessage // Valid as it was received, by key

	StateDir         string
	DelegateTimeout  time.Duration // limit for one delegate's ADD; 0: none
	GracePeriod      time.Duration
	OnDelFailure     string // "report" or "defer"
	OnJournalFailure string // "degrade" or "fail"
	SweepOnStatus    bool
	LogLevel         slog.Level
	LogFile          string
	LogFormat        string   // "text" or "json"
	Warnings         []string // for the log
}

// InjectedKeys are the keys that a runtime or multus writes into every plugin of a list. They are
// meant for the delegates (multus pkg/types: addDeviceIDInConfList, addCNIArgsInConfList).
var InjectedKeys = []string{"args", "deviceID", "pciBusID"}

// ignoredKeys are keys of libcni, which unwind ignores without a warning. A file that unwindctl
// writes contains "plugins", because it is both a plugin's configuration and a list.
var ignoredKeys = []string{"type", "cniVersions", "disableCheck", "loadOnlyInlinedPlugins",
	"plugins"}

// emptyKeys are ignored if their value is empty. libcni's PluginConf adds them when a program
// encodes a configuration, as multus up to 4.3 does for its cluster network.
var emptyKeys = []string{"dns", "ipam"}

// validKeys are the keys under which a runtime sends the list of valid attachments in a GC. The
// second is a mistake in SPEC 1.1, but libcni writes both (cni#1101).
var validKeys = []string{"cni.dev/valid-attachments", "cni.dev/attachments"}

// ParseConf reads unwind's configuration. A key with an invalid value keeps its default, and the
// error names the key. The Conf is usable even with an error, so that an invalid key does not block
// a pod's DEL.
func ParseConf(data []byte) (*Conf, error) {
	c := DefaultConf()
	var errs []error
	if len(data) > MaxConfig {
		errs = append(errs, fmt.Errorf("the configuration is too large: %d bytes; at most %d are allowed",
			len(data), MaxConfig))
	}
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return c, fmt.Errorf("invalid configuration: %w", jsonError(err))
	}
	fields := map[string]func(json.RawMessage) error{
		"cniVersion": into(&c.CNIVersion, "a string"),
		// skel accepts the key "name" in any letter case; unwind uses only the lower-case key.
		"name": field(&c.Name, "a valid network name", func(s string) (string, bool) {
			return s, utils.ValidateNetworkName(s) == nil
		}),
		"capabilities": explained(into(&c.Capabilities,
			`an object with true or false for each capability, such as {"portMappings": true}`),
			notBoolean),
		"runtimeConfig":    into(&c.RuntimeConfig, "an object"),
		"prevResult":       into(&c.PrevResult, "an object"),
		"chain":            into(&c.Chain, "an object"),
		"chainFile":        absolute(&c.ChainFile),
		"disableGC":        into((*Flag)(&c.DisableGC), "true or false"),
		"stateDir":         absolute(&c.StateDir),
		"delegateTimeout":  duration(&c.DelegateTimeout),
		"gracePeriod":      duration(&c.GracePeriod),
		"onDelFailure":     oneOf(&c.OnDelFailure, "report", "defer"),
		"onJournalFailure": oneOf(&c.OnJournalFailure, "degrade", "fail"),
		"sweepOnStatus":    into(&c.SweepOnStatus, "true or false"),
		"logLevel":         field(&c.LogLevel, `"debug", "info", "warn" or "error"`, level),
		"logFile":          absolute(&c.LogFile),
		"logFormat":        oneOf(&c.LogFormat, "text", "json"),
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		var err error
		value, field := keys[key], fields[key]
		switch {
		case field != nil:
			err = field(value)
		case slices.Contains(validKeys, key):
			err = c.takeValid(key, value)
		case slices.Contains(InjectedKeys, key):
			if string(value) != "null" {
				c.Injected[key] = value
			}
		case !slices.Contains(ignoredKeys, key) &&
			!(slices.Contains(emptyKeys, key) && string(value) == "{}"):
			c.Warn("unknown key %q has no effect; keys for a plugin belong in its entry of the chain", key)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("key %q: %w", key, err))
		}
	}
	if c.Name == "" && len(errs) == 0 {
		errs = append(errs, errors.New(`key "name" is missing`))
	}
	return c, errors.Join(errs...)
}

func DefaultConf() *Conf {
	return &Conf{
		StateDir: DefaultStateDir, GracePeriod: 10 * time.Minute,
		OnDelFailure: "report", OnJournalFailure: "degrade",
		SweepOnStatus: true, LogLevel: slog.LevelInfo, LogFormat: "text",
		Injected: map[string]json.RawMessage{}, ValidRaw: map[string]json.RawMessage{},
	}
}

// Observes reports whether the configuration forbids every sweep, as it does after "unwindctl
// install --observe". With such a configuration, an ADD or a DEL undoes only its own attachment.
func (c *Conf) Observes() bool { return c.DisableGC && !c.SweepOnStatus }

func (c *Conf) Warn(format string, args ...any) {
	c.Warnings = append(c.Warnings, fmt.Sprintf(format, args...))
}

// field returns a function that decodes a value into *to. If the value has another type, or convert
// rejects it, the function returns an error and leaves *to unchanged. As in libcni, null means
// absent.
func field[J, T any](
	to *T, want string, convert func(J) (T, bool),
) func(json.RawMessage) error {
	return func(value json.RawMessage) error {
		if string(value) == "null" {
			return nil
		}
		var decoded J
		if json.Unmarshal(value, &decoded) == nil {
			if v, ok := convert(decoded); ok {
				*to = v
				return nil
			}
		}
		return fmt.Errorf("%s is not %s", excerpt(value), want)
	}
}

func into[T any](to *T, want string) func(json.RawMessage) error {
	return field(to, want, func(v T) (T, bool) { return v, true })
}

// explained returns a function that decodes a value as read does. If read fails, but the value has
// the type J, explain may return an error that says more, or nil.
func explained[J any](
	read func(json.RawMessage) error, explain func(J) error,
) func(json.RawMessage) error {
	return func(value json.RawMessage) error {
		err := read(value)
		var decoded J
		if err == nil || json.Unmarshal(value, &decoded) != nil {
			return err
		}
		return cmp.Or(explain(decoded), err)
	}
}

// notBoolean names the first capability whose value is not a boolean.
func notBoolean(capabilities map[string]json.RawMessage) error {
	for _, name := range slices.Sorted(maps.Keys(capabilities)) {
		if json.Unmarshal(capabilities[name], new(bool)) != nil {
			return fmt.Errorf("%q must be true or false", Shorten(name, 40))
		}
	}
	return nil
}

// takeValid reads the list of valid attachments in a GC. null means no list: ocicni sends null for
// networks that have no pods in its request.
func (c *Conf) takeValid(key string, value json.RawMessage) error {
	if string(value) == "null" {
		return nil
	}
	valid, err := ParseValid(value)
	if err != nil {
		return err
	}
	c.ValidRaw[key] = value
	c.Valid = append(valid, c.Valid...) // an attachment on either key's list is kept
	return nil
}

// ParseValid reads a list of attachments in the format of a runtime's GC. An empty list is not nil.
func ParseValid(data []byte) ([]Attachment, error) {
	const want = `expected a JSON list of {"containerID": "…", "ifname": "…"}`
	valid, data := []Attachment{}, bytes.TrimSpace(data)
	switch err := json.Unmarshal(data, &valid); {
	case len(data) == 0:
		return nil, errors.New(want + "; the input is empty")
	case err != nil:
		return nil, fmt.Errorf("%s: %w", want, jsonError(err))
	case valid == nil:
		return nil, errors.New(want + ", not null")
	}
	for i, a := range valid {
		if a.ContainerID == "" || a.IfName == "" {
			return nil, fmt.Errorf(`element %d lacks "containerID" or "ifname"`, i)
		}
	}
	return valid, nil
}

func absolute(to *string) func(json.RawMessage) error {
	return field(to, "an absolute path", func(s string) (string, bool) {
		return filepath.Clean(s), filepath.IsAbs(s) && !strings.ContainsRune(s, 0)
	})
}

func duration(to *time.Duration) func(json.RawMessage) error {
	parse := func(s string) (time.Duration, bool) {
		d, err := time.ParseDuration(s)
		return d, err == nil && d >= 0
	}
	return explained(field(to, `a duration such as "30s" or "10m"`, parse), notDuration)
}

// notDuration says why ParseDuration rejects a text, or accepts it as a negative duration. The text
// is well-formed if ParseDuration accepts it once all its digits are 0.
func notDuration(s string) error {
	zeros := strings.Map(func(r rune) rune {
		if '0' <= r && r <= '9' {
			return '0'
		}
		return r
	}, s)
	parses := func(s string) bool {
		_, err := time.ParseDuration(s)
		return err == nil
	}
	why := `has no unit; write, for example, "30s" or "10m"`
	switch {
	case parses(zeros) && strings.HasPrefix(s, "-"):
		why = "is negative"
	case parses(zeros):
		why = "is too long; write at most 2562047h"
	case !parses(zeros + "s"):
		return nil
	}
	return fmt.Errorf("%q %s", Shorten(s, 40), why)
}

func oneOf(to *string, allowed ...string) func(json.RawMessage) error {
	return field(to, `"`+strings.Join(allowed, `" or "`)+`"`, func(s string) (string, bool) {
		return s, slices.Contains(allowed, s)
	})
}

func level(s string) (slog.Level, bool) {
	l, ok := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo,
		"warn": slog.LevelWarn, "error": slog.LevelError}[s]
	return l, ok
}

// excerpt describes a value in an error message: a short scalar unchanged, and any other value,
// which may contain secrets, by its kind.
func excerpt(value json.RawMessage) string {
	switch {
	case len(value) == 0:
		return "nothing"
	case value[0] == '{':
		return "an object"
	case value[0] == '[':
		return "a list"
	case len(value) > 40:
		return fmt.Sprintf("a value of %d bytes", len(value))
	}
	return string(value)
}

// Attachment names an attachment within a network, as a runtime lists it (SPEC 1.1 §2 GC).
type Attachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// NeverAdded reports whether the runtime sent no prevResult with its DEL, and so has no ADD result.
// It returns false for a version before 0.4.0, because no DEL of such a version has a prevResult.
func (c *Conf) NeverAdded() bool {
	gives, err := version.GreaterThanOrEqualTo(c.CNIVersion, "0.4.0")
	return err == nil && gives && c.PrevResult == nil
}
