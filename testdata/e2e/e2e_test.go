//go:build e2e

package e2e_test

import (
	"os"
	"testing"

	"cni-unwind/testdata/nodetest"
	"cni-unwind/testdata/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

var check = nodetest.Check
