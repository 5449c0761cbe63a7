package trial

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/containernetworking/plugins/pkg/ip"
	"github.com/containernetworking/plugins/pkg/ns"
	probing "github.com/prometheus-community/pro-bing"
	"github.com/vishvananda/netlink"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// works runs the steps with an attachment that should work.
func (s *space) works() {
	if s.step("ADD", s.add) {
		s.step("interface", s.hasResult)
		s.step("gateway", s.ping)
		if !s.Plain {
			s.step("record", s.isRecorded)
		}
		checks, _ := version.GreaterThanOrEqualTo(s.list.CNIVersion, "0.4.0")
		if checks && !s.list.DisableCheck {
			s.step("CHECK", func(ctx context.Context) (string, error) {
				_, err := s.verb(ctx, "CHECK")
				return s.plugins(), err
			})
		}
	}
	if s.step("DEL", func(ctx context.Context) (string, error) {
		_, err := s.verb(ctx, "DEL")
		if s.deletesLink = !s.hasInterface(); err == nil {
			err = os.Remove(filepath.Join(s.dir, listOf)) // no other DEL is needed
		} else if a, _ := s.record(ctx, s.conf.StateDir); a != nil {
			err = s.explained("%w; pending DELs: %s", err, pending(a))
		}
		if s.result == nil { // the ADD failed, so some plugins may not have run
			return "", err
		}
		return s.plugins(), err
	}) {
		s.step("nothing left", func(ctx context.Context) (string, error) {
			return s.nothingLeft(ctx, s.conf.StateDir)
		})
	}
}

// isUndone runs the steps with an attachment whose last plugin fails.
func (s *space) isUndone() {
	if s.step("failing ADD", s.addFails) && s.step("rolled back", s.isRolledBack) &&
		s.step("swept", s.repairAndSweep) {
		s.step("nothing left", func(ctx context.Context) (string, error) {
			return s.nothingLeft(ctx, s.stateDir())
		})
	}
}

func (s *space) add(ctx context.Context) (string, error) {
	result, err := s.verb(ctx, "ADD")
	if err != nil {
		return "", err
	}
	raw, _ := json.Marshal(result)
	parsed, _ := netconf.ParseResult(raw)
	s.links = facts.HostLinks(parsed)
	s.result, err = types100.NewResultFromResult(result)
	return s.plugins(), err
}

func (s *space) plugins() string {
	var names []string
	for _, d := range s.chain.Delegates {
		names = append(names, d.Type)
	}
	return strings.Join(names, " → ")
}

// inside calls a function in the attachment's network namespace, with its interface.
func (s *space) inside(do func(netlink.Link) error) error {
	return ns.WithNetNSPath(s.netns(), func(ns.NetNS) error {
		link, err := netlink.LinkByName(ifName)
		if err != nil {
			return fmt.Errorf("%s: %w", ifName, err)
		}
		return do(link)
	})
}

func (s *space) hasInterface() bool {
	return s.inside(func(netlink.Link) error { return nil }) == nil
}

// hasResult checks that the interface is up, with the addresses and routes of the result.
func (s *space) hasResult(context.Context) (text string, err error) {
	return text, s.inside(func(link netlink.Link) error {
		if link.Attrs().OperState == netlink.OperDown {
			return fmt.Errorf("%s is down", ifName)
		}
		text = ifName + " is up"
		has, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		for _, ip := range s.result.IPs {
			if err == nil && !slices.ContainsFunc(has, func(a netlink.Addr) bool {
				return a.IP.Equal(ip.Address.IP)
			}) {
				err = fmt.Errorf("%s lacks the result's address %s", ifName, &ip.Address)
			}
			text += ", " + ip.Address.String()
		}
		for _, route := range s.result.Routes {
			text += ", route to " + route.Dst.String()
		}
		return cmp.Or(err, ip.ValidateExpectedRoute(s.result.Routes))
	})
}

// pingWithin limits the wait for a gateway's reply. An IPv6 address may be tentative for 2 s.
const pingWithin = 5 * time.Second

// ping checks that the gateways reply. Some gateways never do, so a missing reply is only a
// warning.
func (s *space) ping(ctx context.Context) (string, error) {
	var replied []string
	for _, ip := range s.result.IPs {
		gateway := ip.Gateway
		if gateway == nil {
			continue
		}
		p := probing.New("")
		err := s.inside(func(link netlink.Link) error {
			to := &net.IPAddr{IP: gateway}
			if gateway.IsLinkLocalUnicast() && gateway.To4() == nil {
				to.Zone = strconv.Itoa(link.Attrs().Index)
			}
			p.SetIPAddr(to)
			p.SetPrivileged(true)
			p.Timeout, p.Interval = pingWithin, pingWithin/20
			p.OnRecv = func(*probing.Packet) { p.Stop() }
			return p.RunWithContext(ctx)
		})
		if err == nil && p.Statistics().PacketsRecv == 0 {
			err = fmt.Errorf("no reply within %s", pingWithin)
		}
		if err != nil {
			return "", warning{term.WithHint("check the host's firewall; if the gateway is outside "+
				"this host, it may be configured not to reply", "ping of %s: %w", gateway, err)}
		}
		replied = append(replied, gateway.String())
	}
	if replied == nil {
		return "the result names no gateway", nil
	}
	return "reply from " + term.Join(replied), nil
}

// record returns the attachment's record in a journal, or nil if there is none.
func (s *space) record(ctx context.Context, stateDir string) (*inspect.Attachment, error) {
	all, err := inspect.ReadJournal(ctx, &journal.Store{Dir: stateDir})
	for i := range all {
		if all[i].ContainerID == s.id {
			return &all[i], nil
		}
	}
	return nil, journal.IgnoreDamaged(err) // doctor reports damaged records
}

func (s *space) explained(format string, args ...any) error {
	hint := "unwindctl show " + s.id + " explains why; sweeps retry these DELs"
	return term.WithHint(hint, format, args...)
}

func (s *space) isRecorded(ctx context.Context) (string, error) {
	a, err := s.record(ctx, s.conf.StateDir)
	if err == nil && (a == nil || a.State != journal.Live) {
		err = fmt.Errorf("the ADD ran without the journal in %s: if it had failed, unwind would have "+
			"rolled it back, but would not have retried failed DELs", s.conf.StateDir)
	}
	return "in the journal in " + s.conf.StateDir, err
}

// pending describes the pending DELs of a record, which may be nil. It omits DELs that wait for
// other DELs.
func pending(a *inspect.Attachment) string {
	var all []string
	if a != nil {
		for _, step := range a.Steps {
			if !step.WaitsFor.Blocked() {
				all = append(all, step.Plugin+term.Because(step.Last))
			}
		}
	}
	return strings.Join(all, "; ")
}

func (s *space) addFails(ctx context.Context) (string, error) {
	err := cmp.Or(s.linkPlugin(), os.WriteFile(s.bin(failing), nil, 0o600))
	if err != nil {
		return "", err
	}
	text, err := s.add(ctx)
	if err == nil {
		return "", term.WithHint("this is a bug in unwind: please report it, with the file that "+
			"unwindctl report writes", "the ADD succeeded, although its last plugin failed")
	}
	a, readErr := s.record(ctx, s.stateDir())
	if !strings.Contains(pending(a), PluginName) { // another plugin failed
		return "", errors.Join(readErr, err)
	}
	return text + s.plugins() + " → a plugin that fails", nil
}

func (s *space) isRolledBack(ctx context.Context) (string, error) {
	a, err := s.record(ctx, s.stateDir())
	switch {
	case err != nil:
		return "", err
	case len(a.Steps) > 1:
		return "", term.WithHint("fix the plugins whose DEL fails",
			"besides the failing plugin's DEL, others are pending: %s", pending(a))
	case s.deletesLink && s.hasInterface():
		return "", fmt.Errorf("%s still exists", ifName)
	}
	return "only the DEL of the failing plugin is pending", s.noAddress()
}

// repairAndSweep repairs the plugin that fails on purpose (see Plugin), and sweeps the attachment.
func (s *space) repairAndSweep(ctx context.Context) (string, error) {
	if err := os.Remove(s.bin(failing)); err != nil {
		return "", err
	}
	found, err := inspect.Plugin(s.Stderr).Sweep(ctx, s.stateDir(), sweep.Options{
		Attachment: &journal.Key{Network: s.list.Name, ContainerID: s.id, IfName: ifName}})
	for i := range found {
		result, why := inspect.Result(&found[i], false)
		if err == nil && (result != inspect.Released || found[i].Err != nil) {
			err = fmt.Errorf("the sweep did not release the attachment completely (%s): %s", result, why)
		}
	}
	if err == nil {
		err = os.Remove(filepath.Join(s.dir, listOf))
	}
	return "once the plugin was repaired", err
}

func (s *space) noAddress() error {
	for _, pool := range sweep.PoolsOf(s.chain, s.conf) {
		held, err := ipam.HeldBy(pool.Dir, s.id, ifName)
		if err == nil && len(held) > 0 {
			err = fmt.Errorf("%s still contains %s", pool.Dir, term.Join(term.Addresses(held)))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// goneWithin is the time that the kernel may take to remove the links of a network namespace.
const goneWithin = 3 * time.Second

// nothingLeft removes the network namespace, and checks that nothing of the attachment is left.
func (s *space) nothingLeft(ctx context.Context, stateDir string) (string, error) {
	s.removeNetns()
	there, err := facts.LinkThere(s.links)
	for end := time.Now().Add(goneWithin); there && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
		there, err = facts.LinkThere(s.links)
	}
	if there {
		err = fmt.Errorf("the interface %s is still on the host", s.links[0].Name)
	}
	text := "no address, no interface"
	if err = cmp.Or(err, s.noAddress()); err == nil && !s.Plain {
		var a *inspect.Attachment
		if a, err = s.record(ctx, stateDir); err == nil && a != nil {
			err = s.explained("the journal still contains the attachment; pending DELs: %s", pending(a))
		}
		text += ", no record"
	}
	return text, err
}
