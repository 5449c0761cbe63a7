package decide

import "cni-unwind/plugin/tristate"

// Fact is yes, no or unknown. nil is unknown. Package facts looks at a fact when it is first asked,
// and at most once. A tristate.Value is a fact that needs no look.
type Fact interface {
	// Ask returns the fact and, if it is unknown, why, for people.
	Ask() (v tristate.Value, why string)
}

func ask(f Fact) (v tristate.Value, why string) {
	if f == nil {
		return tristate.Unknown, ""
	}
	return f.Ask()
}

// Yes reports whether a fact is known to be so.
func Yes(f Fact) bool { v, _ := ask(f); return v == tristate.Yes }

// No reports whether a fact is known not to be so.
func No(f Fact) bool { v, _ := ask(f); return v == tristate.No }

func unknown(f Fact) bool { v, _ := ask(f); return v == tristate.Unknown }

// why returns why the first unknown fact is unknown, or "".
func why(facts ...Fact) string {
	for _, f := range facts {
		if _, why := ask(f); why != "" {
			return why
		}
	}
	return ""
}
