package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

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
