package plugin

import (
	"fmt"
	"strings"
	"testing"
)

// TestHangingChainsHoldNobodyUp: beside 16 pods whose delegate hangs, in ADD or in DEL, another pod's
// verbs wait for nothing.
func TestHangingChainsHoldNobodyUp(t *testing.T) {
	of16 := func(statement string) (script string) {
		for i := range 16 {
			script += fmt.Sprintf("; %s hanging%02d", statement, i)
		}
		return strings.TrimPrefix(script, "; ")
	}
	stories(t, `
	chain p0; let held $dir/faulty/held
	either ADD: let verb add; let command ADD
	or DEL: let verb del; let command DEL; crowd 16 hanging
	plan pod:hanging $command hold
	`+of16("start $verb")+`
	appears $held/$command.hanging15.p0; clock; add other; del other; within 10s
	plan; shell 'rm $held/*'
	`+of16("wait $verb")+`
	`+of16("del"))
}
