package facts

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// View caches facts about the whole node, so that the workers of a verb share them.
type View struct {
	members   seen[map[string][]string] // see lookAtMembers
	cgroups   seen[map[string]bool]
	addresses seen[map[netip.Addr]bool] // in all network namespaces
}

type seen[T any] struct {
	sync.Mutex
	looked time.Time
	found  T
	err    error // why found may be incomplete
}

const viewAge = time.Second // how long a cached fact stays current

// get returns the cached fact. If it is older than viewAge, or anew is set, get first calls look.
func (s *seen[T]) get(anew bool, look func() (T, error)) (T, error) {
	s.Lock()
	defer s.Unlock()
	if now := time.Now(); anew || now.Sub(s.looked) >= viewAge {
		s.found, s.err = look()
		s.looked = now
	}
	return s.found, s.err
}

// OpenByProcess opens a network namespace through a process in it, or returns an empty Place. An
// error means that the namespace may contain a process that cannot be inspected. Callers without
// other evidence about the attachment set rescan, because cached facts may lack a new process.
func (v *View) OpenByProcess(id journal.NetNS, ifname string, rescan bool) (Place, error) {
	place, err := search(id, ifname, func(again bool) ([]string, error) {
		all, err := v.members.get(rescan || again, lookAtMembers)
		return all[linkOf(id)], err
	})
	if place.There() { // the process may exit, and its ID may be reused
		place.Path = place.Pinned()
	}
	return place, err
}

// ProcessIn reports whether any process is in a network namespace (see OpenByProcess).
func (v *View) ProcessIn(id journal.NetNS, rescan bool) (bool, error) {
	place, err := v.OpenByProcess(id, "", rescan)
	place.Close()
	return place.There(), err
}

// lookAtMembers returns, by link text, paths to each network namespace that contains a process.
func lookAtMembers() (map[string][]string, error) {
	all := map[string][]string{}
	pids, err := Processes()
	for _, pid := range pids {
		path, link, memberErr := memberOf(pid)
		err = cmp.Or(err, memberErr)
		if link != "" {
			all[link] = append(all[link], path)
		}
	}
	return all, cmp.Or(checkAllShown(), err)
}

// Uses reports whether an interface in any network namespace has one of the addresses. An error
// means that some namespace could not be inspected.
func (v *View) Uses(addresses []netip.Addr) (bool, error) {
	if len(addresses) == 0 {
		return false, nil
	}
	all, err := v.addresses.get(false, lookAtAddresses)
	if slices.ContainsFunc(addresses, func(a netip.Addr) bool { return all[a.Unmap()] }) {
		return true, nil
	}
	return false, err
}

// lookAtAddresses returns the addresses in all network namespaces that contain a process or are
// mounted at a reachable path. A namespace may disappear during the inspection. So if one cannot be
// inspected, lookAtAddresses starts again, up to twice.
func lookAtAddresses() (all map[netip.Addr]bool, err error) {
	for range 3 {
		all = map[netip.Addr]bool{}
		members, memberErr := lookAtMembers()
		paths, mountErr := lookAtMounts()
		for link, its := range members {
			paths[link] = append(paths[link], its...)
		}
		errs := []error{memberErr, mountErr}
		for link, its := range paths {
			found, err := addressesIn(link, its)
			for _, a := range found {
				all[a] = true
			}
			if len(members[link]) > 0 || !errors.Is(err, errElsewhere) { // else another mount hides it
				errs = append(errs, err)
			}
		}
		if err = errors.Join(errs...); err == nil {
			break
		}
	}
	return all, err
}

// addressesIn returns the addresses in a network namespace, given its link text and paths to it. If
// no path leads to it any more, the error is errElsewhere.
func addressesIn(link string, paths []string) (all []netip.Addr, err error) {
	err = errElsewhere
	for _, path := range paths {
		place, openErr := Open(path, "")
		here := openErr == nil && linkOf(place.Seen.Netns) == link
		if here {
			err = In(place.held, func() error {
				found, err := net.InterfaceAddrs()
				all = addressesOf(found)
				return err
			})
		} else if openErr != nil && !IsNoNetNS(openErr) {
			err = fmt.Errorf("network namespace %s: %w", path, openErr)
		}
		place.Close()
		if here {
			break
		}
	}
	return all, err
}

// containerRuns reports whether a container has a process, according to the processes' cgroups. An
// error means that /proc may not show all processes.
func (v *View) containerRuns(id string) (bool, error) {
	all, err := v.cgroups.get(false, lookAtCgroups)
	for path := range all {
		if namesContainer(path, id) {
			return true, nil
		}
	}
	return false, err
}

// lookAtCgroups returns the cgroup lines of all processes ("0::/system.slice/containerd.service").
func lookAtCgroups() (map[string]bool, error) {
	all := map[string]bool{}
	pids, err := Processes()
	for _, pid := range pids {
		text, _ := os.ReadFile(procOf(pid) + "/cgroup") // the process may have ended
		for line := range strings.Lines(string(text)) {
			all[strings.TrimSuffix(line, "\n")] = true
		}
	}
	return all, cmp.Or(err, checkAllShown())
}

// namesContainer reports whether a directory in a cgroup path belongs to a container. The
// directory's name is the container ID or, with systemd, has a prefix that the runtime chooses:
//
//	/kubepods/burstable/pod1234/ID
//	/kubepods.slice/kubepods-pod1234.slice/cri-containerd-ID.scope
//	/kubepods.slice/kubepods-pod1234.slice:cri-containerd:ID
//
// A short ID, which no runtime creates, must be the whole name.
func namesContainer(path, id string) bool {
	return slices.ContainsFunc(strings.Split(path, "/"), func(name string) bool {
		rest, is := strings.CutSuffix(strings.TrimSuffix(name, ".scope"), id)
		return is && (rest == "" ||
			len(id) >= 12 && (strings.HasSuffix(rest, "-") || strings.HasSuffix(rest, ":")))
	})
}

// memberOf returns a path to the network namespace of a process, and its link text, which is "" if
// the process has ended. It tries all threads, because the main thread may end before the others.
func memberOf(pid int) (path, link string, err error) {
	path = procOf(pid) + "/ns/net"
	if link, err = readNS(path); link != "" || err != nil {
		return path, link, err
	}
	others, _ := filepath.Glob(procOf(pid) + "/task/*/ns/net")
	for _, path = range others {
		if link, err = readNS(path); link != "" || err != nil {
			break
		}
	}
	return path, link, err
}

// readNS returns the text of a link in a thread's ns directory, or "" if the thread has ended, or
// has left its namespaces. The kernel returns EACCES both for a thread that is reaped during the
// read and for one that the caller may not inspect (proc_ns_readlink in fs/proc/namespaces.c). So
// readNS reads again after EACCES: the second read does not find a reaped thread.
func readNS(path string) (link string, err error) {
	link, err = os.Readlink(path)
	if errors.Is(err, fs.ErrPermission) {
		link, err = os.Readlink(path)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return "", nil
	}
	return link, err
}

// checkAllShown returns an error if this process may not inspect all other processes. /proc may
// then hide some of them (proc(5), hidepid).
func checkAllShown() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return err
	}
	if sets[0].Effective&(1<<unix.CAP_SYS_PTRACE) == 0 {
		return errors.New("unwind is not permitted to inspect all processes; run it as root with " +
			"CAP_SYS_PTRACE")
	}
	_, err := os.Readlink("/proc/1/ns/net")
	return err
}

func Processes() (pids []int, err error) {
	files, err := os.ReadDir("/proc")
	for _, f := range files {
		if pid, err := strconv.Atoi(f.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	if err == nil && len(pids) == 0 {
		err = errors.New("/proc shows no process; check that it is mounted")
	}
	return pids, err
}

func procOf(pid int) string { return fmt.Sprintf("/proc/%d", pid) }
