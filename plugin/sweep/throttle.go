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

func newThrottle(ignoreBackoff bool) *throttle {
	return &throttle{ignoreBackoff: ignoreBackoff, tries: map[string]int{}, passed: map[string]bool{}}
}

// try releases an attachment with settle, unless each of its failing plugins was tried often
// enough.
func (p *throttle) try(f *Finding, settle func()) {
	before := f.failing
	if f.throttled = !p.admits(before); f.throttled {
		f.Deferred = true
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

// ready returns the deferred attachments with a pending DEL of a plugin that works again.
func (p *throttle) ready(findings []Finding) (ready []*Finding) {
	for i := range findings {
		f := &findings[i]
		works := slices.ContainsFunc(f.failing, func(plugin string) bool { return p.passed[plugin] })
		if f.Deferred && works && f.Releasable() && f.Err == nil {
			f.Deferred = false
			ready = append(ready, f)
		}
	}
	return ready
}
