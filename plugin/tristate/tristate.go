// Package tristate provides truth values that may be unknown. A failed check is neither yes nor no.
package tristate

// Value is yes, no or unknown. The zero value is Unknown.
type Value int

const (
	Unknown Value = iota // not checked, or the check failed
	No
	Yes
)

// Of returns Yes or No for b, or Unknown if the check failed with an error.
func Of(b bool, err error) Value {
	switch {
	case err != nil:
		return Unknown
	case b:
		return Yes
	}
	return No
}

// Equal returns whether two things are equal, or Unknown if they cannot be compared.
func Equal(comparable, equal bool) Value {
	if !comparable {
		return Unknown
	}
	return Of(equal, nil)
}

// Ask returns the value. With this method, a Value is a decide.Fact.
func (a Value) Ask() (v Value, why string) { return a, "" }

func (a Value) String() string { return [...]string{"unknown", "no", "yes"}[a] }
