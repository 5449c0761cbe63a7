//go:build e2e

package e2e_test

import (
	"os"
	"testing"

	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

var check = nodetest.Check
