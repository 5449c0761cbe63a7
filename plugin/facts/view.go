package facts

import (
	"cmp"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"cni-unwind/journal"
)

// View caches facts about the whole node for one second. The workers of a verb share it, so a sweep
// of many attachments inspects the node only once.
type View struct {
	mu        sync.Mutex
	members   seen[map[string][]string] // see lookAtMembers
	cgroups   seen[map[string]bool]
	addresses seen[map[netip.Addr]bool] // in all network namespaces
}

// seen is a cached fact. err says why something may be missing from it.
type seen[T any] struct {
	looked time.Time
	found  T
	err    error
}

// viewAge is how long a cached fact stays current.
const viewAge = time.Second

// get returns the cached fact. It calls look if the fact is older than viewAge.
func (s *seen[T]) get(look func() (T, error)) (T, error) {
	if now := time.Now(); now.Sub(s.looked) >= viewAge {
		s.found, s.err = look()
		s.looked = now
	}
	return s.found, s.err
}

// OpenByProcess opens a network namespace through a process in it. If there is no such process, it
// returns an empty Place. An error means that there may be one, because some process cannot be
// inspected. If rescan is set, OpenByProcess ignores cached facts, which may lack a new process.
// Callers set it for an attachment without other evidence.
func (v *View) OpenByProcess(id journal.NetNS, ifname string, rescan bool) (Place, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	place, err := search(id, ifname, func(again bool) ([]string, error) {
		if rescan || again {
			v.members.looked = time.Time{}
		}
		all, err := v.members.get(lookAtMembers)
		return all[LinkOf(id)], err
	})
	if place.There() { // the process may exit, and its ID may be reused
		place.Path = place.Pinned()
	}
	return place, err
}

// ProcessIn reports whether a process is in the network namespace (see OpenByProcess).
func (v *View) ProcessIn(id journal.NetNS, rescan bool) (bool, error) {
	place, err := v.OpenByProcess(id, "", rescan)
	place.Close()
	return place.There(), err
}

// lookAtMembers returns paths to each network namespace that contains a process. The keys are the
// namespaces' link texts (see LinkOf).
func lookAtMembers() (map[string][]string, error) {
	all := map[string][]string{}
	pids, err := Processes()
	for _, pid := range pids {
		path, link, memberErr := memberOf(pid)
		if err = cmp.Or(err, memberErr); link != "" {
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
	v.mu.Lock()
	defer v.mu.Unlock()
	all, err := v.addresses.get(lookAtAddresses)
	if slices.ContainsFunc(addresses, func(a netip.Addr) bool { return all[a.Unmap()] }) {
		return true, nil
	}
	return false, err
}

// lookAtAddresses returns the addresses in all network namespaces that contain a process or are
// mounted at a reachable path. While it runs, a namespace may disappear, or a process may exit. So
// it starts again, up to twice, if it could not inspect a namespace.
func lookAtAddresses() (all map[netip.Addr]bool, err error) {
	for range 3 {
		all = map[netip.Addr]bool{}
		members, memberErr := lookAtMembers()
		mounts, mountErr := lookAtMounts()
		errs := []error{memberErr, mountErr}
		for link, points := range mounts {
			for _, point := range points {
				switch err := addAddresses(point, link, all); {
				case err == nil:
					delete(members, link)
				case !IsNoNetNS(err) && !errors.Is(err, errElsewhere): // the path still leads to it
					errs = append(errs, err)
				}
			}
		}
		for link, paths := range members {
			var err error
			for _, path := range paths {
				if err = addAddresses(path, link, all); err == nil {
					break
				}
			}
			errs = append(errs, err)
		}
		if err = errors.Join(errs...); err == nil {
			break
		}
	}
	return all, err
}

// ContainerRuns reports whether a process runs in a container, according to its cgroup (see
// namesContainer). An error means that some cgroups could not be read.
func (v *View) ContainerRuns(id string) (bool, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	all, err := v.cgroups.get(lookAtCgroups)
	for path := range all {
		if namesContainer(path, id) {
			return true, nil
		}
	}
	return false, err
}

// lookAtCgroups returns the cgroup lines of all processes, such as
// "0::/system.slice/containerd.service".
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

// namesContainer reports whether a directory in a cgroup path belongs to a container. With
// cgroupfs, the directory's name is the container ID. With systemd, it has a prefix that the
// runtime chooses:
//
//	/kubepods/burstable/pod1234/ID
//	/kubepods.slice/kubepods-pod1234.slice/cri-containerd-ID.scope
//	/kubepods.slice/kubepods-pod1234.slice:cri-containerd:ID
//
// A short ID, which no runtime creates, must be the whole name. crictl, nerdctl and podman print at
// least 12 characters.
func namesContainer(path, id string) bool {
	for name := range strings.SplitSeq(path, "/") {
		name = strings.TrimSuffix(name, ".scope")
		if rest, is := strings.CutSuffix(name, id); is && (rest == "" ||
			len(id) >= 12 && (strings.HasSuffix(rest, "-") || strings.HasSuffix(rest, ":"))) {
			return true
		}
	}
	return false
}
