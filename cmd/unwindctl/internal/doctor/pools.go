package doctor

import (
	"fmt"

	"cni-unwind/cmd/unwindctl/internal/inspect"
)

// pools reports how full each range set of each pool is.
func (e *examination) pools(found *inspect.Node) {
	if found.PoolErr != nil {
		e.add("pools", Warning, "", "%v", found.PoolErr)
	}
	for _, p := range found.Pools {
		name := fmt.Sprintf("%s (%s)", p.Network, p.Dir)
		if len(p.Sets) == 0 {
			e.add("pools", OK, "", "%s: no address used; the chain does not define its ranges", name)
		}
		for _, s := range p.Sets {
			e.set(name, s)
		}
	}
}

func (e *examination) set(pool string, s *inspect.Set) {
	text := fmt.Sprintf("%s: %s (%d leaked, %d ownerless, %d unknown)", pool, s, s.Leaked,
		s.Ownerless, s.Unknown)
	switch {
	case s.Full():
		e.add("pools", Failure, "unwindctl ipam --cri auto shows who has them", "%s", text)
	case s.NearlyFull():
		e.add("pools", Warning, "unwindctl ipam --cri auto shows who has them", "%s: nearly full", text)
	case s.Leaked+s.Ownerless > 0:
		e.add("pools", Warning, "unwindctl sweep releases them", "%s", text)
	default:
		e.add("pools", OK, "", "%s", text)
	}
}
