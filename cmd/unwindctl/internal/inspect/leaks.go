package inspect

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/sweep"
)

// Leaks describes the resources that may remain on this machine if an attachment's DELs never run.
func Leaks(f *sweep.Finding) (leaks []string) {
	if len(f.Records) == 0 {
		return []string{"unknown: the attachment's journal entry cannot be read"}
	}
	e := f.Records[0]
	for _, l := range e.Got.HostLinks {
		if is, err := net.InterfaceByName(l.Name); err != nil || is.HardwareAddr.String() != l.MAC {
			continue // it is gone, or another interface has its name
		}
		leaks = append(leaks, fmt.Sprintf("interface %s (%s) on the host", l.Name, l.MAC))
	}
	for _, s := range e.Undo.Steps {
		leaks = append(leaks, leaksOfStep(e, &s)...)
	}
	slices.Sort(leaks)
	return slices.Compact(leaks)
}

func leaksOfStep(e *journal.Entry, s *journal.Step) (leaks []string) {
	addresses := term.Join(term.Addresses(e.Addresses()))
	plugin := known.IPAMOf(s.Config).Name
	if pool := ipam.Pool(plugin, s.Config, e.Network); pool != "" {
		held, _ := ipam.HeldBy(pool, e.ContainerID, e.IfName)
		for _, a := range held {
			leaks = append(leaks, fmt.Sprintf("%s: a host-local reservation",
				filepath.Join(pool, a.String())))
		}
	} else if plugin != "" {
		leaks = append(leaks, fmt.Sprintf("the records of %s for container %s, such as %s",
			plugin, e.ContainerID, addresses))
	}
	if s.Type != "loopback" && s.Type != "static" { // these leave nothing behind
		leaks = append(leaks, fmt.Sprintf("anything that %s created for container %s, interface %s",
			s.Type, e.ContainerID, e.IfName))
	}
	return leaks
}
