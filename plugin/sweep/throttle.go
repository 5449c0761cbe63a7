package sweep

import (
	"slices"
	"sync"
)

// throttle limits the retries of failing DELs in a periodic sweep. It tries only a few of the
// attachments whose pending DELs have all failed before, per plugin. The sweep begins with the
// longest untried ones, so each gets its turn. Once a DEL of a plugin has passed, all attachments
// with a pending DEL of that plugin are ready to retry.
type throttle struct {
	ignoreBackoff bool // try all

	mu     sync.Mutex
	tries  map[string]int  // by plugin
	passed map[string]bool // plugins with a DEL that failed before and has passed now
}

// probes is the number of attachments to try for each plugin whose DELs fail.
const probes = 3

// try releases an attachment with settle, unless each of its failing plugins was tried often
// enough.
func (p *throttle) try(f *Finding, settle func()) {
	before := f.failing
	if f.Deferred = !p.admits(before); f.Deferred {
		return
	}
	settle()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, plugin := range before {
		if !slices.Contains(f.failing, plugin) {
			p.passed[plugin] = true
		}
	}
}

func (p *throttle) admits(plugins []string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ignoreBackoff && len(plugins) > 0 && !slices.ContainsFunc(plugins, func(plugin string) bool {
		return p.passed[plugin] || p.tries[plugin] < probes
	}) {
		return false
	}
	for _, plugin := range plugins {
		p.tries[plugin]++
	}
	return true
}

// worksAgain reports whether an attachment waits for a plugin that works again.
func (p *throttle) worksAgain(f *Finding) bool {
	return f.Deferred &&
		slices.ContainsFunc(f.failing, func(plugin string) bool { return p.passed[plugin] })
}
