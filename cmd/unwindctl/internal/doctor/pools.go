package doctor

import (
	"fmt"
	"math/big"

	"cni-unwind/cmd/unwindctl/internal/inspect"
)

// pools reports how full each pool is.
func (e *examination) pools(found *inspect.Node) {
	if found.PoolErr != nil {
		e.add("pools", Warning, "", "%v", found.PoolErr)
	}
	for _, p := range found.Pools {
		text := fmt.Sprintf("%s (%s): %s addresses, %d used, %d leaked, %d ownerless, %d unknown",
			p.Network, p.Dir, inspect.Count(p.Size),
			p.Used, p.Leaked, p.Ownerless, p.Unknown)
		switch {
		case p.Free != nil && p.Free.Sign() <= 0:
			e.add("pools", Failure, "unwindctl ipam shows who has them", "%s: none is free", text)
		case p.Free != nil && p.Free.Cmp(new(big.Int).Div(p.Size, big.NewInt(10))) < 0:
			e.add("pools", Warning, "unwindctl ipam shows who has them", "%s: nearly full", text)
		case p.Leaked+p.Ownerless > 0:
			e.add("pools", Warning, "unwindctl sweep releases them", "%s", text)
		default:
			e.add("pools", OK, "", "%s", text)
		}
	}
}
