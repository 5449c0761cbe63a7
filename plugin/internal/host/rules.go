package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// rulesTime is the timeout of each program that prints rules. A node with many services has about
// ten thousand.
const rulesTime = 3 * time.Second

// Rules returns all rules and chains of iptables and nftables, one per line. It skips a missing
// program, because a delegate has the same PATH and could not create rules with it either. It is an
// error if all are missing.
func Rules(ctx context.Context) ([]string, error) {
	var rules []string
	found := false
	for _, program := range [][]string{
		{"iptables-save"}, {"ip6tables-save"}, {"nft", "list", "ruleset"},
	} {
		lines, err := Printed(ctx, program...)
		if errors.Is(err, exec.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		rules, found = append(rules, lines...), true
	}
	if !found {
		return nil, errors.New("cannot list firewall rules: neither iptables-save nor nft is in PATH")
	}
	return rules, nil
}

// Printed runs a program and returns the lines of its standard output.
func Printed(ctx context.Context, program ...string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, rulesTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, program[0], program[1:]...)
	cmd.WaitDelay = time.Second / 2
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program[0], err)
	}
	return slices.Collect(strings.Lines(string(bytes.TrimSpace(out)))), nil
}
