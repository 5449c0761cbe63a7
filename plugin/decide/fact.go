package decide

import "cni-unwind/plugin/tristate"

// Fact is yes, no or unknown. nil is unknown. Package facts determines a fact when it is first
// needed, and only once. A tristate.Value is a fact that is already determined.
type Fact interface {
	// Ask returns the fact. If it is unknown, why explains that to people.
	Ask() (v tristate.Value, why string)
}

func ask(f Fact) (v tristate.Value, why string) {
	if f == nil {
		return tristate.Unknown, ""
	}
	return f.Ask()
}

// Yes reports whether a fact is known to be true.
func Yes(f Fact) bool { v, _ := ask(f); return v == tristate.Yes }

// No reports whether a fact is known to be false.
func No(f Fact) bool { v, _ := ask(f); return v == tristate.No }

func unknown(f Fact) bool { v, _ := ask(f); return v == tristate.Unknown }

// why returns the reason why the first unknown fact is unknown, or "".
func why(facts ...Fact) string {
	for _, f := range facts {
		if _, why := ask(f); why != "" {
			return why
		}
	}
	return ""
}
