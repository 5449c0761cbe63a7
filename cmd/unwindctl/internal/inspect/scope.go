package inspect

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/cmd/unwindctl/internal/pools"
	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// Scope holds the flags that select a command's attachments, pools and list of pods.
type Scope struct {
	node.Directories
	Network    string   // "" for all
	CRI, Valid string   // the source of the list of attachments: see List
	Force      bool     // accept an empty list from Valid; also sets sweep.Options.Force
	Ours       bool     // only the pools of chains that unwind runs
	Sockets    []string // the sockets that --cri auto tries besides the known ones
	Earlier    *Report  // use the list of this report; nil to query the runtime
}

// List returns the list of attachments from the runtime or from Valid, or nil if the flags ask for
// no list. An error other than a UsageError means that no runtime was found, or that a runtime
// returned no list. With any error, List returns nil, because an empty list would mean that there
// are no attachments.
func (s Scope) List(ctx context.Context, stdin io.Reader) (*facts.List, error) {
	switch {
	case s.Valid != "" && s.CRI != "" && s.CRI != "auto":
		return nil, term.Usage("--cri and --valid-attachments are mutually exclusive")
	case s.Valid != "" && s.Network == "":
		return nil, term.Usage("--valid-attachments needs --network: a list covers one network")
	case s.Valid != "":
		return s.readValid(stdin)
	case s.CRI == "auto":
		return node.FindPodSandboxes(ctx, slices.Concat(node.CRISockets, s.Sockets))
	case s.CRI != "" && s.CRI != "none":
		return node.PodSandboxes(ctx, s.CRI)
	}
	return nil, nil
}

// ListFlags returns the flags that select the scope's network and list, with a leading blank.
func (s Scope) ListFlags() (flags string) {
	if s.Network != "" {
		flags = " --network " + s.Network
	}
	switch {
	case s.Valid != "":
		flags += " --valid-attachments " + s.Valid
	case s.CRI != "" && s.CRI != "auto" && s.CRI != "none":
		flags += " --cri " + s.CRI
	}
	return flags
}

// readValid reads the list from Valid. Without Force, it refuses an empty list: the script that
// wrote it has probably failed, and a sweep would release every attachment that has no process.
func (s Scope) readValid(stdin io.Reader) (*facts.List, error) {
	if s.Valid != "-" {
		f, err := os.Open(s.Valid)
		if err != nil {
			return nil, term.Usage("--valid-attachments: %w", err)
		}
		defer f.Close()
		stdin = f
	}
	data, err := netconf.ReadAll(stdin)
	var valid []netconf.Attachment
	if err == nil {
		valid, err = netconf.ParseValid(data)
	}
	if err != nil {
		return nil, term.Usage("--valid-attachments %s: %w", s.Valid, err)
	}
	if len(valid) == 0 && !s.Force {
		return nil, term.WithHint("if network "+s.Network+" really has no attachment, run unwindctl "+
			"sweep"+s.ListFlags()+" --force", "%w", term.Usage("--valid-attachments %s: the list is "+
			"empty, but a node usually runs a pod; nothing is released without --force", s.Valid))
	}
	return facts.NewList(s.Network, valid), nil
}

// Unwritable returns why unwind's plugin, which runs as root, cannot write to its journal, or nil.
// If this process is not root, Unwritable ignores a missing permission, because root may have it.
func Unwritable(stateDir string) error {
	const access = "let only root write there"
	if err := journal.CheckDir(stateDir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return term.WithHint(access, "%w", err)
	}
	var st unix.Statfs_t
	err := durable.CannotCreate(stateDir)
	switch {
	case errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0:
		return nil
	case err == nil && unix.Statfs(stateDir, &st) == nil && st.Bfree == 0,
		errors.Is(err, unix.ENOSPC):
		return term.WithHint("free disk space", "the disk of %s is full", stateDir)
	case err == nil:
		return nil
	case errors.Is(err, unix.EROFS):
		return term.WithHint("remount it read-write", "%w", err)
	}
	return term.WithHint(access, "%w", err)
}

// CheckNetwork returns an error if no conflist and no present or past attachment of this node names
// the network. It returns nil if it cannot read a file that may name the network.
func CheckNetwork(ctx context.Context, at node.Directories, network string) error {
	if network == "" {
		return nil
	}
	store := &journal.Store{Dir: at.StateDir}
	attachments, err := ReadJournal(ctx, store)
	events, historyErr := store.History()
	if err != nil || historyErr != nil {
		return nil //nolint:nilerr // the journal may contain the network
	}
	var networks []string
	for _, a := range append(attachments, attachmentsOf(Told(events))...) {
		networks = append(networks, a.Network)
	}
	cached, _ := new(facts.Node).Cache()
	for _, c := range cached {
		networks = append(networks, c.Network)
	}
	for _, dir := range at.All() {
		paths, err := pools.Conflists(dir)
		if err != nil {
			return nil //nolint:nilerr // a conflist there may have the network
		}
		for _, path := range paths {
			c, _ := netconf.ReadConflist(path)
			if c == nil {
				return nil
			}
			networks = append(networks, c.Name)
		}
	}
	if slices.Contains(networks, network) {
		return nil
	}
	hint := "this node has no network yet"
	if slices.Sort(networks); len(networks) > 0 {
		hint = "the networks of this node: " + strings.Join(slices.Compact(networks), ", ")
	}
	return term.WithHint(hint, "--network %s: no conflist in %s and no attachment on this node has "+
		"this network", network, strings.Join(at.All(), ", "))
}

// Pools returns the host-local pools in the scope, and all networks that unwind runs. Unless Ours
// is set, the pools include those of chains that unwind does not run.
func (s Scope) Pools() ([]sweep.Pool, []sweep.Network, error) {
	pools, networks, err := pools.Read(s.StateDir, s.All()...)
	return slices.DeleteFunc(pools, func(p sweep.Pool) bool {
		return s.Network != "" && p.Network != s.Network || s.Ours && p.Plain
	}), networks, err
}
