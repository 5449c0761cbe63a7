package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"go.yaml.in/yaml/v3"

	"cni-unwind/plugin/plugintest/nodetest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"kubectl-unwind": main})
}

// TestScript runs the scripts of testdata/kubectl, with the fake kubectl in that directory.
func TestScript(t *testing.T) {
	dir, err := filepath.Abs("../../testdata/kubectl")
	nodetest.Check(t, err)
	testscript.Run(t, testscript.Params{
		Dir:                 dir,
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", strings.Join([]string{dir, env.Getenv("PATH")}, ":"))
			env.Setenv("CLUSTER", filepath.Join(env.WorkDir, "cluster"))
			env.Setenv("USER", "ann")
			return nil
		},
	})
}

// TestSupported: kubectl-unwind expects agents on the nodes on which the DaemonSet runs them.
func TestSupported(t *testing.T) {
	data, err := os.ReadFile("../../scripts/deploy/daemonset.yaml")
	nodetest.Check(t, err)
	var daemonSet struct {
		Spec struct{ Template struct{ Spec podSpec } }
	}
	_, data, _ = bytes.Cut(data, []byte("\n---\n"))
	nodetest.Check(t, yaml.Unmarshal(data, &daemonSet))
	spec := daemonSet.Spec.Template.Spec
	var labels []string
	for key, value := range spec.NodeSelector {
		labels = append(labels, key+"="+value)
	}
	for _, term := range spec.Affinity.NodeAffinity.Required.NodeSelectorTerms {
		for _, e := range term.MatchExpressions {
			switch values := strings.Join(e.Values, ","); e.Operator {
			case "In":
				labels = append(labels, e.Key+" in ("+values+")")
			case "NotIn":
				labels = append(labels, e.Key+"!="+values)
			default:
				t.Errorf("%+v", e)
			}
		}
	}
	if want := strings.Join(labels, ","); supported != want {
		t.Errorf("got  %s\nwant %s", supported, want)
	}
}

// podSpec contains the fields of a pod that select its node.
type podSpec struct {
	NodeSelector map[string]string `yaml:"nodeSelector"`
	Affinity     struct {
		NodeAffinity struct {
			Required struct {
				NodeSelectorTerms []struct {
					MatchExpressions []struct {
						Key, Operator string
						Values        []string
					} `yaml:"matchExpressions"`
				} `yaml:"nodeSelectorTerms"`
			} `yaml:"requiredDuringSchedulingIgnoredDuringExecution"`
		} `yaml:"nodeAffinity"`
	}
}
