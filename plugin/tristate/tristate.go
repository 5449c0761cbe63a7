// Package tristate has truth values that may be unknown: if a check fails, nothing may be
// concluded.
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

// Ask returns the value: it is a decide.Fact that needs no look.
func (a Value) Ask() (v Value, why string) { return a, "" }

func (a Value) String() string { return [...]string{"unknown", "no", "yes"}[a] }
