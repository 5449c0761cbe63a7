package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/utils"
)

// Name is the type under which unwind is installed, and that no delegate may have.
const Name = "unwind"

// DefaultStateDir holds the journal and the locks of a node.
const DefaultStateDir = "/var/lib/cni/unwind"

// maxConfig bounds a network configuration, in bytes. The largest seen in the field are a few KiB.
const maxConfig = 4 << 20

// Conf is the entry of unwind in a conflist, as the runtime gives it on stdin.
type Conf struct {
	CNIVersion    string
	Name          string
	Capabilities  map[string]bool
	RuntimeConfig map[string]json.RawMessage
	PrevResult    json.RawMessage
	Injected      map[string]json.RawMessage // keys for the delegates, see injectedKeys
	Chain         json.RawMessage
	ChainFile     string
	DisableGC     bool
	Valid         []Attachment               // of a GC; nil if the runtime gave no list
	ValidRaw      map[string]json.RawMessage // the same under the keys it was given with

	StateDir           string
	DelegateTimeout    time.Duration // of one delegate's ADD; 0: the runtime's deadline rules
	GracePeriod        time.Duration
	OnDelFailure       string // report, defer
	OnJournalFailure   string // degrade, fail
	OnDuplicateAddress string // fail, warn
	StatusOnPoolFull   string // ok, fail
	SweepOnStatus      bool
	LogLevel           slog.Level
	LogFile            string
	warnings           []string
}

// injectedKeys are those that a runtime or multus writes into every plugin of a list; they are meant for the delegates
// (multus pkg/types: addDeviceIDInConfList, addCNIArgsInConfList).
var injectedKeys = []string{"args", "deviceID", "pciBusID"}

// ignoredKeys need nothing done: those of libcni, and FoldedKey.
var ignoredKeys = []string{"type", "cniVersions", "disableCheck", "loadOnlyInlinedPlugins", FoldedKey}

// FoldedKey has the number of plugins at the end of "chain" that are not the original's: unwindctl wrap took them from the
// folder of the network's name, and unwindctl unwrap takes them out.
const FoldedKey = "folded"

// validKeys are those under which a runtime gives the list of a GC. The second is a slip in the text of SPEC 1.1 that libcni
// writes too (cni#1101).
var validKeys = []string{"cni.dev/valid-attachments", "cni.dev/attachments"}

// ParseConf reads unwind's configuration. Every key that is wrong gives an error that names it, and keeps its default:
// the Conf is usable also with an error, so that a broken configuration does not stand between a pod and its DEL.
func ParseConf(data []byte) (*Conf, error) {
	c := defaultConf()
	var errs []error
	if len(data) > maxConfig {
		errs = append(errs, fmt.Errorf("the configuration has %d bytes, more than %d", len(data), maxConfig))
	}
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return c, fmt.Errorf("the configuration: %w", jsonError(err))
	}
	fields := map[string]func(json.RawMessage) error{
		"cniVersion":            into(&c.CNIVersion, "a string"),
		"name":                  networkName(&c.Name),
		"capabilities":          into(&c.Capabilities, `a set of names with true or false, such as {"portMappings": true}`),
		"runtimeConfig":         into(&c.RuntimeConfig, "an object"),
		"prevResult":            into(&c.PrevResult, "an object"),
		"chain":                 into(&c.Chain, "an object"),
		"chainFile":             absolute(&c.ChainFile),
		"disableGC":             into((*flag)(&c.DisableGC), "true or false"),
		"stateDir":              absolute(&c.StateDir),
		"delegateTimeout":       duration(&c.DelegateTimeout),
		"gracePeriod":           duration(&c.GracePeriod),
		"onDelFailure":          oneOf(&c.OnDelFailure, "report", "defer"),
		"onJournalFailure":      oneOf(&c.OnJournalFailure, "degrade", "fail"),
		"onDuplicateAddress":    oneOf(&c.OnDuplicateAddress, "fail", "warn"),
		"statusOnPoolExhausted": oneOf(&c.StatusOnPoolFull, "ok", "fail"),
		"sweepOnStatus":         into(&c.SweepOnStatus, "true or false"),
		"logLevel":              level(&c.LogLevel),
		"logFile":               absolute(&c.LogFile),
	}
	for _, key := range sortedKeys(keys) {
		value := keys[key]
		field := fields[key]
		switch {
		case field != nil:
			if err := field(value); err != nil {
				errs = append(errs, fmt.Errorf("key %q: %w", key, err))
			}
		case slices.Contains(validKeys, key):
			if err := c.takeValid(key, value); err != nil {
				errs = append(errs, fmt.Errorf("key %q: %w", key, err))
			}
		case slices.Contains(injectedKeys, key):
			if string(value) != "null" {
				c.Injected[key] = value
			}
		case !slices.Contains(ignoredKeys, key):
			c.warn("key %q is not known to unwind and has no effect; a key for a delegate belongs into the chain", key)
		}
	}
	if c.Name == "" && len(errs) == 0 {
		errs = append(errs, errors.New(`key "name" is missing`))
	}
	return c, errors.Join(errs...)
}

func defaultConf() *Conf {
	return &Conf{
		StateDir: DefaultStateDir, GracePeriod: 10 * time.Minute, OnDelFailure: "report", OnJournalFailure: "degrade",
		OnDuplicateAddress: "fail", StatusOnPoolFull: "ok", SweepOnStatus: true, LogLevel: slog.LevelInfo,
		Injected: map[string]json.RawMessage{}, ValidRaw: map[string]json.RawMessage{},
	}
}

// observes says whether nothing is to be swept, as in the first week: what only helps others is left too.
func (c *Conf) observes() bool { return c.DisableGC && !c.SweepOnStatus }

// Warnings says which keys have no effect.
func (c *Conf) Warnings() []string { return c.warnings }

func (c *Conf) warn(format string, args ...any) {
	c.warnings = append(c.warnings, fmt.Sprintf(format, args...))
}

// sortedKeys makes errors and warnings come in the same order each time.
func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// into decodes a value into *to, which it leaves alone if the value has another type. null is as absent, as libcni has it.
func into[T any](to *T, want string) func(json.RawMessage) error {
	return func(value json.RawMessage) error {
		if string(value) == "null" {
			return nil
		}
		var v T
		if err := json.Unmarshal(value, &v); err != nil {
			return fmt.Errorf("%s is not %s", excerpt(value), want)
		}
		*to = v
		return nil
	}
}

// check decodes a string and accepts it if convert does.
func check[T any](to *T, want string, convert func(string) (T, bool)) func(json.RawMessage) error {
	return func(value json.RawMessage) error {
		var s string
		if err := into(&s, want)(value); err != nil || string(value) == "null" {
			return err
		}
		v, ok := convert(s)
		if !ok {
			return fmt.Errorf("%s is not %s", excerpt(value), want)
		}
		*to = v
		return nil
	}
}

// takeValid takes the list of a GC. null is no list: ocicni sends it for networks that no pod it was asked about uses.
func (c *Conf) takeValid(key string, value json.RawMessage) error {
	if string(value) == "null" {
		return nil
	}
	valid, err := ParseValid(value)
	if err != nil {
		return err
	}
	c.ValidRaw[key] = value
	c.Valid = append(valid, c.Valid...) // under whichever key: a list can only add reasons to keep
	return nil
}

// ParseValid reads a list of attachments as a runtime gives it to a GC: [{"containerID": "…", "ifname": "…"}, …]. An empty
// one is not nil.
func ParseValid(data []byte) ([]Attachment, error) {
	valid := []Attachment{}
	if err := json.Unmarshal(data, &valid); err != nil || valid == nil {
		return nil, fmt.Errorf(`%s is not a list of {"containerID": "…", "ifname": "…"}`, excerpt(bytes.TrimSpace(data)))
	}
	for i, a := range valid {
		if a.ContainerID == "" || a.IfName == "" {
			return nil, fmt.Errorf(`element %d has no "containerID" or no "ifname"`, i)
		}
	}
	return valid, nil
}

// networkName accepts what can be part of a path, as skel does: it does so by a key of any case, and this is the one we use.
func networkName(to *string) func(json.RawMessage) error {
	return check(to, "the name of a network", func(s string) (string, bool) {
		return s, utils.ValidateNetworkName(s) == nil
	})
}

func absolute(to *string) func(json.RawMessage) error {
	return check(to, "an absolute path", func(s string) (string, bool) {
		return filepath.Clean(s), filepath.IsAbs(s) && !strings.ContainsRune(s, 0)
	})
}

func duration(to *time.Duration) func(json.RawMessage) error {
	return check(to, `a duration such as "30s" or "10m"`, func(s string) (time.Duration, bool) {
		d, err := time.ParseDuration(s)
		return d, err == nil && d >= 0
	})
}

func oneOf(to *string, allowed ...string) func(json.RawMessage) error {
	return check(to, `"`+strings.Join(allowed, `" or "`)+`"`, func(s string) (string, bool) {
		return s, slices.Contains(allowed, s)
	})
}

func level(to *slog.Level) func(json.RawMessage) error {
	return check(to, `"debug", "info", "warn" or "error"`, func(s string) (slog.Level, bool) {
		var l slog.Level
		err := l.UnmarshalText([]byte(s))
		return l, err == nil && slices.Contains([]string{"debug", "info", "warn", "error"}, s)
	})
}

// excerpt returns a short scalar for an error message, and of anything else what it is: it may hold secrets.
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
