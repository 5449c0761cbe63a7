package netconf

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// defaults returns the Conf of a configuration that sets none of unwind's keys.
func defaults() *Conf {
	return &Conf{
		CNIVersion: "1.0.0", Name: "podnet", StateDir: "/var/lib/cni/unwind", GracePeriod: 10 * time.Minute,
		OnDelFailure: "report", OnJournalFailure: "degrade",
		SweepOnStatus: true, LogFormat: "text", Injected: map[string]json.RawMessage{}, ValidRaw: map[string]json.RawMessage{},
	}
}

// parse parses a configuration with the given keys and the keys that every configuration needs.
func parse(keys string) (*Conf, error) {
	if keys != "" {
		keys = ", " + keys
	}
	return ParseConf([]byte(`{"cniVersion": "1.0.0", "name": "podnet", "type": "unwind"` + keys + `}`))
}

func TestParseConf(t *testing.T) {
	for _, tt := range []struct {
		name, keys string
		want       func(*Conf)
	}{
		{"nothing", ``, func(*Conf) {}},
		{"every key", `"capabilities": {"portMappings": true, "ips": false}, "runtimeConfig": {"ips": ["10.0.0.1"]},
			"prevResult": {}, "chain": {"plugins": []}, "chainFile": "/etc/cni//x.conflist", "stateDir": "/run/unwind/",
			"delegateTimeout": "30s", "gracePeriod": "0s", "onDelFailure": "defer", "onJournalFailure": "fail",
			"sweepOnStatus": false, "logLevel": "warn",
			"logFile": "/var/log/unwind.log", "logFormat": "json"`,
			func(c *Conf) {
				c.Capabilities = map[string]bool{"portMappings": true, "ips": false}
				c.RuntimeConfig = map[string]json.RawMessage{"ips": json.RawMessage(`["10.0.0.1"]`)}
				c.PrevResult, c.Chain = json.RawMessage(`{}`), json.RawMessage(`{"plugins": []}`)
				c.ChainFile, c.StateDir, c.LogFile = "/etc/cni/x.conflist", "/run/unwind", "/var/log/unwind.log"
				c.DelegateTimeout, c.GracePeriod, c.LogLevel = 30*time.Second, 0, slog.LevelWarn
				c.OnDelFailure, c.OnJournalFailure = "defer", "fail"
				c.SweepOnStatus = false
				c.LogFormat = "json"
			}},
		{"keys of libcni", `"cniVersions": ["1.1.0"], "disableCheck": true, "disableGC": true, "loadOnlyInlinedPlugins": true,
			"cni.dev/valid-attachments": [], "cni.dev/attachments": null`,
			func(c *Conf) {
				c.DisableGC, c.Valid = true, []Attachment{}
				c.ValidRaw[validKeys[0]] = json.RawMessage(`[]`)
			}},
		{"keys of multus", `"args": {"cni": {"ips": "10.0.0.1"}}, "deviceID": "0000:01:02.3", "pciBusID": null`,
			func(c *Conf) {
				c.Injected["args"] = json.RawMessage(`{"cni": {"ips": "10.0.0.1"}}`)
				c.Injected["deviceID"] = json.RawMessage(`"0000:01:02.3"`)
			}},
		{"empty keys that libcni's PluginConf adds", `"ipam": {}, "dns": {}`, func(*Conf) {}},
		{"unknown keys are warnings", `"stateDIR": "/x", "ipam": {"type": "s3cret"}`, func(c *Conf) {
			for _, key := range []string{"ipam", "stateDIR"} {
				c.Warnings = append(c.Warnings, fmt.Sprintf("unknown key %q has no effect; "+
					"keys for a plugin belong in its entry of the chain", key))
			}
		}},
		{"a key twice: the last counts", `"gracePeriod": "1s", "gracePeriod": "2s"`, func(c *Conf) { c.GracePeriod = 2 * time.Second }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parse(tt.keys)
			if err != nil {
				t.Fatal(err)
			}
			want := defaults()
			tt.want(want)
			if diff := cmp.Diff(want, got, cmp.AllowUnexported(Conf{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseConfErrors(t *testing.T) {
	for _, tt := range []struct{ name, keys, want string }{
		{"relative path", `"stateDir": "run/unwind"`, `key "stateDir": "run/unwind" is not an absolute path`},
		{"a negative duration", `"delegateTimeout": "-1s"`, `key "delegateTimeout": "-1s" is negative`},
		{"a long negative duration", `"delegateTimeout": "-9999999h"`, `key "delegateTimeout": "-9999999h" is negative`},
		{"a duration that is too long", `"gracePeriod": "9999999h"`, `key "gracePeriod": "9999999h" is too long; write at most 2562047h`},
		{"too long in its sum", `"gracePeriod": "2562047h48m"`, `key "gracePeriod": "2562047h48m" is too long; write at most 2562047h`},
		{"a duration without a unit", `"gracePeriod": "30"`, `key "gracePeriod": "30" has no unit; write, for example, "30s" or "10m"`},
		{"a last number without a unit", `"gracePeriod": "10m30"`, `key "gracePeriod": "10m30" has no unit; write, for example, "30s" or "10m"`},
		{"a number", `"gracePeriod": 30`, `key "gracePeriod": 30 is not a duration such as "30s" or "10m"`},
		{"no duration", `"gracePeriod": "s"`, `key "gracePeriod": "s" is not a duration such as "30s" or "10m"`},
		{"a comma", `"gracePeriod": "1,5h"`, `key "gracePeriod": "1,5h" is not a duration such as "30s" or "10m"`},
		{"a capitalized value", `"onDelFailure": "Report"`, `key "onDelFailure": "Report" is not "report" or "defer"`},
		{"a log level in upper case", `"logLevel": "INFO"`, `key "logLevel": "INFO" is not "debug", "info", "warn" or "error"`},
		{"a capability that is a string", `"capabilities": {"portMappings": "yes"}`,
			`key "capabilities": "portMappings" must be true or false`},
		{"several such capabilities", `"capabilities": {"ips": "true", "bandwidth": {"s3cret": 1}, "mac": true}`,
			`key "capabilities": "bandwidth" must be true or false`},
		{"no object of capabilities", `"capabilities": ["ips"]`,
			`key "capabilities": a list is not an object with true or false for each capability, such as {"portMappings": true}`},
		{"no name", `"name": null, "NAME": "podnet"`, `key "name" is missing`},
		{"a name that is a path", `"name": "../../etc"`, `key "name": "../../etc" is not a valid network name`},
		{"several errors", `"stateDir": 1, "gracePeriod": [], "logLevel": {}`,
			`key "gracePeriod": a list is not a duration such as "30s" or "10m"` + "\n" +
				`key "logLevel": an object is not "debug", "info", "warn" or "error"` + "\n" +
				`key "stateDir": 1 is not an absolute path`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := parse(tt.keys); fmt.Sprint(err) != tt.want {
				t.Errorf("\ngot  %v\nwant %s", err, tt.want)
			}
		})
	}
	for data, want := range map[string]string{
		`{"name": "s3cret`: `invalid configuration: not valid JSON: unexpected end of JSON input`,
		`["s3cret"]`:       `invalid configuration: a list, not an object`,
	} {
		if _, err := ParseConf([]byte(data)); fmt.Sprint(err) != want {
			t.Errorf("\ngot  %v\nwant %s", err, want)
		}
	}
}

// TestWrongTypes gives each of unwind's keys a value of each wrong type. The error names the key
// and does not contain the value, which may be a secret. The key keeps its default, so that a DEL
// can still run.
func TestWrongTypes(t *testing.T) {
	kinds := map[string]string{
		"an object": `{"password": "s3cret"}`, "a list": `["s3cret"]`, "a number": `12345`, "a bool": `true`,
		"a string": `"s3"`, "JSON in a string": `"{\"plugins\": [{\"type\": \"x\", \"password\": \"s3cret\"}]}"`,
	}
	right := map[string][]string{
		"capabilities": {}, "runtimeConfig": {"an object"}, "sweepOnStatus": {"a bool"}, "name": {"a string"},
		"cniVersion": {"a string", "JSON in a string"}, // skel rejects JSON in a string
		"chainFile":  {}, "stateDir": {}, "delegateTimeout": {}, "gracePeriod": {}, "onDelFailure": {}, "onJournalFailure": {},
		"logLevel": {}, "logFile": {}, "logFormat": {},
	}
	for key, allowed := range right {
		for kind, value := range kinds {
			if slices.Contains(allowed, kind) {
				continue
			}
			t.Run(key+" is "+kind, func(t *testing.T) {
				got, err := parse(fmt.Sprintf("%q: %s", key, value))
				if err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("key %q: ", key)) {
					t.Errorf("got error %v, want one that names the key", err)
				}
				if err != nil && (strings.Contains(err.Error(), "s3cret") || len(err.Error()) > 200) {
					t.Errorf("the error contains the value: %v", err)
				}
				wantDefault(t, key, got)
			})
		}
		t.Run(key+" is null", func(t *testing.T) {
			got, err := parse(fmt.Sprintf("%q: null", key))
			if (err != nil) != (key == "name") {
				t.Errorf("got error %v", err)
			}
			wantDefault(t, key, got)
		})
	}
}

// wantDefault checks that every key has its default after one key had a wrong value or null.
func wantDefault(t *testing.T, key string, got *Conf) {
	t.Helper()
	want := defaults()
	switch key { // parse also sets these two keys, but in JSON, the last of two equal keys counts
	case "name":
		want.Name = ""
	case "cniVersion":
		want.CNIVersion = ""
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(Conf{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func FuzzParseConf(f *testing.F) {
	f.Add([]byte(`{"cniVersion": "1.0.0", "name": "podnet", "type": "unwind", "chain": {"plugins": [{"type": "bridge"}]}}`))
	f.Add([]byte(`{"name": "podnet", "stateDir": "x", "gracePeriod": "1h", "logLevel": "debug", "args": {}, "what": 1e400}`))
	f.Add([]byte(`{"capabilities": {"a": true}, "runtimeConfig": {"a": [1]}, "prevResult": {"ips": []}, "chainFile": "/a"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseConf(data)
		again, errAgain := ParseConf(data)
		if diff := cmp.Diff(c, again, cmp.AllowUnexported(Conf{})); diff != "" || fmt.Sprint(err) != fmt.Sprint(errAgain) {
			t.Errorf("parsing twice gave different results: %v, %v\n%s", err, errAgain, diff)
		}
		for _, path := range []string{c.StateDir, c.ChainFile, c.LogFile} {
			if path != "" && (path[0] != '/' || strings.ContainsRune(path, 0)) {
				t.Errorf("path %q", path)
			}
		}
		if strings.ContainsAny(c.Name, "/\x00") || c.Name == "" && err == nil || c.StateDir == "" || c.GracePeriod < 0 || c.DelegateTimeout < 0 {
			t.Errorf("%+v", c)
		}
	})
}
