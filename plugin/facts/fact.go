package facts

import (
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/tristate"
)

// Fact is a decide.Fact that calls look when Ask is first called, and only once. Only one goroutine
// may use it.
type Fact struct {
	look   func() (tristate.Value, error)
	value  tristate.Value
	why    string
	looked bool
}

// lookFor returns a fact that check determines. If check returns an error, the fact is unknown, and
// the error is the reason.
func lookFor(check func() (bool, error)) *Fact {
	return &Fact{look: func() (tristate.Value, error) {
		is, err := check()
		return tristate.Of(is, err), err
	}}
}

// Ask returns the fact. If the fact is unknown, why contains the reason.
func (f *Fact) Ask() (v tristate.Value, why string) {
	if !f.looked {
		var err error
		f.value, err = f.look()
		f.why, f.looked = Doubt(err), true
	}
	return f.value, f.why
}

// Known returns a fact without determining it. looked is false if the fact has not been determined
// yet.
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
