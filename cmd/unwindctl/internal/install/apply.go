package install

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// WriteConflist writes our file atomically, as planned. From then on unwind is in use.
//
//  1. Keep a copy of the provider's file. If the disk is full, go on without it.
//  2. Repair other programs' files.
//  3. Write our file, unless the existing one is equivalent.
//  4. Remove the file that off has kept. A crash here leaves it, and the next off replaces it.
func (s Setup) WriteConflist(p *Plan) (changed bool, err error) {
	if err := s.prepareState(); err != nil {
		return false, err
	}
	_ = s.keepCopy(p.Source)
	for _, r := range p.repairs {
		if err := r.apply(); err != nil {
			return false, err
		}
	}
	if !p.changed {
		return false, nil
	}
	if err := durable.Replace(p.path, bytes.NewReader(p.content), 0o644); err != nil {
		return false, err
	}
	for _, path := range s.kept() { // also in the other form, which on would mistake for this file
		err = errors.Join(err, durable.Remove(path))
	}
	return true, err
}

// prepareState creates the state directory, so that a failure shows now and not at each pod's ADD.
// It refuses to switch from a journal with attachments to another one, because nothing would
// release them.
func (s Setup) prepareState() error {
	old := s.Entry()
	dir, is := s.stateDir(), cmp.Or(old.StateDir, netconf.DefaultStateDir)
	if dir != is && old.ChainFile != "" {
		attachments, err := inspect.ReadJournal(context.Background(), &journal.Store{Dir: is})
		if err != nil {
			return term.WithHint("install with --state-dir "+is+" to keep that journal; unwindctl doctor "+
				"--state-dir "+is+" reports how to repair it", "cannot read the journal in %s, so its "+
				"attachments could be lost if the state directory changed: %w", is, err)
		}
		if len(attachments) > 0 {
			hint := "leave the journal there, or wait until unwindctl list --state-dir " + is + " is empty"
			return term.WithHint(hint,
				"the journal in %s contains %s, which nothing would release if the state directory changed",
				is, term.Attachments(len(attachments)))
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return term.WithHint("choose another directory with --state-dir",
			"cannot create the state directory: %w", err)
	}
	return nil
}

// Remove takes our file in either form out of use, even if other programs have changed it. It
// renames the file, so that the next install finds its configuration, or else removes it, which
// needs no disk space. A missing file is not an error. Remove first repairs other programs' files.
// If that fails, Remove still takes our file out of use and returns the error. It returns the
// previous paths, and a text about each repaired file.
func (s Setup) Remove() (removed, said []string, err error) {
	repairs, err := s.repairs()
	for _, r := range repairs {
		if applyErr := r.apply(); applyErr != nil {
			err = errors.Join(err, applyErr)
			continue
		}
		said = append(said, r.text)
	}
	for _, path := range []string{s.Path(), s.otherForm()} {
		data, readErr := netconf.ReadFile(path)
		if errors.Is(readErr, fs.ErrNotExist) {
			continue
		}
		own, _ := netconf.ReadConflist(path)
		switch {
		case ours(own):
			_ = durable.Rename(path, path+node.OffSuffix) // if this fails, the file is removed below
		case readErr == nil && !json.Valid(data): // an incomplete file, which nothing can use
		case path == s.Path():
			return removed, said, term.WithHint("rename it, or choose another name with --unwind-file",
				"unwindctl did not write %s, and leaves it unchanged", path)
		default:
			continue
		}
		if removeErr := durable.Remove(path); removeErr != nil {
			return removed, said, errors.Join(err, term.WithHint("unwind is still in use; run this "+
				"again once "+s.ConfDir+" is writable", "%w", removeErr))
		}
		removed = append(removed, path)
	}
	return removed, said, err
}
