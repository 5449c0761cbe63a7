// Package tristate has answers that may be unknown: a look can fail, and then nothing may be
// concluded.
package tristate

// Value is the answer to a question. The zero value is Unknown.
type Value int

const (
	Unknown Value = iota // nobody looked, or the look failed
	No
	Yes
)

// Of returns Yes or No for b, and Unknown if the look failed with an error.
func Of(b bool, err error) Value {
	switch {
	case err != nil:
		return Unknown
	case b:
		return Yes
	}
	return No
}

// Equal says whether two things are equal, or Unknown if they cannot be compared.
func Equal(comparable, equal bool) Value {
	if !comparable {
		return Unknown
	}
	return Of(equal, nil)
}

func (a Value) String() string { return [...]string{"unknown", "no", "yes"}[a] }
