package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// uninstallFlags are those of the command, as given.
type uninstallFlags struct {
	placeFlags
	cacheDir, stateDir string
}

func uninstallCommand() *cobra.Command {
	var flags uninstallFlags
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Take unwind out of this node's network",
		Long: "Take unwind out of this node's network: its conflist, and its binary as soon as nothing names it any more. From then on\n" +
			"the runtime takes the provider's conflist, also to release the pods that were added through unwind. CRI-O releases a\n" +
			"pod with the conflist of its start, so the binary stays as long as such pods run: run it again then.\n\n" +
			"The journal stays, and unwindctl sweep releases what is owed in it.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return uninstall(cmd, flags) },
	}
	addPlaceFlags(cmd, &flags.placeFlags)
	cmd.Flags().StringVar(&flags.cacheDir, "cache-dir", "/var/lib/cni", "the runtime's cache of libcni is in `DIR`")
	cmd.Flags().StringVar(&flags.stateDir, "state-dir", "", "the journal is in `DIR` (default: as unwind's conflist has it)")
	return cmd
}

func uninstall(cmd *cobra.Command, flags uninstallFlags) error {
	r, err := flags.find("/")
	if err != nil {
		return err
	}
	i := installation{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], File: flags.file}
	if flags.stateDir == "" {
		flags.stateDir = i.stateDir()
	}
	_, err = os.Lstat(i.path())
	had := err == nil
	if err := i.remove(); err != nil {
		return err
	}
	var text strings.Builder
	if had {
		fmt.Fprintf(&text, "removed:   %s\n", i.path())
	} else {
		fmt.Fprintf(&text, "unwind is not in use: there is no %s.\n", i.path())
	}
	said, binaryErr := i.removeBinary(cmd, flags.cacheDir, flags.stateDir)
	text.WriteString(said)
	text.WriteString(owed(cmd, flags.stateDir))
	_, err = cmd.OutOrStdout().Write([]byte(text.String()))
	return errors.Join(binaryErr, err)
}

// stateDir is that of our conflist.
func (i installation) stateDir() string {
	if c, _ := plugin.ReadConflist(i.path()); c != nil && c.Unwind != nil {
		return c.Unwind.StateDir
	}
	return plugin.DefaultStateDir
}

// removeBinary removes the plugin if nothing names it, and says what was done.
func (i installation) removeBinary(cmd *cobra.Command, cacheDir, stateDir string) (string, error) {
	path := filepath.Join(i.BinDir, plugin.Name)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	conflists, err := i.naming()
	known, knownErr := containersOf(cmd.Context(), stateDir)
	cached, cacheErr := cachedNaming(filepath.Join(cacheDir, "results"), known)
	if err = errors.Join(err, knownErr, cacheErr); err != nil {
		return fmt.Sprintf("kept:      %s (whether something names it cannot be told)\n", path), err
	}
	var why []string
	if len(conflists) > 0 {
		why = append(why, strings.Join(conflists, ", "))
	}
	switch cached {
	case 0:
	case 1:
		why = append(why, "1 attachment in libcni's cache")
	default:
		why = append(why, fmt.Sprintf("%d attachments in libcni's cache", cached))
	}
	if len(why) > 0 {
		return fmt.Sprintf("kept:      %s (named by %s; run unwindctl uninstall again when their pods are gone)\n", path,
			strings.Join(why, " and ")), nil
	}
	if about, _, err := askVersion(cmd.Context(), path); err != nil || !strings.Contains(about, plugin.Name) {
		//nolint:nilerr // what cannot be asked stays, and that is said
		return fmt.Sprintf("kept:      %s (it does not say that it is unwind)\n", path), nil
	}
	if err := removeFile(path); err != nil {
		return "", err
	}
	return fmt.Sprintf("removed:   %s\n", path), nil
}

// naming returns the conflists of the folder that have unwind in them.
func (i installation) naming() ([]string, error) {
	paths, err := plugin.Conflists(i.ConfDir)
	return slices.DeleteFunc(paths, func(path string) bool {
		c, _ := plugin.ReadConflist(path)
		return c == nil || !slices.Contains(c.Types, plugin.Name)
	}), err
}

// cachedNaming returns how many attachments libcni has cached with a configuration in which unwind is (cni libcni/api.go
// cachedInfo). CRI-O gives a DEL that configuration (ocicni pkg/ocicni/ocicni.go loadNetworkFromCache).
func cachedNaming(dir string, known map[string]bool) (int, error) {
	files, err := os.ReadDir(dir)
	if err != nil {
		return 0, ignoreMissing(err)
	}
	count := 0
	for _, f := range files {
		data, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if errors.Is(err, fs.ErrNotExist) || f.IsDir() {
			continue
		} else if err != nil {
			return 0, err
		}
		var cached struct {
			Config      []byte `json:"config"`
			ContainerID string `json:"containerId"`
			NetNS       string `json:"netns"`
		}
		if json.Unmarshal(data, &cached) != nil || !names(cached.Config, "") {
			continue
		}
		// One whose namespace is gone, and that the journal does not have any more, was swept: the runtime has forgotten it.
		if _, err := os.Stat(cached.NetNS); cached.NetNS == "" || err == nil || known[cached.ContainerID] {
			count++
		}
	}
	return count, nil
}

// containersOf returns the IDs of the containers that the journal has.
func containersOf(ctx context.Context, stateDir string) (map[string]bool, error) {
	attachments, err := readJournal(ctx, &journal.Store{Dir: stateDir})
	known := map[string]bool{}
	for _, a := range attachments {
		known[a.ContainerID] = true
	}
	return known, err
}

// owed says what the journal holds.
func owed(cmd *cobra.Command, stateDir string) string {
	store := &journal.Store{Dir: stateDir}
	attachments, err := readJournal(cmd.Context(), store)
	if err != nil {
		return fmt.Sprintf("The journal in %s stays; it cannot be read now: %s\n", stateDir, oneLine(err.Error()))
	}
	pending := 0
	for _, a := range attachments {
		if a.State == journal.Unwinding || a.State == journal.Removing {
			pending++
		}
	}
	if len(attachments) == 0 {
		return ""
	}
	return fmt.Sprintf("The journal in %s stays: %s, %d owed a DEL. The runtime releases those that live; unwindctl sweep%s releases the rest.\n",
		stateDir, attachmentsOf(len(attachments)), pending, stateDirFlag(stateDir))
}

func stateDirFlag(stateDir string) string {
	if stateDir == plugin.DefaultStateDir {
		return ""
	}
	return " --state-dir " + stateDir
}
