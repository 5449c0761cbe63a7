package facts

import (
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/tristate"
)

// Fact is a decide.Fact that is looked at when it is first asked for, and at most once. It is for
// one goroutine.
type Fact struct {
	look   func() (tristate.Value, error)
	value  tristate.Value
	why    string
	looked bool
}

// lookFor returns a fact that a look finds out. An error says why it is unknown.
func lookFor(is func() (bool, error)) *Fact {
	return &Fact{look: func() (tristate.Value, error) {
		is, err := is()
		return tristate.Of(is, err), err
	}}
}

// Ask returns the fact and, if it is unknown, why.
func (f *Fact) Ask() (v tristate.Value, why string) {
	if !f.looked {
		var err error
		f.value, err = f.look()
		f.why, f.looked = Doubt(err), true
	}
	return f.value, f.why
}

// Known returns a fact without a look. looked is false if nobody has asked for it.
func Known(f decide.Fact) (v tristate.Value, looked bool) {
	if own, is := f.(*Fact); is {
		return own.value, own.looked
	}
	if f == nil {
		return tristate.Unknown, false
	}
	v, _ = f.Ask()
	return v, true
}
