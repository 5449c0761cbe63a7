package decide

// Truth is yes, no or unknown: a failed check is neither yes nor no. The zero value is Unclear.
type Truth int

const (
	Unclear Truth = iota // not checked, or the check failed
	False
	True
)

// TruthOf returns True or False for b, or Unclear if the check failed with an error.
func TruthOf(b bool, err error) Truth {
	switch {
	case err != nil:
		return Unclear
	case b:
		return True
	}
	return False
}

// TruthIf returns whether two things are equal, or Unclear if they cannot be compared.
func TruthIf(comparable, equal bool) Truth {
	if !comparable {
		return Unclear
	}
	return TruthOf(equal, nil)
}

// Ask returns the Truth itself, and no reason. This method makes Truth a Fact.
func (a Truth) Ask() (v Truth, why string) { return a, "" }

func (a Truth) String() string { return [...]string{"unknown", "no", "yes"}[a] }
